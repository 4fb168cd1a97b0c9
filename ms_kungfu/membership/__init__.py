"""The worker's part of a change of membership: the ranks of the cluster, and how they adopt the next version.

Only the thread that trains may call these functions, except :func:`evict` and :func:`join`. No function may run during
another collective of this process. Call :func:`ms_kungfu.runtime.init` first. Each file contains the correctness
argument for its part:

- `member`: this process's membership state, and its interfaces to the outside world
- `identity`: rank, size, names
- `cores`: the number of the worker's cores, if results depend on it
- `children`: processes that a worker starts
- `joining`: join and leave a cluster
- `job_end`: a signal that ends the job
- `program_end`: the end of the worker's own program
- `step_agreement`: all ranks agree on the next version once a step
- `requested_size`: write a requested size to the config server
- `sync_points`: the meetings of asynchronous workers, which don't agree once a step
- `reports`: what a worker reports for the job's event log
- `timeline`: this process's part of the job's trace
- `reductions`: the ranks that contributed to a reduction
- `deadlocks`: detect ranks that wait for each other
- `outside`: changes that wait for a worker outside of a step
- `model_store`: access to other workers' latest models
"""

# This package re-exports what it imports.
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
from ms_kungfu.membership.reports import doing, monotonic, report, report_steps, spending
from ms_kungfu.membership.requested_size import expect, is_changing, propose
from ms_kungfu.membership.step_agreement import (
    change_size,
    no_change,
    note_step,
    resize,
    step,
    step_ended,
    training_begun,
)
from ms_kungfu.membership.sync_points import enter_sync_point, follow_sync_point, sync_point_is_due
from ms_kungfu.membership.timeline import traced


def watch_reductions() -> Reductions:
    """Return an object that records the outcomes of this process's reductions from now on."""
    return Reductions(current().outcomes)


def take_participants() -> list[int]:
    """Call :meth:`Reductions.take_participants` on an object that is shared by all callers that don't own one."""
    return current().outcomes.of_nobody.take_participants()


def participants_of(version: int) -> list[int] | None:
    """Return the result of `take_participants` at the end of a version; None if this process wasn't in that version."""
    return current().outcomes.by_version.get(version)


def set_weight(samples: int) -> None:
    """Set the number of samples in this worker's next gradients, the weight of the worker in means over workers."""
    current().core.set_weight(samples)
