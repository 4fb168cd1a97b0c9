"""Agreements of the workers after a step: a change of the cluster, a stop, a consistency check; and their results."""

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
    """The changes that one training follows. `wait`: for a size of the schedule."""

    training: Training
    wait: bool
    carried: Carried
    measuring: Measuring
    checkpoints: Checkpointing
    beside: Beside

    def __post_init__(self) -> None:
        self.job_end = LastCheckpoint(self.checkpoints)
        self.prepare: Callable[[], None] = lambda: None
        """Called before the workers agree on a change; set by the driver of the training."""
        self.agree_on_trained: Callable[[bool], None] = lambda joins: None
        """Collective at the beginning, and after each change: agrees on what is trained; set likewise."""
        self.may_follow: Callable[[], bool] = lambda: True
        """Whether a change that is ready is carried out after this step; the same at all workers."""
        self.consistency: ConsistencyCheck | None = None
        """Once training began."""
        self.stop_asked = False
        """At this worker."""
        self._asked_end = 0
        """The signal by which the job ends, as far as this worker knows in the present agreement."""
        self._stopped = False  # all know of it
        self.statistics = StepStatistics(self.training)
        self.steps_here = 0
        """Since the cluster changed, or the call began."""

    def begin(self) -> None:
        """Begin a call of training."""
        self.training.should_stop = self.stop_asked = self._stopped = False
        self.steps_here = 0

    def end(self) -> None:
        """End the call."""
        self.statistics.end()
        self.job_end.end()
        if self._stopped:
            self.suspend(False)
        self.check_sameness()

    def leave_loop(self, between: bool) -> None:
        """Note that the program leaves its loop of epochs, `between` which alone the cluster has changed."""
        self.job_end.end()
        if between:
            self.may_follow = lambda: True

    def suspend(self, suspended: bool) -> None:
        """Note whether this worker's loop and dataset end."""
        self.training.should_stop = suspended
        if self.training.dataset is not None:
            self.training.dataset.suspended = suspended

    def agree_on_stop(self) -> None:
        """Agree on a stop; collective at the end of an epoch, except after a change: see `ElasticTraining`."""
        if self.steps_here > 0:
            asked = comm.all_reduce(np.array([self.stop_asked], np.int32), op="max", name="kungfu/stop")
            self._stop(bool(asked[0]))

    def _stop(self, stops: bool) -> bool:
        if stops:
            self._stopped = True
            self.suspend(True)
        return stops

    def check_sameness(self) -> None:
        """Check collectively that what has to be equal on all workers is; otherwise DivergenceError."""
        in_step = runtime.current_cluster_size() > 1 and not runtime.detached() and not is_behind()
        if in_step and self.consistency is not None:
            self.consistency.check_all(self.training.step)

    def _settle(self, consistency: ConsistencyCheck, same: bool) -> bool:
        """Decide in the step's agreement whether training, or the job, ends. DivergenceError if the workers differ.

        The next call carries out a change that is due as well: `begin` follows it.
        """
        stops, number = self.stop_asked, self._asked_end
        if not same:
            everyones = gather_json([stops, number, consistency.words()], "kungfu/same")
            check(self.training.step, {rank: told for rank, (_, _, told) in everyones.items()})
            stops, number = any(row[0] for row in everyones.values()), max(row[1] for row in everyones.values())
        self.job_end.agreed = number
        return self._stop(stops) or bool(number) or not self.may_follow()

    def change_to(self, scheduled: int | None = None, behind_a_step: bool = False) -> Change:
        """Change to the size that the policies, the schedule or the config server want; collective.

        `behind_a_step`: the workers agree on a stop, too, and compare their states.
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
        """Carry out what a change brings with it, which began then; collective."""
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
