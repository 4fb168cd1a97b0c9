"""Run synchronous steps: the workers commit or undo each step together, and then carry out due cluster changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Callable

from ms_kungfu import runtime
from ms_kungfu.elastic.carried import Carried
from ms_kungfu.elastic.changes import ClusterChanges
from ms_kungfu.elastic.checkpoint import Checkpointing
from ms_kungfu.elastic.fingerprints import fingerprint
from ms_kungfu.elastic.measuring import Measuring
from ms_kungfu.elastic.misuse_warnings import MisuseWarnings
from ms_kungfu.elastic.program import Training
from ms_kungfu.elastic.undo import LastStep
from ms_kungfu.membership import Change


@dataclass
class SynchronousSteps:
    """One worker's synchronous steps. `size_after` maps a step to the size that the schedule requests at that step."""

    training: Training
    size_after: Callable[[int], int | None]
    carried: Carried
    measuring: Measuring
    checkpoints: Checkpointing
    changes: ClusterChanges

    def __post_init__(self) -> None:
        self.misuse_warnings = MisuseWarnings()
        self.last = LastStep(lambda: self.training.training_state)
        self._are_told = False  # whether the program calls `begin` at the beginning of each step

    def begin(self) -> None:
        """Begin a step. Called only if the program announces the beginning of each step."""
        self._are_told = True
        if not self.training.should_stop:
            self.last.begins()

    def follow(self) -> None:
        """Prepare the next step. Called after the changes that were due after the last step."""
        if self.training.should_stop:
            return
        self.measuring.ask("before_step")
        self.carried.scale_rates()  # a policy, or the program, may have changed the global batch
        if not self._are_told and self.training.dataset is None:
            self.last.begins()

    def step_end(self, loss: Any, samples: int | None) -> Change:
        """End the step whose number is `training.step` (collective)."""
        step, dataset = self.training.step, self.training.dataset
        self.changes.statistics.mark()
        if not self.last.ended(step):
            return self._do_again()
        self.changes.steps_here += 1
        if not self.carried.deals_shards:
            self.misuse_warnings.step(self.last.reductions, runtime.current_cluster_size())
        trained = None
        if dataset is not None:
            samples = dataset.weight if samples is None else samples
            if dataset.wants_fingerprint(step):
                dataset.keep_fingerprint(step, fingerprint(self.training.training_state))
            dataset.training = self.checkpoints.training
            trained = dataset.commit(self.last.take_participants())
        self.measuring.step_end(loss, samples, trained)
        self.changes.statistics.committed(step, samples, trained, loss)
        self.measuring.ask("after_step")
        # Write the checkpoint before the cluster changes. All workers must take part in a checkpoint, but a joining
        # worker wouldn't know that one is due.
        if self.checkpoints.is_due(step):
            self.checkpoints.write(step)
        change = self.changes.change_to(self.size_after(step), behind_a_step=True)
        self.changes.job_end.carry_out(step)
        self.follow()
        return change

    def epoch_end(self) -> None:
        if self.training.dataset is not None and self.training.step == self.training.first_step:
            self.misuse_warnings.without_steps()
        self.measuring.ask("after_epoch")

    def _do_again(self) -> Change:
        self.training.step -= 1
        participants = self.last.take_participants()
        if self.training.dataset is not None:
            self.training.dataset.take_back(participants)
        change = self.changes.change_to(behind_a_step=True)
        self.changes.job_end.carry_out(self.training.step)
        self.follow()
        return replace(change, undone=True)
