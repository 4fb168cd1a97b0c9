"""Which cores a launcher's job runs on, so that the jobs of one user on one machine take different ones.

Byte N of a file in the user's runtime folder stands for core N. A launcher holds a read lock on the bytes of its
workers' cores, so a query finds the cores of all other launchers, and several may share a core.

1. A killed launcher leaves nothing: the kernel releases the locks of an open file when its last descriptor is closed.
   Its supervisor was forked before, and workers inherit no descriptor. (`test_killed_launcher_releases_its_cores`.)
2. Of two launchers that start at the same moment the second sees the claim of the first: each holds a lock of the whole
   file from its look until it has claimed the cores of its first workers. The controller computes these by the same
   function (`Shares.of`) from the same cores. (`test_launchers_at_one_moment_take_different_cores`.)
3. A launcher that stands still with the lock delays another one by `_LOCK_S` at most. Then two jobs may share cores,
   as two may that grow at the same moment: a change of the cluster uses what the last look has found. The launcher
   logs a warning if its workers get the cores of another job.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import random
import struct
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Callable

from ms_kungfu._files import open_regular
from ms_kungfu.config_server.secret_file import SecretFileError, made
from ms_kungfu.launcher.affinity import Shares
from ms_kungfu.launcher.quota import within_quota

_log = logging.getLogger(__name__)
_NAME = "cores"
_LOCK_S = 0.5
_RETRY_S = 0.01
_FLOCK = struct.Struct("hhqqi4x")


class CoreClaims:
    """The cores of one job on this host, in the agent's event loop, as long as this object lives.

    `allowed` returns those that this process may use, `quota` the limit of its control group. `directories`: folders
    for the file, the first one that can be used; without any, other jobs aren't known.
    """

    def __init__(
        self, allowed: Callable[[], list[int]], quota: Callable[[], float | None], directories: Iterable[Path]
    ) -> None:
        self._allowed, self._quota = allowed, quota
        # Containers with a quota see neither each other nor a difference between the cores: not all take the first.
        self._first = random.randrange(1 << 16)
        self._claimed: set[int] = set()
        self._has_warned = False
        self._file: BinaryIO | None = None  # its end closes it
        for directory in directories:
            with contextlib.suppress(OSError, SecretFileError), made(directory) as folder:
                fd = open_regular(_NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, dir_fd=folder)
                self._file = os.fdopen(fd, "r+b", buffering=0)
                break

    def begin(self, each: int | None, workers: int) -> tuple[list[int], tuple[int, ...]]:
        """Claim the cores of the first workers of this host. Return what `look` does."""
        with self._alone():
            cores, taken = self.look()
            if workers:
                self._claim({core for share in Shares(cores, each, taken).of(workers) for core in share})
        return cores, taken

    def look(self) -> tuple[list[int], tuple[int, ...]]:
        """Return the cores for the job, as many as the quota allows, and those of them that other jobs have."""
        allowed = self._allowed()
        taken = self._taken(allowed)
        cores = within(allowed, taken, within_quota(len(allowed), self._quota()), self._first)
        return cores, tuple(core for core in cores if core in taken)

    def extend(self, cores: Collection[int]) -> None:
        """Claim the cores of another worker, too, and log it once if another job has one of them."""
        self._claim(self._claimed.union(cores))
        shared = self._taken(cores) if not self._has_warned else ()
        if shared:
            self._has_warned = True
            _log.warning('cores shared: cores=%s reason="other jobs of this user run on them"', _listed(shared))

    def narrow(self, cores: Collection[int]) -> None:
        """Release all other cores."""
        self._claim(set(cores))

    # ---- the file ----

    def _taken(self, cores: Collection[int]) -> set[int]:
        if self._file is None:
            return set()
        # F_OFD_GETLK names any one of several locks, so each core is a question.
        return {core for core in cores if self._lock(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, core) != fcntl.F_UNLCK}

    def _claim(self, cores: set[int]) -> None:
        for core in cores - self._claimed:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_RDLCK, core)
        for core in self._claimed - cores:
            self._lock(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, core)
        self._claimed = cores

    def _lock(self, command: int, kind: int, core: int) -> int:
        """Call fcntl(2) for one core. Return the kind of lock that it answers; F_UNLCK if there are no such locks."""
        if self._file is None:
            return fcntl.F_UNLCK
        try:
            asked = _FLOCK.pack(kind, os.SEEK_SET, core, 1, 0)
            return int(_FLOCK.unpack(fcntl.fcntl(self._file, command, asked))[0])
        except OSError:  # a file system or kernel without them
            return fcntl.F_UNLCK

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        deadline = time.monotonic() + _LOCK_S
        has_lock = False
        while self._file is not None and not has_lock and time.monotonic() < deadline:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                has_lock = True
            except BlockingIOError:
                time.sleep(_RETRY_S)
            except OSError:
                break
        try:
            yield
        finally:
            if self._file is not None and has_lock:
                fcntl.flock(self._file, fcntl.LOCK_UN)


def within(allowed: Sequence[int], taken: Collection[int], count: int, first: int) -> list[int]:
    """Return `count` of the cores, free ones rather than taken ones, in their order.

    Fewer than all are neighbours that begin at core number `first`, counted around.

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
