"""Contenders whose ranks are on several hosts of tests/hosts; see speed.py."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import ClassVar

from benchmarks.contenders.base import CollectiveContender, Loop, Process
from benchmarks.contenders.gloo import Gloo
from benchmarks.contenders.mpi import Mpi
from benchmarks.workload import Workload
from tests.hosts.jobs import SECRET
from tests.hosts.namespaces import Host

HOSTS: list[Host] = []
"""Of the run: contenders are classes, and have no other place for them."""


def _folded(size: int) -> list[list[int]]:
    """The ranks of each host, as -H with equal slots places them."""
    each = -(-size // len(HOSTS))
    return [list(range(size))[i : i + each] for i in range(0, size, each)]


def launchers(size: int) -> list[Process]:
    """Of a job of so many workers, each without its last words: the command."""
    each = -(-size // len(HOSTS))
    listed = ",".join(f"{host.address}:{each}" for host in HOSTS)
    command = [sys.executable, "-m", "ms_kungfu.launcher", "-q", "-np", str(size), "-H", listed]
    return [Process([*host.within(), *command], {"KUNGFU_JOB_SECRET": SECRET}) for host in HOSTS]


class KungFuOverHosts(CollectiveContender):
    transport: ClassVar[str] = "tcp"
    ways = ("flat",)
    strategy: ClassVar[str] = "AUTO"

    @classmethod
    def processes(cls, size: int, folder: str) -> list[Process]:
        # Which rank a process is, kungfu-run says.
        words = ["-strategy", cls.strategy, *cls.worker(folder, -1, size)]
        return [Process([*each.command, *words], each.environ) for each in launchers(size)]

    def __init__(self, rank: int, size: int, *extra: str) -> None:
        import ms_kungfu as kf

        del rank, extra
        kf.init()
        super().__init__(kf.current_rank(), size)

    def loop(self, work: Workload) -> Loop:
        from ms_kungfu import _core, comm

        task = work.task
        groups, op, number = list(task.groups), comm.OPS[task.op], work.dtype.number
        return lambda samples, batch: _core._time_collective(
            task.kind, "bench", list(work.sets), groups, number, op, task.root, samples, batch
        )


class GlooOverHosts(Gloo):
    @classmethod
    def processes(cls, size: int, folder: str) -> list[Process]:
        return [
            Process([*host.within(), *cls.worker(folder, rank, size, folder)], {"GLOO_SOCKET_IFNAME": "eth0"})
            for host, ranks in zip(HOSTS, _folded(size))
            for rank in ranks
        ]


class MpiOverHosts(Mpi):
    transport: ClassVar[str] = "tcp"

    @classmethod
    def processes(cls, size: int, folder: str) -> list[Process]:
        """mpirun on the first host; it comes to the others by a script in the place of ssh."""
        (local,) = super().processes(size, folder)
        agent = Path(folder) / "agent"
        cases = "".join(
            f'{host.address}) exec {shlex.join(host.within()[:-1])} {host.name} sh -c "$*" ;;\n' for host in HOSTS
        )
        agent.write_text(f'#!/bin/sh\nhost=$1; shift\ncase "$host" in\n{cases}esac\n')
        agent.chmod(0o700)
        mpirun, *words = local.command
        words[words.index("self,sm")] = "self,sm,tcp"
        listed = ",".join(f"{host.address}:{len(ranks)}" for host, ranks in zip(HOSTS, _folded(size)))
        # Told to oversubscribe it fills the first host with all of them.
        words[words.index("--oversubscribe")] = "--map-by"
        words.insert(words.index("--map-by") + 1, f"ppr:{len(_folded(size)[0])}:node:OVERSUBSCRIBE")
        own = ["--host", listed, "--mca", "plm_rsh_agent", str(agent), "--mca", "btl_tcp_if_include", "eth0"]
        own += ["--mca", "oob_tcp_if_include", "eth0", "--mca", "mpi_yield_when_idle", "1"]
        for name in ("MPI4PY_LIBMPI", "PYTHONPATH", "PATH"):
            own += ["-x", name]
        return [Process([*HOSTS[0].within(), mpirun, *own, *words], local.environ)]
