"""Notify a worker that a signal will end the job, so that the worker can write a checkpoint."""

from __future__ import annotations

import contextlib
import threading

from ms_kungfu import env
from ms_kungfu.broker_protocol import EndWatch
from ms_kungfu.errors import KungFuError
from ms_kungfu.membership.member import Member, current


class JobEnd:
    """Wait for the launcher's message that the job is ending, from construction to `close`.

    The launcher ends the worker after `close`, or at the latest after -grace-period. The class is thread-safe. A
    separate thread waits for the launcher's message, and closes the connection.
    """

    def __init__(self, member: Member) -> None:
        self.signal = 0
        """The number of the signal that ends the job; 0 if the job isn't ending."""
        self._member = member
        self._lock = threading.Lock()
        self._watch: EndWatch | None = None  # `_lock` guards `_watch` and `_closed`
        self._closed = member.ports.event()
        member.ports.start_thread("kungfu-end", self._wait)

    def _wait(self) -> None:
        with contextlib.suppress(KungFuError):  # the launcher can't notify this worker, but may notify other workers
            watch = self._member.broker().open_end_watch()
            with self._lock:
                self._watch = watch
                if self._closed.is_set():
                    watch.hang_up()
            self.signal = watch.receive()
            self._closed.wait()
            watch.close()

    def close(self) -> None:
        """Notify the launcher that it no longer needs to wait for this worker."""
        with self._lock:
            self._closed.set()
            if self._watch is not None:
                self._watch.hang_up()


def watch_job_end() -> JobEnd | None:
    """Return a `JobEnd` for this process; None if `kungfu-run` hasn't started this process."""
    member = current()
    return None if member.cluster is None or member.get(env.BROKER) is None else JobEnd(member)
