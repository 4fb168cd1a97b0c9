"""A worker that is told to end by SIGTERM, its machine being needed perhaps, leaves the cluster after its step."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

from ms_kungfu import env
from ms_kungfu.errors import KungFuError
from ms_kungfu.membership.member import Member, current

_ANSWER_S = 10.0
_owner: int | None = None  # the process that the handler is meant for
_leaving = False


def leave_on_sigterm(member: Member) -> None:
    global _owner
    if (
        _owner is None
        and member.ports.owns_process
        and member.get(env.WATCH)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # a program that has its own handler knows better
    ):
        _owner = os.getpid()
        signal.signal(signal.SIGTERM, _on_sigterm)
        # A child of this process is no worker: SIGTERM ends it, as whoever sends it one expects.
        os.register_at_fork(after_in_child=_be_mortal)


def _be_mortal() -> None:
    if signal.getsignal(signal.SIGTERM) is _on_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    global _leaving
    member = current()
    if _leaving or member.detached:  # twice means at once
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    _leaving = True
    member.ports.start_thread("kungfu-leave", lambda: _ask_to_leave(member))


def _ask_to_leave(member: Member) -> None:
    try:
        assert member.self_id is not None
        member.broker().request_leave(member.self_id, _ANSWER_S, terminated=True)
    except (KungFuError, AssertionError):
        # The job is ending, or there is nobody to go on: SIGTERM does what it would do without a handler.
        os.kill(os.getpid(), signal.SIGTERM)
