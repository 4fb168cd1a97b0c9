"""The cores on which workers run. Each worker gets a share of its host's cores.

If a program needs a fixed number of cores per worker, all shares are equal.
"""

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
    """The part of a `WorkerManager` that assigns cores to workers. It runs in the manager's event loop.

    `pins`: whether -affinity is set. `cluster` returns the cluster whose members share the cores.
    """

    processes: ProcessTable
    agents: Mapping[str, AgentHandle]
    pins: bool
    cluster: Callable[[], Cluster]

    def move(self, cluster: Cluster) -> None:
        """Move the members of `cluster` to their shares of the cores.

        If the number of cores per worker is fixed, also move any other worker that has fewer cores.
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
        """Keep the number of cores per worker that an earlier controller has fixed (0: none)."""
        for agent in self.agents.values():
            agent.shares.each = agent.shares.each or each or None

    def joined(self, agent: AgentHandle) -> None:
        # all hosts have the same number of cores per worker
        agent.shares.each = next(iter(self.agents.values())).shares.each

    async def fix(self, each: int) -> int:
        """Fix the number of cores per worker at one value for all workers, because a worker has requested that.

        `each`: the number to use if none has been fixed yet.

        Returns: The number of cores that each worker has from now on, at every cluster size, or 0 if workers aren't
        pinned. The requesting worker starts to train as soon as it has this number of cores.
        """
        while self.pins:
            for agent in self.agents.values():  # `each` is the same for all hosts
                agent.shares.each = agent.shares.each or each
            # the requesting worker is among the processes
            if all(process.pid is not None for process in self.processes):
                if not all(process.has_its_cores for process in self.processes):
                    self.move(self.cluster())
                break
            await asyncio.sleep(_RETRY_S)
        return next(iter(self.agents.values())).shares.each or 0
