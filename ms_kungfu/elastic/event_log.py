"""Log the cluster's events on a worker. Each event is one line, with its step and reason.

This module's state belongs to the process rather than to one training call, because the cluster may reach a requested
size in a later training call.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ms_kungfu import membership
from ms_kungfu.elastic import program
from ms_kungfu.elastic.program import Entry
from ms_kungfu.errors import ResizeError
from ms_kungfu.membership import Change

_log = logging.getLogger(__name__)
_LONGER_S = 2.0
_COMPILED_S = 1.0


def scheduled(step: int, size: int, wait: bool) -> None:
    """Log that the schedule's entry for step `step` requests `size` workers."""
    own = program.current().told
    present = membership.size()
    if own.pending is not None and own.pending.size != size:
        _tell_missed(own.pending, f"the entry of step {step} was due first")
    own.pending, own.waits = Entry(step, size) if size != present else None, wait
    if own.pending is None or not membership.speaks_for_all():
        return
    _log.info("resize requested: %d -> %d workers step=%d reason=schedule wait=%s", present, size, step, wait)
    if not own.at_exit and membership.current().ports.owns_process:
        own.at_exit = True
        atexit.register(_at_exit)


@contextmanager
def refusals() -> Iterator[None]:
    """Forget the schedule's pending request if this context raises a ResizeError."""
    try:
        yield
    except ResizeError:
        program.current().told.pending = None
        raise


def deferred(step: int, until: str) -> None:
    """Log once per prepared version that the cluster switches to that version later. `until`: when it switches."""
    own, version = program.current().told, int(membership.current().core.announced_version())
    if version > max(own.deferred, membership.cluster_version()) and membership.speaks_for_all():
        own.deferred = version
        _log.info('resize deferred: version=%d step=%d until="%s"', version, step, until)


def deaths(step: int, longer_s: float) -> None:
    """Log the workers that have failed since this function was last called.

    `longer_s`: by how many seconds the failures made the step longer than usual.
    """
    own = program.current().told
    lost = membership.lost_ranks()
    if not lost:
        return
    version = membership.cluster_version()
    told = own.reported_failed[1] if own.reported_failed[0] == version else {}
    for rank in lost:
        if rank not in told:
            _log.warning("rank failed: rank=%d peer=%s step=%d", rank, membership.peer_of(rank), step)
            if membership.speaks_for_all():
                living = [int(each) for each in membership.current().core.living()]
                membership.report("failure_seen", rank=rank, step=step, seconds=longer_s, survivors=living)
    own.reported_failed = (version, {**told, **_peers(lost)})


def step_ended(step: int) -> None:
    """Log failures and a long compilation in the step that has just ended. Report an unusually long step."""
    compiled_s, ended_steps = _compiled_s(), membership.current().ended_steps
    if ended_steps.last_s < _COMPILED_S and not membership.lost_ranks():  # so the step can't have taken a second longer
        return
    longer_s = ended_steps.last_took_longer_s
    is_logged = min(compiled_s, longer_s) >= _COMPILED_S
    is_cause = is_logged and compiled_s >= longer_s / 2
    deaths(step, max(0.0, longer_s - compiled_s) if is_cause else longer_s)
    if is_logged:
        _log.info("compiled: step=%d seconds=%.1f", step, compiled_s)
    if longer_s >= _LONGER_S and (is_cause or not membership.lost_ranks()) and membership.speaks_for_all():
        reason = f"MindSpore compiled for {compiled_s:.1f} s" if is_cause else ""
        membership.report("step_delayed", step=step, seconds=longer_s, reason=reason)


def _compiled_s() -> float:
    """Return the seconds that this process has spent compiling since this function was last called."""
    own, total = program.current().told, membership.current().spent.get("compilation", 0.0)
    before, own.compiled_s = own.compiled_s, total
    return total - before


def joined(step: int) -> None:
    """Log that this worker has joined a running job and received the training state."""
    _log.info("joined: rank=%d size=%d step=%d", membership.rank(), membership.size(), step)
    membership.report("worker_joined", rank=membership.rank(), workers=membership.size(), step=step)


def job_ends(step: int, name: str) -> None:
    """Log that training ends after step `step`, because signal `name` ends the job."""
    if membership.speaks_for_all():
        _log.info("training ends: step=%d signal=%s", step, name)


def passes(call: int, call_of_state: int) -> None:
    """Log once that this worker skips the steps of this training call, because its state is from a later call."""
    own = program.current().told
    if not own.told_passing:
        own.told_passing = True
        _log.warning(
            "call skipped: call=%d job_call=%d. Until job_call, this worker's results come from an untrained model",
            call, call_of_state,
        )  # fmt: skip


def changed(step: int, change: Change, seconds: float = 0.0) -> None:
    """Log that the cluster has changed, or has removed this worker.

    `seconds`: how long training paused for the change.
    """
    own = program.current().told
    if change.detached:
        entry, own.pending = own.pending, None
        scheduled = entry is not None and entry.size < change.old_size
        reason = "SIGTERM" if membership.was_terminated() else "schedule" if scheduled else "request"
        reason = "evicted" if membership.was_evicted() else reason
        _log.info("left: size=%d step=%d reason=%s", change.old_size, step, reason)
        return
    version = membership.cluster_version()
    # The reason is only "joined", because workers can't know why the joining worker was started: for a request, or to
    # replace a worker that failed long ago.
    reason = "joined" if change.new_size > change.old_size else "request"
    if change.new_size == change.old_size:
        reason = _with_as_many(change)
    # A worker that failed recently may still have a rank in the new version; the next version excludes such a worker.
    failed = own.reported_failed[1] if own.reported_failed[0] != version else {}
    kept = {rank: peer for rank, peer in _peers(membership.lost_ranks()).items() if peer in failed.values()}
    own.reported_failed = (version, kept)
    if failed_ranks := [rank for rank in change.lost if failed.get(rank) not in kept.values()]:
        reason = f"failed ranks={','.join(map(str, failed_ranks))}"
    if own.pending is not None and own.pending.size == change.new_size:
        reason = "schedule"
        own.pending = None
    _log.info(
        "resize: %d -> %d workers version=%d step=%d reason=%s", change.old_size, change.new_size, version, step, reason
    )
    if membership.speaks_for_all():
        membership.report(
            "resized", version=version, workers=change.new_size, workers_before=change.old_size, step=step,
            reason=reason, seconds=seconds,
        )  # fmt: skip


def checkpoint_written(step: int, path: Path, seconds: float) -> None:
    """Log that a checkpoint is on the disk."""
    _log.info("checkpoint written: step=%d path=%s", step, path)
    membership.report("checkpoint_written", step=step, path=str(path), seconds=seconds)


def checkpoint_failed(step: int, folder: Path, error: Exception) -> None:
    """Log that a checkpoint couldn't be written."""
    what = f"{type(error).__name__}: {error}"
    _log.warning(
        'checkpoint failed: step=%d folder=%s error="%s". Training continues; earlier files remain', step, folder, what
    )
    membership.report("checkpoint_failed", step=step, reason=what)


def resumed(path: str) -> None:
    """Log that all workers have received a checkpoint's state."""
    _log.info("resumed: path=%s workers=%d", path, membership.size())
    membership.report("resumed", path=path)


def _with_as_many(change: Change) -> str:
    if not change.is_of_the_same_workers:
        return "replaced"
    hosts = [("joined", change.hosts_joined), ("left", change.hosts_left)]
    told = [f"{what}={','.join(names)}" for what, names in hosts if names]
    # If no host joined or left, this version has replaced a version to which the workers hadn't switched yet.
    return " ".join(["hosts", *told]) if told else '"same workers"'


def _peers(ranks: Iterable[int]) -> dict[int, str]:
    return {rank: str(membership.peer_of(rank)) for rank in ranks}


def _tell_missed(entry: Entry, why: str) -> None:
    if membership.speaks_for_all():
        _log.warning('resize missed: workers=%d step=%d reason="%s"', entry.size, entry.step, why)


def _at_exit() -> None:
    own = program.current().told
    if own.pending is not None:
        remedy = "" if own.waits else "; with wait=True, training waits for them"
        _tell_missed(own.pending, f"the program ended before the new workers were ready{remedy}")
