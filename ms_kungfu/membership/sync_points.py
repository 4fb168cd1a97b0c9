"""Sync points: the only membership collectives in asynchronous training.

Ranks that run their steps at different speeds can't agree once per step. Instead, each rank reads two words of the
shared-memory segment after its step (:func:`sync_point_is_due`). If neither word requests a sync point, the rank
continues. If one does, all ranks call :func:`enter_sync_point`, agree on the training's state, and call
:func:`follow_sync_point`, which runs the agreement of `step_agreement`. The two words are:

- `announced`, which the launcher writes, is the newest prepared cluster version. A failure, an eviction, ``kungfu-run
  resize`` or a pending size causes a new version.
- `sync points`, which any member increments, is the number of sync points requested so far. A rank requests the next
  sync point if its schedule has a new size, a requested size is rejected, a checkpoint is due, or its steps are done.

1. Both words only grow. So each rank reads a request when its current step ends, and the request stays readable until
   all ranks have entered the sync point.
2. A rank that enters a sync point waits there and requests no other sync point. Each rank contributes its own reason
   for the sync point. So all ranks enter the same sync points in the same order, whatever their reasons. A sync point
   waits only for the slowest rank's current step. (`test_simulated_jobs.py`.)
3. If a rank fails before or at a sync point, the other ranks' operations end without that rank (docs/recovery.md). If
   only the failed rank had a reason for the sync point, the other ranks still enter that sync point and then continue.
   The failure causes a new version, which is the reason for the next sync point.
4. The lowest living rank writes a requested size after its own steps, without a sync point. If that rank fails, the
   next rank writes the size again. All ranks receive the size at a sync point, and store it until a sync point reports
   that the size is pending.
5. In a new version, `announced` is that version's number, and `sync points` is 0.
6. A rank that has finished all its steps requests a sync point and waits there. That sync point ends training for all
   ranks. So no rank starts other collectives or exits while other ranks are still waiting for it at a sync point.
"""

from __future__ import annotations

from ms_kungfu.membership.joining import join
from ms_kungfu.membership.member import Change, Member, current
from ms_kungfu.membership.requested_size import NOTHING, REFUSED, pursue, unpack, want, wanted_size
from ms_kungfu.membership.step_agreement import follow, has_no_cluster, no_change


def sync_point_is_due(size: int | None = None, call: bool = False) -> bool:
    """Return whether a sync point has been requested, so that this rank has to call :func:`enter_sync_point` now.

    This function isn't a collective. If no sync point has been requested, it takes only a few atomic loads.

    Args:
        size: the size that this rank requests. If that size hasn't been requested yet, the function requests a sync
            point.
        call: whether to request a sync point in any case.

    Raises:
        ResizeError: if this process has no launcher that could change the size.
    """
    join()
    member = current()
    if has_no_cluster(member, size):
        return call
    call = call or (size is not None and size != wanted_size(member)) or _pursue(member) == REFUSED
    core = member.core
    if call:
        core.request_sync_point(member.sync_points + 1)
    known = max(int(core.cluster_version()), member.superseded)
    return call or int(core.sync_points()) > member.sync_points or int(core.announced_version()) > known


def enter_sync_point() -> None:
    """Enter the sync point that was requested. The caller's next operations must be collectives."""
    current().sync_points += 1


def follow_sync_point(size: int | None) -> Change:
    """Adopt the newest prepared cluster version, then request `size`. All ranks must call this at a sync point.

    `size` must be the same on all ranks. The function raises the same errors as :func:`step`.
    """
    member = current()
    if has_no_cluster(member, None):
        return no_change()
    try:
        # Adopt the version before requesting the size, so that all ranks know of a size that is already pending.
        return follow(member, wait=False)
    finally:
        if size is not None and not member.detached:
            want(member, size)
            _pursue(member)


def _pursue(member: Member) -> int:
    """If this process is the lowest living rank, write the requested size, if any. Return the kind of the result."""
    return NOTHING if member.requested_size is None else unpack(pursue(member, wait=False, must=False))[0]
