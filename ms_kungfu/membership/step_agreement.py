"""Once a step all ranks agree on the next version of their cluster, through the communicator that they have.

Nothing hangs on a particular rank. By one small all-reduce they agree on the newest version that the launcher has
announced, on a size that somebody wants, and on what became of that (`requested_size`). A version is announced once
every new process in it is ready, so no member waits for a start. Then each member asks its host's broker for that
version's segment and joins it. `docs/architecture.md` walks through a resize.

The agreement is an operation like any other, so a death in it, or in the change, is what docs/recovery.md argues about.
"""

from __future__ import annotations

from typing import Callable

from ms_kungfu import env
from ms_kungfu.broker_protocol import Detached, Stay
from ms_kungfu.errors import ResizeError
from ms_kungfu.membership.identity import check_caught_up, lost_ranks
from ms_kungfu.membership.joining import detach, enter, join, request_segment
from ms_kungfu.membership.member import Change, Member, current
from ms_kungfu.membership.requested_size import LATER, PENDING, REFUSED, drop, pursue, refusal_of, unpack, want

_MAX = 3  # the reduction, see comm.OPS
_GIVE_UP_MARGIN_S = 10.0  # the launcher gives joining workers up first, and announces a version without them
_ALL_BITS = (1 << 64) - 1

Settle = Callable[[bool], bool]


def step(size: int | None = None, wait: bool = False, word: int = 0, settle: Settle | None = None) -> Change:
    """Collective, once a step: moves to the newest version that is wanted and ready.

    Args:
        size: the size wanted from now on, e.g. by a schedule; where ranks differ, the largest counts. It is written to
            the config server, and the cluster changes at one of the next steps, once the joining workers are ready.
            None keeps the present wish; what somebody else writes to the config server (``kungfu-run resize``) is
            followed in any case, and so is a cluster without those who died.
        wait: go on only when the size wanted is there, as KungFu's resize does, rather than train meanwhile. The same
            at all ranks.
        word: anything below 2**64 that is to be compared with the other ranks' (see the next one).
        settle: called before the cluster changes, at all ranks or at none, with whether all have brought the same
            word. It may be collective. Where it returns true, the same at all ranks, the cluster stays as it is in this
            step; what it raises leaves this function, the cluster as it was.

    While the config server is away, requested sizes wait for it, and training goes on.

    Raises:
        ResizeError: at every rank, if the change isn't possible; the cluster is as before.
    """
    join()
    member = current()
    if size is not None and not 1 <= size <= 0xFFFF:
        raise ValueError(f"a cluster has at least 1 rank, got size {size}")
    if has_no_cluster(member, size):
        if settle is not None:
            settle(True)
        return no_change()
    if size is not None:
        want(member, size)
    return follow(member, wait, word=word, settle=settle)


def resize(size: int) -> Change:
    """Collective: changes the cluster to `size` ranks; see :func:`ms_kungfu.runtime.resize`."""
    join()
    check_caught_up("kf.resize")
    if size < 1:
        raise ValueError(f"a cluster has at least 1 rank, got size {size}")
    core = current().core
    old_size = int(core.size())
    changed, detached = core.resize(size)
    return Change(changed, detached, old_size, int(core.size()))


def change_size(size: int) -> tuple[bool, bool]:
    """The runtime's resize handler: all ranks have agreed on `size`, which is not the present size."""
    member = current()
    if member.cluster is None:
        raise _not_started(size)
    member.requested_size, member.pending = size, None
    change = follow(member, wait=True, must=True)
    return change.changed, change.detached


def note_step(number: int) -> None:
    """The training is at this step: a change of the cluster is told with it."""
    current().training_step = number


def step_ended(number: int) -> None:
    """The training has ended this step: `kungfu-run status` shows it."""
    member = current()
    member.ended_steps.ended(number, member.ports.monotonic())
    member.core.note_step(number, member.ended_steps.each_s)


def no_change() -> Change:
    """That the cluster stays as it is, or stays left."""
    member = current()
    present = int(member.core.size())
    return Change(False, member.detached, present, present)


def has_no_cluster(member: Member, size: int | None) -> bool:
    """Whether this process has left, or was never in a cluster that could change. ResizeError where the latter wants
    another `size`."""
    if member.cluster is None and not member.detached and size is not None and size != int(member.core.size()):
        raise _not_started(size)
    return member.cluster is None or member.detached


def _not_started(size: int) -> ResizeError:
    remedy = "start it with kungfu-run -w"
    return ResizeError(f"{size} workers: a cluster without kungfu-run has 1 rank; {remedy}")


def follow(member: Member, wait: bool, must: bool = False, word: int = 0, settle: Settle | None = None) -> Change:
    """Moves to the version that the ranks agree on. With `wait`, not before the requested size has come true or can't;
    with `must` a config server that is away is an error. `word` and `settle` are those of :func:`step`."""
    core, row = member.core, member.row
    present, version = int(core.size()), int(core.cluster_version())
    stays = Change(False, False, present, present)
    ready = True
    while True:
        # The greatest of a word and of its complement: they belong together where all ranks bring the same.
        became = pursue(member, wait, must)
        row[:] = (int(core.announced_version()), member.requested_size or 0, became, word, word ^ _ALL_BITS)
        core.all_reduce("kungfu/step", row, row, _MAX)
        if settle is not None:
            if settle(int(row[3]) == int(row[4]) ^ _ALL_BITS):
                return stays
            settle = None
        announced, requested = int(row[0]), int(row[1])
        kind, size, value = unpack(int(row[2]))
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
            return stays


def _patience_s(member: Member) -> float:
    return member.get(env.JOIN_TIMEOUT) + _GIVE_UP_MARGIN_S


def _await_prepared(member: Member, version: int) -> bool:
    looked = member.ports.monotonic()
    deadline = looked + _patience_s(member)
    while int(member.core.announced_version()) < version:
        now = member.ports.monotonic()
        if member.core.deadlines_held():  # the launcher announces it once the store has answered
            deadline += now - looked
        if now > deadline:
            return False
        looked = now
        member.ports.sleep(member.ports.poll_s)
    return True


def _adopt(member: Member, version: int) -> Change | None:
    """Moves to cluster `version`, on which all present members have agreed. None at all of them where nobody does: it
    was superseded meanwhile, or those who would have carried the state over are dead."""
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
