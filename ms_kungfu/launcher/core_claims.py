"""Claim cores for a launcher's job, so that the jobs of one user on one machine use different cores.

Byte N of a file in the user's runtime folder stands for core N. A launcher holds read locks on the bytes that stand for
its workers' cores. So a query finds the cores of all other launchers. Because the locks are read locks, several
launchers may hold the same core.

1. A killed launcher leaves no lock, because the kernel releases the locks of an open file when the file's last
   descriptor is closed. The launcher opens the file after it has forked its supervisor, and workers don't inherit the
   descriptor. (`test_killed_launcher_releases_its_cores`.)

2. If two launchers start at the same moment, the second one sees the claim of the first one. Each launcher locks the
   whole file before its query, and unlocks it after it has claimed the cores of its first workers. The controller
   computes these cores with the same function (`Shares.of`) from the same input.
   (`test_launchers_at_one_moment_take_different_cores`.)

3. If a stopped launcher holds the lock of the whole file, another launcher waits for at most `_LOCK_S`. After that, two
   jobs may share cores. Two jobs that grow at the same moment may share cores, too, because a change of the cluster
   uses the result of the latest query. The launcher logs a warning if its workers get the cores of another job.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Callable

from ms_kungfu._files import lock_within, open_regular
from ms_kungfu.config_server.secret_file import SecretFileError, made
from ms_kungfu.launcher.affinity import Shares
from ms_kungfu.launcher.quota import within_quota

_log = logging.getLogger(__name__)
_NAME = "cores"
_LOCK_S = 0.5
_FLOCK = struct.Struct("hhqqi4x")


class CoreClaims:
    """The cores that a job has claimed on this host. The claim ends when this object is destroyed.

    `allowed()` returns the cores that this process may use. `quota()` returns the limit of the process's control group.
    `directories`: folders in which the file may be; the first usable folder is used. If no folder is usable, the cores
    of other jobs are unknown.
    """

    def __init__(
        self, allowed: Callable[[], list[int]], quota: Callable[[], float | None], directories: Iterable[Path]
    ) -> None:
        self._allowed, self._quota = allowed, quota
        # Containers with a CPU quota don't see each other's locks. A random first core spreads the containers over the
        # cores.
        self._first = random.randrange(1 << 16)
        self._claimed: set[int] = set()
        self._has_warned = False
        self._file: BinaryIO | None = None  # closed when this object is destroyed
        for directory in directories:
            with contextlib.suppress(OSError, SecretFileError), made(directory) as folder:
                fd = open_regular(_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, dir_fd=folder)
                self._file = os.fdopen(fd, "r+b", buffering=0)
                break

    def begin(self, each: int | None, workers: int) -> tuple[list[int], tuple[int, ...]]:
        """Claim the cores of the first workers on this host. Return the same values as `look`."""
        with self._alone():
            cores, taken = self.look()
            if workers:
                self._claim({core for share in Shares(cores, each, taken).of(workers) for core in share})
        return cores, taken

    def look(self) -> tuple[list[int], tuple[int, ...]]:
        """Return the cores that the job may use, and which of these cores other jobs have claimed.

        The quota limits the number of cores.
        """
        allowed = self._allowed()
        taken = self._taken(allowed)
        cores = within(allowed, taken, within_quota(len(allowed), self._quota()), self._first)
        return cores, tuple(core for core in cores if core in taken)

    def extend(self, cores: Collection[int]) -> None:
        """Claim the cores of an additional worker. If another job has claimed one of them, log a warning once."""
        self._claim(self._claimed.union(cores))
        shared = self._taken(cores) if not self._has_warned else ()
        if shared:
            self._has_warned = True
            _log.warning('cores shared: cpus=%s reason="other jobs of this user run on these"', _listed(shared))

    def narrow(self, cores: Collection[int]) -> None:
        """Release all claimed cores except `cores`."""
        self._claim(set(cores))

    # ---- the file ----

    def _taken(self, cores: Collection[int]) -> set[int]:
        if self._file is None:
            return set()
        # F_OFD_GETLK returns only one lock even if there are several, so each core needs its own query.
        return {core for core in cores if self._lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, core) != fcntl.F_UNLCK}

    def _claim(self, cores: set[int]) -> None:
        for core in cores - self._claimed:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_RDLCK, core)
        for core in self._claimed - cores:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, core)
        self._claimed = cores

    def _lock(self, command: int, kind: int, core: int) -> int:
        """Call fcntl(2) for the byte of one core.

        Returns: The kind of lock in the kernel's answer, or F_UNLCK if the system doesn't support these locks.
        """
        if self._file is None:
            return fcntl.F_UNLCK
        try:
            asked = _FLOCK.pack(kind, os.SEEK_SET, core, 1, 0)
            return int(_FLOCK.unpack(fcntl.fcntl(self._file, command, asked))[0])
        except OSError:  # a file system or kernel without these locks
            return fcntl.F_UNLCK

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        has_lock = False
        if self._file is not None:
            with contextlib.suppress(OSError):
                has_lock = lock_within(self._file.fileno(), _LOCK_S)
        try:
            yield
        finally:
            if self._file is not None and has_lock:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def within(allowed: Sequence[int], taken: Collection[int], count: int, first: int) -> list[int]:
    """Choose `count` of the `allowed` cores, and return them in the order of `allowed`.

    Free cores are preferred to taken cores. If not all cores are needed, the choice begins at index `first` (modulo the
    number of cores) and wraps around.

    >>> within([0, 1, 2, 3], {0}, 2, 7)
    [1, 3]
    """
    if count >= len(allowed):
        return list(allowed)
    begin = first % len(allowed)
    around = [*allowed[begin:], *allowed[:begin]]
    chosen = sorted(around, key=lambda core: core in taken)[:count]
    return [core for core in allowed if core in chosen]


def _listed(cores: Iterable[int]) -> str:
    return ",".join(map(str, sorted(cores)))
