"""torchrun: PyTorch's "Torchrun (Elastic Launch)": fault-tolerant on one host, elastic over several agents.

docs.pytorch.org/docs/stable/elastic/run.html and docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html
"""

from __future__ import annotations

import signal
from pathlib import Path

from benchmarks.churn.systems.base import Command, System
from benchmarks.churn.worker import Plan

_PORT = 29400
_AGENTS = 2


class TorchRun(System):
    checkpoints = True
    packages = ("torch", "numpy")

    def _agent(self, plan: Plan, folder: Path, agent: int, address: str, host: int) -> Command:
        """Return one of the agents of "Elastic (min=1, max=4, tolerates up to 3 membership changes or failures)"."""
        words = [str(Path(plan.python).with_name("torchrun")), f"--nnodes=1:{_AGENTS}"]
        words += [f"--nproc_per_node={plan.workers // _AGENTS}", "--max_restarts=1000000", "--rdzv_id=churn"]
        words += ["--rdzv_backend=c10d", f"--rdzv_endpoint={address}:{_PORT}"]
        words.append(f"--rdzv_conf=is_host={int(agent == 0)}")  # else the agent that comes first hosts the store
        if plan.hosts:
            words += [f"--local_addr={plan.hosts[host]}"]
        # The agent that hosts the rendezvous must always run. A scheduler restarts this agent if it gives up.
        return Command(f"agent.{agent}", [*words, *self._program(folder)], self._env(plan), again=agent == 0, host=host)

    def _env(self, plan: Plan) -> dict[str, str]:
        # In PyTorch 2.13 all rounds of workers share one store. Gloo finds the previous round's addresses there, and
        # each restart fails with "Gloo connectFullMesh failed". This variable gives each round its own store.
        return {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", **({"GLOO_SOCKET_IFNAME": "eth0"} if plan.hosts else {})}

    def _program(self, folder: Path) -> list[str]:
        return ["-m", "benchmarks.churn.programs.torchrun", str(folder / "plan.json")]

    def commands(self, plan: Plan, folder: Path) -> list[Command]:
        if plan.hosts:
            return [self._agent(plan, folder, host, plan.hosts[0], host) for host in range(_AGENTS)]
        if plan.elastic:
            return [self._agent(plan, folder, agent, "127.0.0.1", 0) for agent in range(_AGENTS)]
        words = [str(Path(plan.python).with_name("torchrun")), "--standalone", f"--nproc_per_node={plan.workers}"]
        return [Command("torchrun", [*words, "--max_restarts=1000000", *self._program(folder)], self._env(plan))]

    def resize(self, plan: Plan, folder: Path, size: int) -> tuple[list[Command], list[tuple[str, int]]]:
        if size < plan.workers:
            return [], [(f"agent.{_AGENTS - 1}", signal.SIGTERM)]
        return [self._agent(plan, folder, _AGENTS - 1, "127.0.0.1", 0)], []
