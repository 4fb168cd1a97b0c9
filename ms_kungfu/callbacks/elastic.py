"""The cluster grows and shrinks under ``Model.train``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import mindspore as ms
import numpy as np
from mindspore.train import Callback, RunContext

from ms_kungfu import runtime
from ms_kungfu.callbacks.monitor import batch_rows, connect_summary
from ms_kungfu.dataset.elastic import ElasticDataset, _positive
from ms_kungfu.elastic.checkpoint import open_folder
from ms_kungfu.elastic.lr_rule import LRRule, parse_lr_rule
from ms_kungfu.elastic.policy import Policy, as_policy
from ms_kungfu.elastic.schedule import Schedule, parse_schedule
from ms_kungfu.elastic.state import Component, check_averaged
from ms_kungfu.elastic.steering import Evict, check_evict
from ms_kungfu.elastic.training import ElasticTraining
from ms_kungfu.monitoring.monitor import Monitor
from ms_kungfu.ops._base import Collective
from ms_kungfu.optimizers import KungFuGradReducer
from ms_kungfu.optimizers._around import Around

_log = logging.getLogger(__name__)


class KungFuElasticCallback(Callback):
    """Resizes the cluster by a schedule, or as the config server says, while ``Model.train`` goes on.

    Args:
        schedule: ``{step: size}``, the text ``"10:2,20:4,40:1"`` (2 workers once 10 steps are done, ...), or a function
            of the step that returns a size or None. None follows the config server only (``kungfu-run resize``). A
            size is asked for at its step, and the cluster changes once the new workers are ready; a later entry takes
            the place of one that has not come true by then.
        wait: stop at a step of the schedule until its size is there, as KungFu does, instead of training meanwhile.
        components: state of the program's own that joiners need, see `ms_kungfu.elastic.state`.
        lr_rule, averaged, checkpoint_dir, checkpoint_every, keep_checkpoints, resume: see `ElasticTraining`.
        global_batch_size: samples that all workers together train in a step, held constant: sets that of the
            `ElasticDataset` that is trained, whatever it was made with.
        policy: one `Policy` or several that decide on size, batch, learning rate and more: docs/policies.md.
        monitor: a `Monitor` that measures the steps: docs/monitoring.md.
        evict: what sends workers away where a policy wants it; by default the launcher does.
        asynchronous: whether the workers make their steps without meeting, see `ElasticTraining`; None: where the
            optimizer does.

    A worker that joins receives everything that decides the next step before its own first one, and goes on with the
    others' `cur_step_num` and, in callbacks that come after this one, `cur_epoch_num`; it stops after the same step as
    they do. A worker that leaves has `request_stop` called: its ``Model.train`` returns after that step as it always
    does, and ``ms_kungfu.detached()`` is true from then on, so that a program can leave out what it does at the end.
    `batch_num` is set anew at each change: the steps of the present epoch, as far as they are known.
    In GRAPH mode a worker that joins compiles the training step for its first batch before the others wait for it.

    Give it an `ElasticDataset`: an ordinary dataset is not dealt out anew, and each worker keeps the share that it
    began with. Sink mode hides the steps from callbacks and is refused.
    """

    def __init__(
        self,
        schedule: Schedule | None = None,
        *,
        wait: bool = False,
        components: Sequence[Component] = (),
        lr_rule: LRRule = "none",
        global_batch_size: int | None = None,
        averaged: Sequence[Any] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int = 3,
        resume: bool = False,
        policy: Policy | Sequence[Policy] | None = None,
        monitor: Monitor | None = None,
        evict: Evict | None = None,
        asynchronous: bool | None = None,
    ) -> None:
        super().__init__()
        self._policy, self._monitor, self._evict = as_policy(policy), monitor, check_evict(evict)
        # What is wrong with them is said here rather than when training begins.
        parse_schedule(schedule)
        parse_lr_rule(lr_rule)
        open_folder(checkpoint_dir, checkpoint_every, keep_checkpoints, resume)
        if monitor is not None and not isinstance(monitor, Monitor):
            raise TypeError(f"monitor is a ms_kungfu.monitoring.Monitor, got {monitor!r}")
        self._options: dict[str, Any] = {
            "schedule": schedule,
            "wait": wait,
            "lr_rule": lr_rule,
            "averaged": check_averaged(averaged),
            "checkpoint_dir": checkpoint_dir,
            "checkpoint_every": checkpoint_every,
            "keep_checkpoints": keep_checkpoints,
            "resume": resume,
            "asynchronous": asynchronous,
        }
        self._global_batch_size = global_batch_size
        if global_batch_size is not None:
            _positive(global_batch_size, "global_batch_size")
        self._components = tuple(components)
        self._epochs_before = 0
        self._last_step = 0
        self._epoch_ended = False  # and nobody has asked yet whether to stop there
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
        if not elastic_data:
            self._refuse_ordinary(type(params.train_dataset).__name__)
        elif self._global_batch_size is not None:
            params.train_dataset.global_batch_size = self._global_batch_size
        before = self.training
        self.training = training = ElasticTraining(
            params.train_network,
            **self._options,
            prepare=partial(compile_step, params.train_network, params.train_dataset),
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
        if not _averages(params.train_network):
            _log.warning(
                "Model.train has no optimizer of ms_kungfu and no KungFuGradReducer here (%s): unless the program "
                "reduces the gradients itself, each worker trains a model of its own",
                ", ".join(type(optimizer).__name__ for optimizer in training.optimizers) or "no optimizer",
            )
        training.step = before.step if before is not None else 0
        self._last_step = training.step + params.batch_num * params.epoch_num
        training.begin()
        if not elastic_data:
            _log.warning(
                "train_dataset is a %s, not an ElasticDataset: unless the program shards it, each worker trains all of "
                "its samples, and after a resize they are not dealt out anew; give ElasticDataset(samples, "
                "global_batch_size=...) the pipeline before .batch()",
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
        self._agree_on_stops(run_context)

    def on_train_epoch_begin(self, run_context: Any) -> None:
        run_context.original_args().cur_epoch_num += self._epochs_before
        if self.training is not None:
            self.training.epoch_begin()

    def on_train_step_end(self, run_context: Any) -> None:
        training = self.training
        assert training is not None
        params = run_context.original_args()
        samples = None if self._elastic_data(run_context) else batch_rows(params)
        step, epoch = training.step + 1, training.epoch
        change = training.step_end(params.net_outputs if training.monitor is not None else None, samples)
        # An asynchronous worker may have been moved to where the furthest is.
        params.cur_step_num += training.step - step
        params.cur_epoch_num += training.epoch - epoch
        self._epochs_before += training.epoch - epoch
        if change.changed or training.step > step:
            self._steps_of_epoch(params)
        # An ordinary dataset at a joiner doesn't know where the others' ends.
        if training.should_stop or (not self._elastic_data(run_context) and training.step >= self._last_step):
            RunContext.request_stop(run_context)

    def on_train_epoch_end(self, run_context: Any) -> None:
        training = self.training
        assert training is not None
        training.epoch_end()
        self._epoch_ended = self._elastic_data(run_context)
        # Model.train at a joiner counts its own epochs.
        if training.should_stop or training.epoch >= run_context.original_args().epoch_num:
            RunContext.request_stop(run_context)

    def on_train_end(self, run_context: Any) -> None:
        if self.training is not None:
            self.training.end()

    def _agree_on_stops(self, run_context: Any) -> None:
        """From now on who asks for a stop at one worker has all stop after the same step."""
        training = self.training
        assert training is not None
        self._epoch_ended = False
        if training.asynchronous:
            return  # who comes to its end ends the call for all

        def request_stop() -> None:
            if runtime.current_cluster_size() == 1:
                RunContext.request_stop(run_context)
            else:
                training.request_stop()

        def get_stop_requested() -> bool:
            # The loop asks when all callbacks have been called. Those after this one may have asked for a stop at the
            # end of an epoch, which ends training there and not a step later.
            ended, self._epoch_ended = self._epoch_ended, False
            if ended and not RunContext.get_stop_requested(run_context) and training.agree_on_stop():
                RunContext.request_stop(run_context)
            return bool(RunContext.get_stop_requested(run_context))

        run_context.request_stop, run_context.get_stop_requested = request_stop, get_stop_requested

    def _refuse_ordinary(self, kind: str) -> None:
        given = {"global_batch_size": self._global_batch_size is not None, "resume": self._options["resume"]}
        for option, is_given in given.items():
            if is_given:
                raise ValueError(f"{option} works with an ElasticDataset, and train_dataset is a {kind}")

    def _set_last_step(self, step: int) -> None:
        self._last_step = step

    @staticmethod
    def _elastic_data(run_context: Any) -> bool:
        return isinstance(run_context.original_args().train_dataset, ElasticDataset)

    @staticmethod
    def _steps_of_epoch(params: Any) -> None:
        params.batch_num = params.train_dataset.get_dataset_size()


def compile_step(network: Any, dataset: Any) -> None:
    """Compile `network` for the first batch of `dataset` without running it. Does nothing in PyNative mode, which has
    no graph of the whole step."""
    if ms.get_context("mode") != ms.GRAPH_MODE:
        return
    columns = zip(dataset.output_shapes(), dataset.output_types())
    network.compile(*(ms.Tensor(np.zeros(shape, dtype)) for shape, dtype in columns))


def _averages(network: Any) -> bool:
    """Whether something of ms_kungfu's in `network` keeps the workers' models together."""
    for _, cell in network.cells_and_names():
        if isinstance(cell, (Around, KungFuGradReducer)) or any(
            isinstance(value, Collective) for value in vars(cell).values()
        ):
            return True
    return False


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
