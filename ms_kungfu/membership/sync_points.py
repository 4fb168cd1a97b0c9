"""Asynchronous trainings come together only for a reason: a sync point.

Ranks that make their steps at their own speed can't agree once a step. Each looks, after its step, at two words of the
segment, and goes on (:func:`sync_point_is_due`). Only where these say so do all come together:
:func:`enter_sync_point`, what the training has to agree on, then :func:`follow_sync_point`, which is the agreement of
`step_agreement`.

- `announced`, written by the launcher: a version newer than this cluster's. So arrive deaths, evictions, ``kungfu-run
  resize``, and sizes that are pending.
- `sync points`, raised by any member: how many have been asked for. A rank asks for the one after those that it has
  been to, where its schedule wants a size, a requested size is refused, a checkpoint is due, or it has made all its
  steps.

Both only grow, so a reason that one rank has seen is seen by every other one after its present step at the latest, and
stays until they have come together. A rank that enters a sync point waits there and asks for no other. So all ranks
come to the same sync points in the same order, whatever each came for: what it came for is in what it brings. A sync
point waits for the slowest rank's present step, and for no more.

- Where a rank dies, before a sync point or in it, the others' operations end without it (docs/recovery.md). If it had
  asked for the sync point, they come together for nothing and go on. Its death becomes a version, which is a reason.
- The lowest living rank writes a requested size after its own steps, without a sync point. If it dies the next one does
  so again: all know the size from the sync point that it was told in, and keep it until they hear in a sync point that
  it is pending.
- A new version begins with its own number and no sync points.
- A rank that has made all its steps asks for a sync point and waits in it, and with that training ends for all: nobody
  goes on, in other collectives or out of its process, where others still expect it.
"""

from __future__ import annotations

from ms_kungfu.membership.joining import join
from ms_kungfu.membership.member import Change, Member, current
from ms_kungfu.membership.requested_size import NOTHING, REFUSED, pursue, unpack, want, wanted_size
from ms_kungfu.membership.step_agreement import follow, has_no_cluster, no_change


def sync_point_is_due(size: int | None = None, call: bool = False) -> bool:
    """Whether all ranks are about to come together, so that this one has to :func:`enter_sync_point` now. Not
    collective; some atomic loads where nothing is to be done.

    Args:
        size: the size that this rank wants from now on. If nobody has wanted it yet this asks for a sync point.
        call: ask for one in any case.

    Raises:
        ResizeError: where there is nobody who could change the size.
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
    """This rank has come to the sync point that was due. What follows is collective."""
    current().sync_points += 1


def follow_sync_point(size: int | None) -> Change:
    """Collective, in a sync point: moves to the newest version that is ready; afterwards `size`, the same at all ranks,
    is wanted. Raises as :func:`step` does."""
    member = current()
    if has_no_cluster(member, None):
        return no_change()
    try:
        return follow(member, wait=False)  # first: it tells everybody what is pending already
    finally:
        if size is not None and not member.detached:
            want(member, size)
            _pursue(member)


def _pursue(member: Member) -> int:
    """At the lowest living rank: has the requested size written, if there is one. The kind of what became of it."""
    return NOTHING if member.requested_size is None else unpack(pursue(member, wait=False, must=False))[0]
