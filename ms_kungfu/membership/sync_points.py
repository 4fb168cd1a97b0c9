"""Sync points: the only meetings of the workers in asynchronous training.

Ranks that make their steps at their own speed can't agree once a step. Each reads, after its step, two words of the
segment, and continues (:func:`sync_point_is_due`). Only if these say so do all come together: :func:`enter_sync_point`,
what the training has to agree on, then :func:`follow_sync_point`, which is the agreement of `step_agreement`.

- `announced`, written by the launcher: a version newer than this cluster's. It brings failures, evictions, ``kungfu-run
  resize``, and pending sizes.
- `sync points`, increased by any member: how many have been requested. A rank requests the next one if its schedule
  wants a size, a requested size is rejected, a checkpoint is due, or it has made all its steps.

1. Both only grow. So each rank sees another one's reason after its present step at the latest, and the reason stays
   until they have come together.
2. A rank that enters a sync point waits there and requests no other. So all ranks come to the same sync points in the
   same order, whatever each came for: its reason is in its contribution. A sync point waits for the slowest rank's
   present step, and for no more. (`test_simulated_jobs.py`.)
3. If a rank fails, before a sync point or in it, the others' operations end without it (docs/recovery.md). If it had
   requested the sync point, they come together for nothing and continue. Its failure becomes a version, which is a
   reason.
4. The lowest living rank writes a requested size after its own steps, without a sync point. If it fails the next one
   writes it again. All know the size from a sync point, and keep it until a sync point reports that it is pending.
5. A new version begins with its own number and no sync points.
6. A rank that has made all its steps requests a sync point and waits in it, and with that training ends for all. So no
   rank continues, in other collectives or out of its process, while others still expect it.
"""

from __future__ import annotations

from ms_kungfu.membership.joining import join
from ms_kungfu.membership.member import Change, Member, current
from ms_kungfu.membership.requested_size import NOTHING, REFUSED, pursue, unpack, want, wanted_size
from ms_kungfu.membership.step_agreement import follow, has_no_cluster, no_change


def sync_point_is_due(size: int | None = None, call: bool = False) -> bool:
    """Return whether all ranks are about to come together, so that this one has to :func:`enter_sync_point` now.

    Not collective; some atomic loads if nothing is to be done.

    Args:
        size: the size that this rank wants from now on. If no rank has wanted it yet this requests a sync point.
        call: request one in any case.

    Raises:
        ResizeError: no process could change the size.
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
    """Enter the sync point that was due. What follows is collective."""
    current().sync_points += 1


def follow_sync_point(size: int | None) -> Change:
    """Adopt the newest version that is ready, and want `size`, the same at all ranks; collective, in a sync point.

    Raises as :func:`step` does.
    """
    member = current()
    if has_no_cluster(member, None):
        return no_change()
    try:
        return follow(member, wait=False)  # first: it notifies all ranks of what is pending already
    finally:
        if size is not None and not member.detached:
            want(member, size)
            _pursue(member)


def _pursue(member: Member) -> int:
    """Have the requested size written, at the lowest living rank, if there is one. Return the kind of the result."""
    return NOTHING if member.requested_size is None else unpack(pursue(member, wait=False, must=False))[0]
