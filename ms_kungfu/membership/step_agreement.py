"""Let all ranks agree once per step on the next cluster version, in a collective of the current version.

All ranks have the same role. In one small all-reduce, they agree on the newest prepared cluster version, on a requested
size, and on the result of that request (`requested_size`). A version is prepared when all its new processes are ready,
so members needn't wait for processes to start. After the agreement, each member requests the version's shared-memory
segment from its host's broker and joins the segment. `docs/architecture.md` describes a resize step by step.

The agreement is an ordinary collective, so docs/recovery.md covers a failure during the agreement or the change.
"""

from __future__ import annotations

from typing import Callable

from ms_kungfu import env
from ms_kungfu.broker_protocol import Detached, Stay
from ms_kungfu.errors import ResizeError
from ms_kungfu.membership.identity import check_caught_up, lost_ranks
from ms_kungfu.membership.joining import detach, enter, join, request_segment
from ms_kungfu.membership.member import Change, Member, current
from ms_kungfu.membership.requested_size import (
    LATER,
    PENDING,
    REFUSED,
    check_size,
    drop,
    pursue,
    refusal_of,
    unpack,
    want,
)

# The launcher's timeout is shorter by this margin, so that it can still prepare a version without joining workers.
_GIVE_UP_MARGIN_S = 10.0

Settle = Callable[[bool], bool]


def step(size: int | None = None, wait: bool = False, word: int = 0, settle: Settle | None = None) -> Change:
    """Adopt the newest prepared cluster version, if there is one. All ranks must call this function once per step.

    The ranks adopt the clusters that they request, clusters that other clients request (``kungfu-run resize``), and
    versions that exclude failed workers. As long as the config server is unreachable, a requested size isn't written,
    and training continues.

    Args:
        size: the size to request, for example from a schedule; None keeps the current request. If the ranks pass
            different sizes, the largest size is requested. The lowest living rank writes the request to the config
            server. The cluster changes at a later step, as soon as the joining workers are ready.
        wait: whether to return only when the requested size is reached, as KungFu's resize does. If false, training
            continues in the meantime. The value must be the same on all ranks.
        word: any number below 2**64, which is compared with the words of the other ranks (see `settle`).
        settle: a function that is called before the cluster changes, on all ranks or on none. Its argument is true if
            all ranks have passed the same word. The function may call collectives. If it returns true, the cluster
            doesn't change in this step. The function must return the same result on all ranks. If it raises an
            exception, `step` raises that exception, and the cluster doesn't change.

    Raises:
        ResizeError: on every rank, if the change isn't possible. The cluster doesn't change.
    """
    join()
    member = current()
    if size is not None:
        check_size(size)
    if has_no_cluster(member, size):
        if settle is not None:
            settle(True)
        return no_change()
    if size is not None:
        want(member, size)
    return follow(member, wait, word=word, settle=settle)


def resize(size: int) -> Change:
    """Change the cluster to `size` ranks (collective). See :func:`ms_kungfu.runtime.resize`."""
    join()
    check_caught_up("kf.resize")
    check_size(size)
    core = current().core
    old_size = int(core.size())
    changed, detached = core.resize(size)
    return Change(changed, detached, old_size, int(core.size()))


def change_size(size: int) -> tuple[bool, bool]:
    """Change the cluster's size. The runtime calls this function after all ranks have agreed on the new `size`."""
    member = current()
    if member.cluster is None:
        raise _not_started(size)
    member.requested_size, member.pending = size, None
    change = follow(member, wait=True, must=True)
    return change.changed, change.detached


def note_step(number: int) -> None:
    """Record the number of the training step, for log lines about cluster changes."""
    current().training_step = number


def step_ended(number: int) -> None:
    """Record that training has completed step `number`, for `kungfu-run status`."""
    member = current()
    member.ended_steps.ended(number, member.ports.monotonic())
    member.core.note_step(number, member.ended_steps.each_s)


def step_resumed() -> None:
    """Record that a step begins now. The time since the end of the last step isn't part of the new step."""
    member = current()
    member.ended_steps.resume(member.ports.monotonic())


def training_begun(number: int) -> None:
    """Record that training begins after step `number`. The launcher needs the number while the first step compiles."""
    member = current()
    if member.ended_steps.last is None:
        member.ended_steps.last = number
        member.core.note_step(number, 0.0)


def no_change() -> Change:
    """Return a `Change` without any change."""
    member = current()
    present = int(member.core.size())
    return Change(False, member.detached, present, present)


def has_no_cluster(member: Member, size: int | None) -> bool:
    """Return whether this process has left its cluster, or was never in a cluster that can change.

    Raise ResizeError if this process was never in such a cluster but requests a different `size`.
    """
    if member.cluster is None and not member.detached and size is not None and size != int(member.core.size()):
        raise _not_started(size)
    return member.cluster is None or member.detached


def _not_started(size: int) -> ResizeError:
    remedy = "start it with kungfu-run -w"
    return ResizeError(f"{size} workers: a cluster without kungfu-run has 1 rank; {remedy}")


def follow(member: Member, wait: bool, must: bool = False, word: int = 0, settle: Settle | None = None) -> Change:
    """Adopt the cluster version on which the ranks agree.

    With `wait`, return only when the requested size is reached, or raise ResizeError if that is impossible. With
    `must`, an unreachable config server is an error. :func:`step` describes `word` and `settle`.
    """
    core = member.core
    version = int(core.cluster_version())
    ready = True
    while True:
        outcome = pursue(member, wait, must)
        announced, requested, outcome, same = core.agree_after_step(member.requested_size or 0, outcome, word)
        if settle is not None:
            if settle(same):
                return no_change()
            settle = None
        kind, size, value = unpack(outcome)
        member.requested_size = requested or None
        if kind == REFUSED:
            refusal = refusal_of(member, value)
            if refusal is None:
                continue
            drop(member)
            member.requested_size = None
            raise ResizeError(refusal)
        if kind == PENDING:
            member.pending = (size, value) if value > version else None
            if size == requested:
                member.requested_size = None
        pending = member.pending[1] if member.pending is not None else None
        if announced > max(version, member.superseded) and (not wait or pending is None or announced >= pending):
            change = _adopt(member, announced)
            if change is not None:
                return change
        if not ready:
            member.pending = None
            raise ResizeError(f"cluster version {pending} did not become ready within {_patience_s(member):g} s")
        if wait and pending is not None:
            ready = _await_prepared(member, max(pending, member.superseded + 1))
        elif not wait or kind == LATER or member.requested_size is None:
            return no_change()


def _patience_s(member: Member) -> float:
    return member.get(env.JOIN_TIMEOUT) + _GIVE_UP_MARGIN_S


def _await_prepared(member: Member, version: int) -> bool:
    looked = member.ports.monotonic()
    deadline = looked + _patience_s(member)
    while int(member.core.announced_version()) < version:
        now = member.ports.monotonic()
        if member.core.deadlines_held():  # the launcher waits for the store and can't prepare the version yet
            deadline += now - looked
        if now > deadline:
            return False
        looked = now
        member.ports.sleep(member.ports.poll_s)
    return True


def _adopt(member: Member, version: int) -> Change | None:
    """Adopt cluster `version`, on which all current members have agreed.

    If no member adopts the version, return None on all members. This happens if a newer version has superseded this
    version, or if the ranks that would have transferred the training state have failed.
    """
    before, old_size, old_version = member.cluster, int(member.core.size()), int(member.core.cluster_version())
    granted = request_segment(member, old_version, version, member.get(env.JOIN_TIMEOUT))
    if isinstance(granted, Stay):
        member.superseded = version
        return None
    lost = tuple(lost_ranks())
    drop(member)
    member.outcomes.end_version(old_version)
    if isinstance(granted, Detached):
        detach(member, version, granted.evicted)
        return Change(True, True, old_size, old_size, lost)
    enter(member, granted, has_state=member.received)
    new_size = granted.cluster.size
    if member.pending is not None and member.pending[1] <= version:
        member.pending = None
    if member.requested_size == new_size:
        member.requested_size = None
    return Change(True, False, old_size, new_size, lost, before, granted.cluster)
