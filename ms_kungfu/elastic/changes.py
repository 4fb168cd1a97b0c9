"""After a step, agree with the other workers on a cluster change and a stop, and check the workers' consistency."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Callable

import numpy as np

from ms_kungfu import comm, membership, runtime
from ms_kungfu.agreement import gather_json
from ms_kungfu.dataset import replaying
from ms_kungfu.elastic import event_log, state_transfer
from ms_kungfu.elastic.beside import Beside
from ms_kungfu.elastic.carried import Carried
from ms_kungfu.elastic.checkpoint import Checkpointing
from ms_kungfu.elastic.consistency import ConsistencyCheck, check
from ms_kungfu.elastic.last_checkpoint import LastCheckpoint
from ms_kungfu.elastic.measuring import Measuring
from ms_kungfu.elastic.program import Training, is_behind
from ms_kungfu.elastic.statistics import StepStatistics
from ms_kungfu.membership import Change


@dataclass
class ClusterChanges:
    """Carry out cluster changes. `wait`: whether a schedule entry's step waits until the cluster has the new size."""

    training: Training
    wait: bool
    carried: Carried
    measuring: Measuring
    checkpoints: Checkpointing
    beside: Beside

    def __post_init__(self) -> None:
        self.prepare: Callable[[], None] = lambda: None
        """A function that is called before the workers agree on a change. `ms_kungfu.msrun` sets it."""
        self.agree_on_trained: Callable[[bool], None] = lambda joins: None
        """A collective function that is called when training begins and after each change of the cluster.

        The function lets the workers agree on their training dataset. `ms_kungfu.msrun` sets it.
        """
        self.may_follow: Callable[[], bool] = lambda: True
        """A function that returns whether the cluster may change after this step, the same on all workers."""
        self.defers_until: str | None = None
        """A log text that names the time until which changes are deferred; None if they aren't deferred for long."""
        self.consistency: ConsistencyCheck | None = None
        """The consistency check; None before training begins."""
        self.stop_asked = False
        """Whether this worker's program has requested a stop."""
        self._asked_end = 0
        """The signal that ends the job, which this worker reports to the other workers; 0 if there is no signal."""
        self._stopped = False  # whether all workers have agreed to stop
        self.statistics = StepStatistics(self.training, self.measuring)
        self.job_end = LastCheckpoint(self.checkpoints, self.statistics)
        self.steps_here = 0
        """The number of steps since the last change of the cluster, or since the training call began."""

    def begin(self) -> None:
        self.training.should_stop = self.stop_asked = self._stopped = False
        self.steps_here = 0

    def expect_epochs(self, count: int) -> None:
        self.measuring.expect_epochs(count)
        self.statistics.epochs = int(count)

    def end(self) -> None:
        self.statistics.end()
        self.job_end.end()
        if self._stopped:
            self.suspend(False)
        self.check_sameness()

    def leave_loop(self, between: bool) -> None:
        """End a loop over epochs. `between`: whether the loop has allowed cluster changes only between epochs."""
        self.job_end.end()
        if between:
            self.may_follow, self.defers_until = lambda: True, None

    def defer_in_last_epoch(self, is_last: bool) -> None:
        """Begin an epoch of a loop that allows changes only between epochs. `is_last`: whether it is the last epoch."""
        self.defers_until = "this training call ends" if is_last else None

    def suspend(self, suspended: bool) -> None:
        """If `suspended`, end this worker's loop and dataset early. If not, let both run normally again."""
        self.training.should_stop = suspended
        if self.training.dataset is not None:
            self.training.dataset.suspended = suspended

    def agree_on_stop(self) -> None:
        """Agree on a stop at the end of an epoch (collective).

        Directly after a change of the cluster, the workers agree later: see `ElasticTraining.agree_on_stop`.
        """
        if self.steps_here > 0:
            asked = comm.all_reduce(np.array([self.stop_asked], np.int32), op="max", name="kungfu/stop")
            self._stop(bool(asked[0]))

    def _stop(self, stops: bool) -> bool:
        if stops:
            self._stopped = True
            self.suspend(True)
        return stops

    def check_sameness(self) -> None:
        """Compare the values that must be equal on all workers; raise DivergenceError if one differs (collective)."""
        in_step = runtime.current_cluster_size() > 1 and not runtime.detached() and not is_behind()
        if in_step and self.consistency is not None:
            self.consistency.check_all(self.training.step)

    def _settle(self, consistency: ConsistencyCheck, same: bool) -> bool:
        """Decide whether a cluster change that is due must wait. Part of the agreement after a step.

        The change waits if training stops, the job ends, or `may_follow` forbids changes now. If training stops, the
        next training call's `begin` carries out the change.

        `same`: whether the hashes of all workers are the same. Raise DivergenceError if the workers' states differ.
        """
        stops, number = self.stop_asked, self._asked_end
        if not same:
            everyones = gather_json([stops, number, consistency.words()], "kungfu/same")
            check(self.training.step, {rank: told for rank, (_, _, told) in everyones.items()})
            stops, number = any(row[0] for row in everyones.values()), max(row[1] for row in everyones.values())
        self.job_end.agreed = number
        follows = self.may_follow()
        if not follows and self.defers_until is not None:
            event_log.deferred(self.training.step, self.defers_until)
        return self._stop(stops) or bool(number) or not follows

    def change_to(self, scheduled: int | None = None, behind_a_step: bool = False) -> Change:
        """Change the cluster to the size that a policy, the schedule or the config server requests (collective).

        `behind_a_step`: whether a step has just ended. If so, the workers also agree on a stop and compare states.
        """
        self.prepare()
        began, step, consistency = membership.monotonic(), self.training.step, self.consistency
        if scheduled is not None:
            event_log.scheduled(step, scheduled, self.wait)
        size = self.measuring.take_size()
        wanted = scheduled if size is None or replaying.current() is not None else size
        membership.note_step(step)
        with event_log.refusals():
            if consistency is None or not behind_a_step:
                change = membership.step(wanted, self.wait)
            else:
                word = consistency.word(step) if runtime.current_cluster_size() > 1 else 0
                self._asked_end = self.job_end.signal
                word ^= (self.stop_asked << 63) | (self._asked_end << 56)
                change = membership.step(wanted, self.wait, word, partial(self._settle, consistency))
        self.follow(change, began)
        if change.changed and not change.detached:
            self.measuring.took(membership.monotonic() - began)
        return change

    def follow(self, change: Change, began: float) -> None:
        """Do the work that follows a change of the cluster (collective). `began`: when the change began."""
        training = self.training
        if change.detached:
            event_log.changed(training.step, change)
            self.suspend(True)
        elif change.changed:
            self.beside.warn_of_changed()
            self.steps_here = 0
            self.measuring.on_resized(change.new_size)
            self.agree_on_trained(False)
            state_transfer.share_state(training.training_state)
            self.carried.scale_rates()
            self.checkpoints.make_up(training.step)
            self.statistics.resume()
            event_log.changed(training.step, change, membership.monotonic() - began)
