"""A worker's side of a change of membership: the ranks of the cluster, and how they adopt the next version.

All functions but :func:`evict` and :func:`join` belong to the thread that trains; none may run during another
collective of this process. :func:`ms_kungfu.runtime.init` comes before them. Each file has the argument for its part:

- `member`: what this process knows, and the ports by which it reaches the world
- `identity`: rank, size, names
- `cores`: how many it has, if bits depend on it
- `children`: processes that a worker starts
- `joining`: into a cluster and out of it
- `job_end`: a signal that ends the job; `program_end`: the end of its own program
- `step_agreement`: once a step all ranks agree on the next version
- `requested_size`: how a requested size gets into the config server
- `sync_points`: at which asynchronous trainings meet instead
- `reports`: what a worker reports for the job's event log
- `reductions`: which ranks contributed to what was reduced
- `deadlocks`: ranks that wait for each other
- `outside`: changes that wait for a worker outside of a step
- `model_store`: the way to other workers' latest models
"""

# It offers what it imports.
# ruff: noqa: F401
# mypy: implicit-reexport

from __future__ import annotations

from ms_kungfu.membership.cores import core_count, fix_cores, fixed_core_count, let_wakers_go_on
from ms_kungfu.membership.identity import (
    check_caught_up,
    cluster_version,
    host_of_rank,
    identity,
    is_catching_up,
    is_deferred,
    is_detached,
    is_first_cluster,
    is_joining,
    local_rank,
    local_size,
    lost_ranks,
    peer_of,
    rank,
    set_catching_up,
    size,
    speaks_for_all,
    state_received,
    sync_root,
    uid,
    was_evicted,
)
from ms_kungfu.membership.job_end import JobEnd, watch_job_end
from ms_kungfu.membership.joining import begin, evict, forget, join
from ms_kungfu.membership.member import Change, Member, Ports, current, use
from ms_kungfu.membership.program_end import report_program_end
from ms_kungfu.membership.reductions import Reductions
from ms_kungfu.membership.reports import monotonic, report, report_steps, spending
from ms_kungfu.membership.requested_size import expect, is_changing, propose
from ms_kungfu.membership.step_agreement import change_size, no_change, note_step, resize, step, step_ended
from ms_kungfu.membership.sync_points import enter_sync_point, follow_sync_point, sync_point_is_due


def watch_reductions() -> Reductions:
    """Return an object that collects the outcomes of this process's reductions from now on."""
    return Reductions(current().outcomes)


def take_participants() -> list[int]:
    """Do the same for callers without a `watch_reductions` of their own: :meth:`Reductions.take_participants`."""
    return current().outcomes.of_nobody.take_participants()


def participants_of(version: int) -> list[int] | None:
    """Return what `take_participants` had when the cluster left this version; None if this process wasn't in it."""
    return current().outcomes.by_version.get(version)


def set_weight(samples: int) -> None:
    """Set for how many samples the next gradients of this worker stand: means over the workers are weighted by it."""
    current().core.set_weight(samples)
