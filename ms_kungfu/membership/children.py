"""Child processes of a worker, such as a data loader's: what they answer, and that they don't join.

A child has the environment of its worker, and so its name and secret. The worker keeps in KUNGFU_PARENT what a child
answers: its own rank and size. A child that finds it there requests no slot. A worker replaces the value in place, so
that a thread of the same process that reads the environment meanwhile finds the old text or the new one.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ms_kungfu import env
from ms_kungfu._processes import is_above
from ms_kungfu.membership.member import Member, current


class Answers(NamedTuple):
    """What a process answers that has no slot: its worker's numbers, or those that it was started for."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    version: int


def announce(member: Member, answers: Answers) -> None:
    """Note for child processes that start from now on what this worker is."""
    if member.ports.owns_process:
        os.environ[env.PARENT.name] = ":".join(map(str, (os.getpid(), *answers)))


def parents_answers(member: Member) -> Answers | None:
    """Return what the worker that this process is a child of answers; None if this process may be the worker itself."""
    parent = member.get(env.PARENT)
    if parent is None or parent[0] == os.getpid() or not is_above(parent[0]):
        return None
    return Answers(*parent[1:])


def may_take_a_slot(member: Member) -> bool:
    """Return whether this process, by asking for its rank, may take the slot of a worker that hasn't asked yet."""
    from multiprocessing import parent_process

    return parent_process() is not None and parents_answers(member) is None


def refuse() -> None:
    """Raise ValueError, as a forked child does: a child doesn't communicate."""
    answers = current().parents_answers
    assert answers is not None
    raise ValueError(
        f"process {os.getpid()} is a child of the worker of rank {answers.rank} and no member of the cluster: it may "
        "ask for rank and size; communicate in the worker. Of a program that starts processes by spawn, each runs the "
        'lines outside of `if __name__ == "__main__":` again'
    )
