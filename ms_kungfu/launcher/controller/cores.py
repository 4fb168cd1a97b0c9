"""The cores that the workers run on: shares of their hosts' cores, all equal once a program needs a fixed number."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable

from ms_kungfu.cluster import Cluster
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.processes import ProcessTable

_RETRY_S = 0.2


@dataclass(eq=False)
class WorkerCores:
    """Part of a `WorkerManager`, in its event loop. `pins`: -affinity; `cluster`: whose members have the cores."""

    processes: ProcessTable
    agents: Mapping[str, AgentHandle]
    pins: bool
    cluster: Callable[[], Cluster]

    def move(self, cluster: Cluster) -> None:
        """Move the members of `cluster` to their shares of the cores.

        If each worker has a fixed number of cores, move every other worker that hasn't got as many, too.
        """
        if not self.pins:
            return
        shares = {process.key: cores for process, cores in self.processes.shares(cluster)}
        for process in self.processes:
            cores, agent = shares.get(process.key), self.agents[process.host]
            if cores is None and agent.shares.each is not None and not process.has_its_cores:
                cores = agent.shares.of(process.rank + 1)[-1]
            if cores is not None and process.pid is not None:
                agent.pin(process.key, cores)
                process.has_its_cores = agent.shares.each is not None

    def resume(self, each: int) -> None:
        """Keep the number of cores a worker that an earlier controller has fixed; 0 if it has fixed none."""
        for agent in self.agents.values():
            agent.shares.each = agent.shares.each or each or None

    def joined(self, agent: AgentHandle) -> None:
        agent.shares.each = next(iter(self.agents.values())).shares.each  # all hosts have the same

    async def fix(self, each: int) -> int:
        """Fix the number of cores a worker, because a worker needs as many as all others have, and `each` is enough.

        Returns: The number that each has, now and at every size; 0 if workers aren't pinned. The worker trains once it
        has it.
        """
        while self.pins:
            for agent in self.agents.values():  # all with the same `each`
                agent.shares.each = agent.shares.each or each
            if all(process.pid is not None for process in self.processes):  # the requesting worker among them
                if not all(process.has_its_cores for process in self.processes):
                    self.move(self.cluster())
                break
            await asyncio.sleep(_RETRY_S)
        return next(iter(self.agents.values())).shares.each or 0
