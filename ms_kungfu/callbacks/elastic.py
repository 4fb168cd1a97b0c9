"""The cluster grows and shrinks under ``Model.train``."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from mindspore.train import Callback

from ms_kungfu.callbacks.monitor import batch_rows, connect_summary
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic.policy import Policy, as_policy
from ms_kungfu.elastic.schedule import Schedule, parse_schedule
from ms_kungfu.elastic.state import Component
from ms_kungfu.elastic.steering import Evict, check_evict
from ms_kungfu.elastic.training import ElasticTraining
from ms_kungfu.monitoring.monitor import Monitor

_log = logging.getLogger(__name__)


class KungFuElasticCallback(Callback):
    """Resizes the cluster by a schedule, or as the config server says, while ``Model.train`` goes on.

    Args:
        schedule: ``{step: size}``, the text ``"10:2,20:4,40:1"`` (2 workers once 10 steps are done, ...), or a function
            of the step that returns a size or None. None follows the config server only (``kungfu-run resize``).
        components: state of the program's own that joiners need, see `ms_kungfu.elastic.state`.
        policy: one `Policy` or several that decide on size, batch, learning rate and more: docs/policies.md.
        monitor: a `Monitor` that measures the steps: docs/monitoring.md.
        evict: what sends workers away where a policy wants it; by default a change at the config server.

    A worker that joins receives everything that decides the next step before its own first one, and goes on with the
    others' `cur_step_num` and, in callbacks that come after this one, `cur_epoch_num`; it stops after the same step as
    they do. A worker that leaves has `request_stop` called: its ``Model.train`` returns after that step as it always
    does, and ``ms_kungfu.detached()`` is true from then on, so that a program can leave out what it does at the end.
    `batch_num` is set anew at each change: the steps of the present epoch, as far as they are known.

    Give it an `ElasticDataset`: an ordinary dataset is not dealt out anew, and each worker keeps the share that it
    began with. Sink mode hides the steps from callbacks and is refused.
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        *,
        components: Sequence[Component] = (),
        policy: Policy | Sequence[Policy] | None = None,
        monitor: Monitor | None = None,
        evict: Evict | None = None,
    ) -> None:
        super().__init__()
        self._policy, self._monitor, self._evict = as_policy(policy), monitor, check_evict(evict)
        parse_schedule(schedule)  # what is wrong with it is said here rather than when training begins
        self._schedule = schedule
        self._components = tuple(components)
        self._epochs_before = 0
        self._last_step = 0
        self.training: ElasticTraining | None = None
        """What this callback drives, once training began."""

    def on_train_begin(self, run_context: Any) -> None:
        params = run_context.original_args()
        if params.get("dataset_sink_mode") or _sink_mode_asked_for():
            raise ValueError(
                "KungFuElasticCallback works between steps, which dataset_sink_mode=True hides; "
                "call model.train(..., dataset_sink_mode=False)"
            )
        elastic_data = isinstance(params.train_dataset, ElasticDataset)
        before = self.training
        self.training = training = ElasticTraining(
            params.train_network,
            schedule=self._schedule,
            dataset=params.train_dataset if elastic_data else None,
            loss_scale_manager=params.get("loss_scale_mananger"),  # as MindSpore spells it
            components=(Component("last_step", lambda: self._last_step, self._set_last_step), *self._components),
            policy=self._policy,
            monitor=self._monitor,
            evict=self._evict,
            total_samples=params.epoch_num * params.train_dataset.total_samples if elastic_data else None,
        )
        self._monitor = training.monitor
        if self._monitor is not None:
            connect_summary(self._monitor, params)
        training.step = before.step if before is not None else 0
        self._last_step = training.step + params.batch_num * params.epoch_num
        training.begin()
        if not elastic_data:
            _log.warning(
                "train_dataset is a %s, not an ElasticDataset: after a resize its samples are not dealt out anew",
                type(params.train_dataset).__name__,
            )
            if training.should_stop:
                raise RuntimeError(
                    "this worker joined while the others are in a later call of model.train, which only an "
                    "ElasticDataset can wait for; train with an ElasticDataset, or in one call"
                )
        params.cur_step_num += training.step - training.first_step
        self._epochs_before = training.epoch
        self._steps_of_epoch(params)
        if training.should_stop:
            run_context.request_stop()

    def on_train_epoch_begin(self, run_context: Any) -> None:
        run_context.original_args().cur_epoch_num += self._epochs_before
        if self.training is not None:
            self.training.epoch_begin()

    def on_train_step_end(self, run_context: Any) -> None:
        training = self.training
        assert training is not None
        params = run_context.original_args()
        samples = None if self._elastic_data(run_context) else batch_rows(params)
        change = training.step_end(params.net_outputs if training.monitor is not None else None, samples)
        if change.changed:
            self._steps_of_epoch(run_context.original_args())
        # An ordinary dataset at a joiner doesn't know where the others' ends.
        if training.should_stop or (not self._elastic_data(run_context) and training.step >= self._last_step):
            run_context.request_stop()

    def on_train_epoch_end(self, run_context: Any) -> None:
        training = self.training
        assert training is not None
        training.epoch_end()
        # Model.train at a joiner counts its own epochs.
        if training.should_stop or training.epoch >= run_context.original_args().epoch_num:
            run_context.request_stop()

    def on_train_end(self, run_context: Any) -> None:
        if self.training is not None:
            self.training.end()

    def _set_last_step(self, step: int) -> None:
        self._last_step = step

    @staticmethod
    def _elastic_data(run_context: Any) -> bool:
        return isinstance(run_context.original_args().train_dataset, ElasticDataset)

    @staticmethod
    def _steps_of_epoch(params: Any) -> None:
        params.batch_num = params.train_dataset.get_dataset_size()


def _sink_mode_asked_for() -> bool:
    """Whether ``Model.train`` was called with sink mode on.

    MindSpore on CPU drops the wish and tells callbacks that sink mode is off; a program should hear of it here and not
    when it moves to a device.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "_train" and frame.f_globals.get("__name__", "").startswith("mindspore."):
            return bool(frame.f_locals.get("dataset_sink_mode"))
        frame = frame.f_back  # type: ignore[assignment]
    return False
