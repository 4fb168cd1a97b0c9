"""Let a worker take part in cluster changes, and let the ranks adopt the next cluster version.

Only the training thread may call these functions, except :func:`evict` and :func:`join`, which any thread may call.
Don't call a function while another collective of this process is running. Call :func:`ms_kungfu.runtime.init` first.
Each file contains the correctness argument for its part:

- `member`: this process's membership state, and its interfaces to the outside world
- `identity`: the rank, the cluster size and the name of this process
- `cores`: the number of this worker's cores, which is fixed if results depend on it
- `children`: processes that a worker starts
- `joining`: join and leave a cluster
- `job_end`: a signal that ends the job
- `program_end`: the end of the worker's own program
- `step_agreement`: all ranks agree on the next cluster version once per step
- `requested_size`: write a requested size to the config server
- `sync_points`: the points at which asynchronous workers agree, because they can't agree once per step
- `reports`: a worker's reports for the job's event log
- `timeline`: the trace of this process
- `reductions`: the ranks that contributed to a reduction
- `deadlocks`: detects ranks that wait for each other
- `outside`: reports that a cluster change is waiting because a worker doesn't end a step
- `model_store`: access to other workers' latest models
"""

# This package re-exports its imports.
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
    was_terminated,
)
from ms_kungfu.membership.job_end import JobEnd, watch_job_end
from ms_kungfu.membership.joining import begin, evict, forget, join
from ms_kungfu.membership.member import Change, Member, Ports, current, use
from ms_kungfu.membership.program_end import report_program_end
from ms_kungfu.membership.reductions import Reductions
from ms_kungfu.membership.reports import count_spent, doing, monotonic, report, report_steps, spending
from ms_kungfu.membership.requested_size import expect, is_changing, propose
from ms_kungfu.membership.step_agreement import (
    change_size,
    no_change,
    note_step,
    resize,
    step,
    step_ended,
    step_resumed,
    training_begun,
)
from ms_kungfu.membership.sync_points import enter_sync_point, follow_sync_point, sync_point_is_due
from ms_kungfu.membership.timeline import traced


def watch_reductions() -> Reductions:
    """Return an object that records the outcomes of this process's reductions from now on."""
    return Reductions(current().outcomes)


def take_participants() -> list[int]:
    """Call :meth:`Reductions.take_participants` on the object for callers that don't have their own object."""
    return current().outcomes.of_nobody.take_participants()


def participants_of(version: int) -> list[int] | None:
    """Return the participants in a cluster version's last reductions; None if this process wasn't a member then."""
    return current().outcomes.by_version.get(version)


def set_weight(samples: int) -> None:
    """Set the weight of this worker in means over workers: the number of samples in its next gradients."""
    current().core.set_weight(samples)
