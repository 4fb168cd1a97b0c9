"""Notify a worker that a signal to a launcher is about to end the job, so that the worker can write a checkpoint."""

from __future__ import annotations

import contextlib
import threading

from ms_kungfu import env
from ms_kungfu.broker_protocol import EndWatch
from ms_kungfu.errors import KungFuError
from ms_kungfu.membership.member import Member, current


class JobEnd:
    """Wait for the launcher's message that the job ends, from construction to `close`.

    The launcher ends the worker after `close`, or after -grace-period at the latest. The class is thread-safe. A
    thread waits for the launcher's message, and closes the connection.
    """

    def __init__(self, member: Member) -> None:
        self.signal = 0
        """The number of the signal that ends the job; 0 if the job isn't ending."""
        self._member = member
        self._lock = threading.Lock()
        self._watch: EndWatch | None = None  # guarded by _lock, like _closed
        self._closed = member.ports.event()
        member.ports.start_thread("kungfu-end", self._wait)

    def _wait(self) -> None:
        with contextlib.suppress(KungFuError):  # this worker isn't notified, but another worker may be
            watch = self._member.broker().open_end_watch()
            with self._lock:
                self._watch = watch
                if self._closed.is_set():
                    watch.hang_up()
            self.signal = watch.receive()
            self._closed.wait()
            watch.close()

    def close(self) -> None:
        """Tell the launcher not to wait for this worker any longer."""
        with self._lock:
            self._closed.set()
            if self._watch is not None:
                self._watch.hang_up()


def watch_job_end() -> JobEnd | None:
    """Return a `JobEnd` for this process; None if `kungfu-run` hasn't started this process."""
    member = current()
    return None if member.cluster is None or member.get(env.BROKER) is None else JobEnd(member)
