"""Collect the state that determines the next training step. `ms_kungfu.elastic.state` lists its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ms_kungfu import runtime
from ms_kungfu.elastic import program, randomness, state
from ms_kungfu.elastic.consistency import ConsistencyCheck, pieces_of
from ms_kungfu.elastic.lr_rule import parse_lr_rule
from ms_kungfu.elastic.measuring import Measuring
from ms_kungfu.elastic.options import Options
from ms_kungfu.elastic.program import Training
from ms_kungfu.elastic.state import Component, TrainingState
from ms_kungfu.trained import inventory

if TYPE_CHECKING:
    from ms_kungfu.elastic.learning_rates import LearningRates


class Carried:
    """The training state: everything that a joining worker receives and a checkpoint contains.

    Args:
        training: provides the progress and the dataset.
        trained: the cells, optimizers and other objects that the program has passed to `ElasticTraining`.
        measuring: the monitor and the policies, which also have state.
    """

    def __init__(
        self,
        training: Training,
        trained: Sequence[Any],
        options: Options,
        loss_scale_manager: Any,
        measuring: Measuring,
    ) -> None:
        self.trained = trained
        self._training, self._options, self._measuring = training, options, measuring
        self._loss_scale_manager = loss_scale_manager
        self._call = 0  # the number of the current training call, counted from 1
        self._rule = parse_lr_rule(options.lr_rule)
        self._rates: LearningRates | None = None  # set when training begins, if there is an `lr_rule`
        self._schedulers: list[Any] = []  # schedulers of optimizers with param_groups, set when training begins
        self._is_covered = False  # whether `check_covered` has succeeded
        for optimizer in training.optimizers:
            from ms_kungfu.trained.rates import hold_last_rate  # loads MindSpore

            hold_last_rate(optimizer)

    @property
    def deals_shards(self) -> bool:
        """Return whether steps are partitioned into shards, so that results don't depend on the cluster size."""
        dataset = self._training.dataset
        return dataset is not None and dataset.shards is not None

    @property
    def averaged(self) -> Sequence[Any]:
        """The tensors that differ between the workers by design, such as moving statistics."""
        averaged = self._options.averaged
        return inventory.moving_statistics(self.trained) if averaged is None else averaged

    @property
    def parameters(self) -> list[Any]:
        """The Parameters that are kept equal on all workers, without duplicates."""
        bases = self._rates.bases if self._rates is not None else []
        return [*inventory.collect_parameters((*self.trained, *self._schedulers)), *bases]

    @property
    def components(self) -> list[Component]:
        """The parts of the state that are neither Parameters nor buffers."""
        training = self._training
        progress = Component("progress", lambda: {"call": self._call, **program.progress(training)}, program.resume)
        carried = [progress]
        parts: dict[str, Any] = {"dataset": self._training.dataset, "learning_rate": self._rates}
        parts.update(monitor=self._measuring.monitor, policies=self._measuring.policies)
        carried += [Component(name, part.state, part.restore) for name, part in parts.items() if part is not None]
        if self._loss_scale_manager is not None:
            carried.append(state.attributes_component("loss_scale", self._loss_scale_manager))
        grouped = [optimizer for optimizer in self._training.optimizers if inventory.is_grouped(optimizer)]
        if grouped or self._schedulers:
            carried.append(state.groups_component(grouped, self._schedulers))
        return [*carried, *randomness.components(self.trained), *self._options.components]

    def state(self) -> TrainingState:
        statistics = inventory.moving_statistics(self.trained)
        buffers = inventory.collect_buffers(self.trained)
        averaged = tuple(self.averaged)
        return TrainingState(self.parameters, self.components, buffers, averaged, tuple(statistics), self._call)

    def begin(self) -> int:
        """Begin a training call. Return the number of the call."""
        inventory.check_reduced(self.trained, None if self._training.dataset is None else self._training.dataset.shards)
        self._schedulers = inventory.collect_schedulers(self.trained, self._training.optimizers)
        mine = program.current()
        mine.calls += 1
        self._call = mine.calls
        if self._call == 1:
            randomness.note_origins(self.components)
        if self._rule is not None:
            from ms_kungfu.elastic.learning_rates import LearningRates

            follows = "samples" if self.deals_shards else "workers"
            self._rates = LearningRates.of(self.trained, self._rates_follow(), follows)
        return self._call

    def check_covered(self) -> None:
        """Check, after the first step with shards, that no result of a step depends on the cluster size."""
        if self.deals_shards and not self._is_covered:
            inventory.check_sharded(self.trained)
            self._is_covered = True

    def scale_rates(self) -> None:
        """Scale the learning rates as `lr_rule` requires for the current size."""
        if self._rates is not None and self._rule is not None:
            self._rates.follow(self._rule, self._rates_follow())

    def _rates_follow(self) -> int:
        """Return the size that `lr_rule` uses: the global batch size with shards, otherwise the cluster size."""
        dataset = self._training.dataset
        if dataset is not None and self.deals_shards:
            return dataset.global_batch_size
        return runtime.current_cluster_size()

    def consistency(self) -> ConsistencyCheck:
        """Return an object that checks whether the workers' states are equal.

        The object checks only the state that must be equal on all workers.
        """
        now = self._training.training_state
        different = [*now.averaged, *now.statistics]
        # With shards, every Parameter must be equal on all workers, because any worker may compute any shard.
        if self.deals_shards:
            different = list(self._options.averaged or ())
        trained = (*self.trained, *self._schedulers)
        return ConsistencyCheck(
            pieces_of(trained, self._loss_scale_manager, set(map(id, different)), self.deals_shards)
        )
