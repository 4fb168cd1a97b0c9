"""How a worker learns that its job is about to end by a signal to a launcher, so that it can write a checkpoint."""

from __future__ import annotations

import contextlib
import threading

from ms_kungfu import env
from ms_kungfu.broker_protocol import EndWatch
from ms_kungfu.errors import KungFuError
from ms_kungfu.membership.member import Member, current


class JobEnd:
    """Watches for the end, from construction to `close`. The launcher waits for that, within -grace-period.

    Thread-safe. A thread waits for the launcher's message, and closes the connection.
    """

    def __init__(self, member: Member) -> None:
        self.signal = 0
        """The signal by which the job ends; 0 as long as it doesn't."""
        self._member = member
        self._lock = threading.Lock()
        self._watch: EndWatch | None = None  # guarded by _lock, as is _closed
        self._closed = member.ports.event()
        member.ports.start_thread("kungfu-end", self._wait)

    def _wait(self) -> None:
        with contextlib.suppress(KungFuError):  # this worker isn't notified; another one may be
            watch = self._member.broker().open_end_watch()
            with self._lock:
                self._watch = watch
                if self._closed.is_set():
                    watch.hang_up()
            self.signal = watch.receive()
            self._closed.wait()
            watch.close()

    def close(self) -> None:
        """Have the launcher wait for this worker no more."""
        with self._lock:
            self._closed.set()
            if self._watch is not None:
                self._watch.hang_up()


def watch_job_end() -> JobEnd | None:
    """Return a watch; None if `kungfu-run` hasn't started this process."""
    member = current()
    return None if member.cluster is None or member.get(env.BROKER) is None else JobEnd(member)
