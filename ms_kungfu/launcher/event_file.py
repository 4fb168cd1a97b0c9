"""Write the file of a job's event log in a separate thread.

1. The event loop only appends lines to a list in memory. The thread never holds the list's lock during a system call.
   So a disk that hangs, or a FIFO that no process reads, blocks only the thread. (`test_hung_disk_blocks_no_caller`.)

2. The list is bounded. When it reaches `_MAX_QUEUED_BYTES`, the disk has accepted no line for minutes, and writing
   stops for good.

3. Writing also stops for good after the first error. As a result, a full disk causes only one line in the launcher's
   log. If the disk allows truncation, the file then ends with a whole line.
   (`test_full_disk_stops_the_log_with_one_line`.) A deleted file also counts as an error.
   (`test_deleted_log_is_reported_with_one_line`.)

4. The thread locks the file. A job never replaces the log of another running job, and never appends to it.
   (`test_log_of_a_running_job_is_left_to_it`.)

5. The same thread writes the report after the last line. If writing the report fails or takes too long, the job ends
   without the report. (`test_report_that_fails_costs_one_line`.)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import threading
from pathlib import Path
from typing import Callable

from ms_kungfu._files import lock_within, open_regular

_log = logging.getLogger(__name__)
_MAX_QUEUED_BYTES = 1 << 20
_CLOSE_S = 1.0  # time to write the last lines
_FINISH_S = 10.0  # time to write the report of a long job
_LOOK_S = 0.005
_LOCK_S = 1.0  # time for the thread of the job's previous controller to release the file


class EventFile:
    """Write lines to one file. `fresh`: true to replace an earlier job's file, false to append to the file.

    Call `write` and `close` in the thread of the event loop.
    """

    def __init__(self, path: Path, fresh: bool, start_thread: Callable[[str, Callable[[], None]], None]) -> None:
        self.path = path
        self._fresh = fresh
        self._news = threading.Condition()
        self._lines: list[bytes] = []  # guarded by `_news`, like the next five attributes
        self._queued = 0
        self._closing = False
        self._finish: Callable[[Path], None] | None = None
        self._is_finishing = False  # all lines are written
        self._is_over = False  # the thread has ended, or its results no longer matter
        start_thread("kungfu-events", self._run)

    def write(self, line: bytes) -> None:
        """Queue a line for the thread. If writing has stopped after an error, the line is lost."""
        with self._news:
            if self._is_over:
                return
            self._lines.append(line)
            self._queued += len(line)
            is_full = self._queued > _MAX_QUEUED_BYTES
            if is_full:
                self._forget()
            self._news.notify()
        if is_full:
            self._give_up("the disk accepts no data")

    async def close(self, finish: Callable[[Path], None] | None = None) -> None:
        """Wait for up to `_CLOSE_S` seconds until the last lines are written.

        The thread calls `finish` with the path of the file after the last line. Wait up to `_FINISH_S` seconds for
        this call.
        """
        loop = asyncio.get_running_loop()
        with self._news:
            self._closing, self._finish = True, finish
            self._news.notify()
        began = loop.time()
        while not self._is_over and loop.time() - began < (_FINISH_S if self._is_finishing else _CLOSE_S):
            await asyncio.sleep(_LOOK_S)

    def _forget(self) -> None:
        self._is_over = True
        self._lines, self._queued = [], 0

    def _give_up(self, error: str) -> None:
        _log.warning('event log failed: path=%s error="%s". The job goes on without it', self.path, error)

    # ---- the thread ----

    def _run(self) -> None:
        try:
            fd = self._open()
        except OSError as error:
            self._fail(error)
            return
        try:
            while (data := self._next()) is not None:
                self._write_all(fd, data)
            self._end()
        except OSError as error:
            self._fail(error)
        finally:
            os.close(fd)
            with self._news:
                self._forget()

    def _end(self) -> None:
        """Call `finish` unless writing has stopped after an error."""
        with self._news:
            finish = None if self._is_over else self._finish
            self._is_finishing = finish is not None
        if finish is None:
            return
        try:
            finish(self.path)
        except Exception as error:
            text = error.strerror if isinstance(error, OSError) else str(error)
            remedy = ". `kungfu-run report` can write it" if self.path.exists() else ""
            _log.warning('report failed: path=%s error="%s"%s', self.path.parent, text, remedy)

    def _fail(self, error: OSError) -> None:
        with self._news:
            was_over = self._is_over
        if not was_over:
            self._give_up(error.strerror or str(error))
        with self._news:
            self._forget()  # last, because `_forget` lets `close` return

    def _open(self) -> int:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        fd = open_regular(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        try:
            self._own(fd)
        except OSError:
            os.close(fd)
            raise
        with contextlib.suppress(OSError):
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":  # the previous controller failed while it wrote a line
                os.write(fd, b"\n")
        return fd

    def _own(self, fd: int) -> None:
        """Lock the file, and empty it if `fresh` was set. Raise OSError if another running job writes to the file."""
        is_locked = True  # stays True if the file system doesn't support locks
        with contextlib.suppress(OSError):
            is_locked = lock_within(fd, _LOCK_S)
        if self._fresh and not is_locked:
            raise OSError(errno.EBUSY, "another running job writes to it; give each job a -logdir of its own")
        if self._fresh:
            os.ftruncate(fd, 0)

    def _next(self) -> bytes | None:
        """Wait for queued lines and return them. Return None if no more lines will follow."""
        with self._news:
            self._news.wait_for(lambda: self._lines or self._closing or self._is_over)
            lines, self._lines, self._queued = self._lines, [], 0
            return b"".join(lines) if lines else None

    def _write_all(self, fd: int, data: bytes) -> None:
        rest = data
        try:
            while rest:
                rest = rest[os.write(fd, rest) :]
        except OSError:
            written = data[: len(data) - len(rest)]
            half = len(written) - (written.rfind(b"\n") + 1)
            with contextlib.suppress(OSError):
                if half:
                    os.ftruncate(fd, os.fstat(fd).st_size - half)
            raise
        if not os.fstat(fd).st_nlink:
            raise FileNotFoundError(errno.ENOENT, "it was deleted")
