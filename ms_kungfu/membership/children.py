"""Child processes of a worker, such as data loaders: which rank and size they report, and why they can't join.

A child inherits its worker's environment, including the worker's name and secret. The worker writes its own rank and
size to KUNGFU_PARENT, and a child reports these numbers as its own. A child that finds this variable doesn't request a
slot. The worker replaces the value in place, so a thread that reads the environment at that moment finds either the old
text or the new text.

A child that `multiprocessing` has spawned first runs those lines of the program that aren't below ``if __name__ ==
"__main__":``. If the program doesn't have that guard, these lines include the training. The child then gets an error
and exits, but a process pool would start new children again and again. Therefore, the child also tries to stop its
worker: it sends the worker a signal, whose handler raises an error in the main thread.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from multiprocessing import process
from types import FrameType
from typing import NamedTuple

from ms_kungfu import env
from ms_kungfu._processes import UNGUARDED_SIGNAL, is_above, send_handled
from ms_kungfu.membership.member import Member, current

_AGAIN_S = 5.0


class Answers(NamedTuple):
    """The values that a process without a slot reports: its worker's values, or those that the launcher planned."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    version: int


def announce(member: Member, answers: Answers) -> None:
    """Record this worker's rank and size in its environment, for child processes that start later."""
    if member.ports.owns_process:
        os.environ[env.PARENT.name] = ":".join(map(str, (os.getpid(), *answers)))
        if signal.getsignal(UNGUARDED_SIGNAL) is signal.SIG_DFL and _is_main_thread():
            signal.signal(UNGUARDED_SIGNAL, _Unguarded())


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


class _Unguarded:
    """The handler of UNGUARDED_SIGNAL.

    It raises an error at most once every `_AGAIN_S` seconds, so that the program has time to clean up. If the program
    suppresses the error, for example in a `__del__`, a later child's signal causes another error.
    """

    _raised = -math.inf

    def __call__(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if now - self._raised >= _AGAIN_S:
            self._raised = now
            raise ValueError(
                "a process that multiprocessing has spawned runs this program from the beginning, including its "
                'communication: put the lines that only workers run below `if __name__ == "__main__":`'
            )


def parents_answers(member: Member) -> Answers | None:
    """Return the rank and sizes of this process's worker. Return None if this process may itself be a worker."""
    parent = member.get(env.PARENT)
    if parent is None or parent[0] == os.getpid() or not is_above(parent[0]):
        return None
    return Answers(*parent[1:])


def may_take_a_slot(member: Member) -> bool:
    """Return whether this process could take a worker's slot that the worker hasn't requested yet."""
    from multiprocessing import parent_process

    return parent_process() is not None and parents_answers(member) is None


def refuse() -> None:
    """Raise ValueError, because neither a spawned nor a forked child process may communicate.

    A spawned child that runs the program from the beginning also tries to stop its worker.
    """
    answers, parent = current().parents_answers, current().get(env.PARENT)
    assert answers is not None
    # multiprocessing sets this attribute while a child imports the program, and then rejects new processes itself
    if (
        getattr(process.current_process(), "_inheriting", False)
        and parent
        and send_handled(parent[0], UNGUARDED_SIGNAL)
    ):
        sys.stdout.flush()
        os._exit(1)
    raise ValueError(
        f"process {os.getpid()} is a child process of the worker of rank {answers.rank}, not a member of the cluster: "
        "it can read rank and size, but only the worker can communicate. If the program starts processes with spawn, "
        'each of them runs the lines outside of `if __name__ == "__main__":` again'
    )
