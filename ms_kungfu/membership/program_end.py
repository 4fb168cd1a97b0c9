"""Before the interpreter exits, report that a worker's program has ended.

Then the launcher doesn't replace the worker if the interpreter crashes at exit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading

from ms_kungfu.errors import KungFuError
from ms_kungfu.membership.member import Member

_ANSWER_S = 1.0


def report_program_end(member: Member) -> None:
    """Arrange to notify the launcher as soon as the program has ended without an exception.

    An `atexit` handler would run too late, because handlers that the program registers later would run first.
    """
    process = os.getpid()
    threading._register_atexit(lambda: _report(member, process))  # type: ignore[attr-defined]


def _report(member: Member, process: int) -> None:
    if os.getpid() != process or member.self_id is None or getattr(sys, "last_value", None) is not None:
        return
    goes_on = [each for each in threading.enumerate() if not each.daemon and each is not threading.main_thread()]
    if not goes_on:
        with contextlib.suppress(KungFuError):  # the launcher has ended
            member.broker().report_program_end(member.self_id, member.incarnation, _ANSWER_S)
