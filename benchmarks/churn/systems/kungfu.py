"""ms_kungfu: docs/resizing.md, "When a worker fails": watch mode with `-recover replace`."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.churn.systems.base import Command, System, own_module
from benchmarks.churn.worker import Plan

_CONFIG_PORT, _SECRET = "9100", "5" * 32  # for a job across network namespaces, in which every port is free
_NO_LIMIT = "1000000"


class KungFu(System):
    """By default without standbys. `shards`: train in shards, one per worker (docs/shards-details.md recommends it)."""

    packages = ("mindspore", "numpy")
    is_peer = False

    def __init__(self, standby: int = 0, shards: bool = True) -> None:
        self._standby, self.shards = standby, shards

    def _words(self, plan: Plan, folder: Path, host: int) -> list[str]:
        # Remove the limit on replacements (10 in 5 minutes): the other systems also run without theirs.
        flags = ["-w", "-recover", "replace", "-max-restarts", _NO_LIMIT, "-standby", str(self._standby)]
        if "heartbeats" in plan.switches:
            flags += ["-peer-timeout", "0"]
        if plan.hosts:
            slots = plan.workers // len(plan.hosts)
            flags += ["-H", ",".join(f"{address}:{slots}" for address in plan.hosts), "-self", plan.hosts[host]]
            flags += ["-builtin-config-port", _CONFIG_PORT]
        log = str(folder / f"launcher.{host}.log")
        return [sys.executable, "-m", "ms_kungfu.launcher", "-q", "-logfile", log, "-np", str(plan.workers), *flags]

    def _env(self, plan: Plan, folder: Path) -> dict[str, str]:
        return {"XDG_RUNTIME_DIR": str(folder), **({"KUNGFU_JOB_SECRET": _SECRET} if plan.hosts else {})}

    def commands(self, plan: Plan, folder: Path) -> list[Command]:
        program = [*own_module("kungfu"), str(folder / "plan.json")]
        return [
            # If no worker is left, the job ends. Its restart resumes from the checkpoint (docs/checkpoints.md).
            Command(
                f"kungfu-run.{host}",
                [*self._words(plan, folder, host), *program],
                self._env(plan, folder),
                again=host == 0,
                host=host,
            )
            for host in range(len(plan.hosts) or 1)
        ]

    def host_commands(self, plan: Plan, folder: Path, host: int) -> list[Command]:
        # docs/host-changes.md, "A host joins": the host adds its slots, and a resize fills them.
        url = f"http://{plan.hosts[0]}:{_CONFIG_PORT}/config"
        address = f"{plan.hosts[host]}:{plan.workers // len(plan.hosts)}"
        launcher = [sys.executable, "-m", "ms_kungfu.launcher"]
        grow = [*launcher, "resize", str(plan.workers), "-config-server", url]
        env = self._env(plan, folder)
        return [
            Command(f"kungfu-run.{host}", [*launcher, "-q", "-join", url, "-self", address], env, host=host),
            Command("resize", ["sh", "-c", 'until "$@"; do sleep 1; done', "sh", *grow], env, host=host, serves=True),
        ]

    def resize(self, plan: Plan, folder: Path, size: int) -> tuple[list[Command], list[tuple[str, int]]]:
        words = [sys.executable, "-m", "ms_kungfu.launcher", "resize", str(size)]
        return [Command("resize", words, self._env(plan, folder), serves=True)], []
