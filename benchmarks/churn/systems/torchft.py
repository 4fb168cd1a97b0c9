"""torchft: its README, "Running DDP": a lighthouse, and a torchrun for each replica group.

The restarts are those of torchft/torchx.py (`--max_restarts`).
"""

from __future__ import annotations

import signal
from pathlib import Path

from benchmarks.churn.systems.base import Command, System
from benchmarks.churn.worker import Plan

_LIGHTHOUSE, _FIRST_PORT = 29510, 29600


class TorchFT(System):
    packages = ("torchft", "torch", "numpy")

    def _group(self, plan: Plan, folder: Path, group: int) -> Command:
        host = group * len(plan.hosts) // plan.workers if plan.hosts else 0
        env = {
            "REPLICA_GROUP_ID": str(group),
            "NUM_REPLICA_GROUPS": str(plan.workers),
            "TORCHFT_LIGHTHOUSE": f"http://{plan.hosts[0] if plan.hosts else 'localhost'}:{_LIGHTHOUSE}",
            # torchrun sets this only if an agent has several workers. Here each replica group has its own agent.
            "OMP_NUM_THREADS": "1",
        }
        words = [str(Path(plan.python).with_name("torchrun")), f"--master_port={_FIRST_PORT + group}", "--nnodes=1"]
        words += ["--nproc_per_node=1", "--max_restarts=1000000"]
        if plan.hosts:
            words.append(f"--master_addr={plan.hosts[host]}")
            env["GLOO_SOCKET_IFNAME"] = "eth0"
        program = ["-m", "benchmarks.churn.programs.torchft", str(folder / "plan.json")]
        return Command(f"group.{group}", [*words, *program], env, host=host)

    def commands(self, plan: Plan, folder: Path) -> list[Command]:
        words = [str(Path(plan.python).with_name("torchft_lighthouse")), "--min_replicas", "1"]
        words += ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
        lighthouse = Command("lighthouse", words, {"RUST_BACKTRACE": "1"}, serves=True)
        return [lighthouse, *(self._group(plan, folder, group) for group in range(plan.workers))]

    def resize(self, plan: Plan, folder: Path, size: int) -> tuple[list[Command], list[tuple[str, int]]]:
        groups = range(min(2, size), plan.workers)
        if size < plan.workers:
            return [], [(f"group.{group}", signal.SIGTERM) for group in groups]
        return [self._group(plan, folder, group) for group in groups], []
