"""Change the cluster's size during ``Model.train``."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from traceback import walk_stack
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore.train import Callback, Model, RunContext

from ms_kungfu import membership, runtime
from ms_kungfu._checks import at_least
from ms_kungfu.agreement import broadcast_json
from ms_kungfu.callbacks import evaluation
from ms_kungfu.callbacks.compile_ahead import CompileAhead
from ms_kungfu.callbacks.epoch_outputs import EpochOutputs
from ms_kungfu.callbacks.monitor import batch_rows, connect_summary
from ms_kungfu.callbacks.others import Others, replace_attribute
from ms_kungfu.callbacks.sharded import ShardedTraining, choose_shards
from ms_kungfu.dataset.elastic import ElasticDataset
from ms_kungfu.elastic import state_transfer
from ms_kungfu.elastic.eviction import Evict
from ms_kungfu.elastic.lr_rule import LRRule
from ms_kungfu.elastic.options import Options
from ms_kungfu.elastic.policy import Policy
from ms_kungfu.elastic.program import is_behind
from ms_kungfu.elastic.schedule import Schedule
from ms_kungfu.elastic.state import Component
from ms_kungfu.elastic.training import ElasticTraining
from ms_kungfu.monitoring.monitor import Monitor
from ms_kungfu.trained import inventory

_log = logging.getLogger(__name__)


class KungFuElasticCallback(Callback):
    """Resize the cluster during ``Model.train``, by a schedule or on request.

    The docstring of `ms_kungfu.callbacks` describes joining and leaving workers, other callbacks
    and evaluation. Use an `ElasticDataset` as the training dataset. Sink mode is rejected.

    Args:
        schedule, wait, components, lr_rule, averaged: see `ElasticTraining`.
        checkpoint_dir, checkpoint_every, keep_checkpoints, resume: see `ElasticTraining`.
        global_batch_size: the number of samples in a step, over all workers, at any cluster size.
            This number replaces the global batch size of the training dataset, which must be an
            `ElasticDataset`.
        policy: one `Policy` or several (docs/policies.md).
        monitor: a `Monitor` that measures the steps (docs/monitoring.md).
        evict: a function that evicts workers for a policy. By default the launcher evicts these
            workers.
        asynchronous: see `ElasticTraining`. With None, the optimizer determines whether training is
            asynchronous.

    Raises:
        ValueError: an argument is out of range, or two arguments can't be combined. The error is
            raised before any communication.
        TypeError: an argument has the wrong type.
    """

    _writes: Callable[[], bool] | None = None  # see `Others`

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
        # Invalid options raise an error here rather than when training begins.
        self._options = Options(
            schedule, wait, tuple(components), lr_rule, averaged, checkpoint_dir, checkpoint_every, keep_checkpoints,
            resume, policy, monitor, evict, asynchronous,
        )  # fmt: skip
        self._global_batch_size = global_batch_size
        self._batch_given_to: ElasticDataset | None = None
        if global_batch_size is not None:
            at_least(1, global_batch_size, "global_batch_size")
        # `_steps` is the number of steps in an epoch of an ordinary dataset.
        self._epochs_before = self._last_step = self._steps = 0
        self._assignment: tuple[int, ...] = ()  # for which `batch_num` was computed; always () for ordinary datasets
        self._epoch_ended = False  # whether an epoch has ended since MindSpore's loop last checked whether to stop
        self._others: Others | None = None
        self._bound: list[ExitStack] = []  # each stack restores the methods of a model that runs with this callback
        self._sharded: ShardedTraining | None = None
        self._compile_ahead = CompileAhead(self._options.as_run().schedule, wait)
        self._outputs = EpochOutputs()
        self.training: ElasticTraining | None = None
        """The `ElasticTraining` of this callback; None before training begins."""

    def __enter__(self) -> KungFuElasticCallback:
        # No hook of a callback could replace the evaluation after an epoch. So the model's methods are replaced while
        # `Model.train` runs.
        model, call = _calling()
        trains = call == "_train"
        evaluate = evaluation.alone if trains else partial(evaluation.together, self.training)
        # The method for sink mode is also replaced, because sink mode hides the batches.
        own: dict[str, Callable[..., Any]] = {"_eval_process": evaluate, "_eval_dataset_sink_process": evaluate}
        if trains:
            own.update(_exec_preprocess=self._exec_preprocess, _eval_during_train=self._eval_during_train)
        if model is not None:
            self._bound.append(ExitStack())
            for name, method in own.items():
                replace_attribute(self._bound[-1], model, name, partial(method, model))
        return self

    def _end_sharded(self) -> None:
        if self._sharded is not None:
            self._sharded.end()
            self._sharded = None

    def __exit__(self, *error: object) -> None:
        if len(self._bound) <= 1:  # the end of an evaluation inside Model.fit isn't the end of training
            self._end_sharded()
        if not self._bound:
            return
        self._bound.pop().close()
        if not self._bound and self._others is not None:
            self._others.unhook()

    def on_train_begin(self, run_context: Any) -> None:
        """Join the job, receive the state of a running job, and start training.

        Args:
            run_context: the context that MindSpore passes.

        Raises:
            ValueError: sink mode is on, or an option requires an `ElasticDataset` but the dataset
                isn't an `ElasticDataset`.
            RuntimeError: this worker joins without an `ElasticDataset` while the other workers are in a
                later call of ``Model.train``.
        """
        params = run_context.original_args()
        if params.get("dataset_sink_mode") or _sink_mode_asked_for():
            raise ValueError(
                "dataset_sink_mode=True hides the steps from KungFuElasticCallback; call model.train(..., "
                "dataset_sink_mode=False)"
            )
        elastic_data = isinstance(params.train_dataset, ElasticDataset)
        if not elastic_data:
            _refuse_ordinary(type(params.train_dataset).__name__, self._global_batch_size, self._options.resume)
        else:
            self._set_batch_size(params.train_dataset)
        before = self.training
        others = self._others = Others([c for c in params.list_callback if c is not self], self._writes)
        last_step = Component("last_step", self._capture, self._receive)
        options = replace(self._options, components=(last_step, *self._options.components))
        self.training = training = ElasticTraining(
            params.train_network,
            **vars(options),
            prepare=self._prepare(params),
            dataset=params.train_dataset if elastic_data else None,
            loss_scale_manager=params.get("loss_scale_mananger"),  # as MindSpore spells it
            total_samples=params.epoch_num * params.train_dataset.total_samples if elastic_data else None,
        )
        self._options = replace(self._options, monitor=training.monitor)  # the next call uses the same monitor
        if training.monitor is not None:
            connect_summary(training.monitor, params)
        first = runtime.current_rank() == 0
        if first and self._sharded is None and not inventory.synchronises([params.train_network]):
            _log.warning(
                'misuse: check=optimizer optimizers="%s". Model.train has no optimizer of ms_kungfu and no '
                "KungFuGradReducer: unless the program reduces the gradients itself, each worker trains a "
                "separate model",
                ", ".join(type(optimizer).__name__ for optimizer in training.optimizers),
            )
        training.carries_more = bool(self._options.components) or others.carries_the_programs
        training.before_checkpoint = partial(self._outputs.keep, training, params)
        training.step = before.step if before is not None else 0
        self._steps = params.batch_num if elastic_data or training.asynchronous else _agreed(params.batch_num)
        self._last_step = training.step + self._steps * params.epoch_num
        if self._bound:
            others.load_files(run_context)
        training.begin()
        if not training.should_stop:
            if elastic_data:
                params.train_dataset.keep_all_busy()
            others.take_over()
        if self._bound:
            others.hook(training.asynchronous)
        if not elastic_data:
            if first:
                _warn_of_ordinary(type(params.train_dataset).__name__)
            if training.should_stop:
                raise RuntimeError(
                    "this worker can't join: the other workers are in a later call of model.train, and an ordinary "
                    "dataset can't skip to that call; train with an ElasticDataset, or call model.train only once"
                )
        training.changes.statistics.epochs = int(params.epoch_num)
        if not elastic_data and not training.asynchronous:
            training.changes.statistics.last_step = self._last_step
        params.cur_step_num += training.step - training.first_step
        self._epochs_before = training.epoch
        _tell_steps_of_epoch(params, self._steps)
        if training.should_stop:
            run_context.request_stop()
        self._agree_on_stops(run_context)
        self._compile_ahead.begin()

    def _set_batch_size(self, data: ElasticDataset) -> None:
        """Set the dataset's global batch size once, because a policy or the received state may change it later."""
        if self._global_batch_size is not None and self._batch_given_to is not data:
            data.global_batch_size = self._global_batch_size
            self._batch_given_to = data

    def _prepare(self, params: Any) -> Callable[[], None]:
        """Return a function that compiles the first training step."""
        data = params.train_dataset
        if not isinstance(data, ElasticDataset) or data.shards is None:
            return partial(compile_step, params.train_network, data, self._compile_ahead)
        self._sharded = ShardedTraining.of(params.train_network)
        self._sharded.begin()
        return partial(self._sharded.step.compile, data)

    def on_train_epoch_begin(self, run_context: Any) -> None:
        """Notify the policies that an epoch begins.

        Args:
            run_context: the context that MindSpore passes.
        """
        params = run_context.original_args()
        params.cur_epoch_num += self._epochs_before
        _tell_steps_of_epoch(params, self._steps)
        if self._others is not None:
            self._others.has_stepped = False
        if self.training is not None:
            self.training.epoch_begin()

    def on_train_step_begin(self, run_context: Any) -> None:
        """Begin a step, unless the dataset is an `ElasticDataset`, which begins steps itself.

        Args:
            run_context: the context that MindSpore passes.
        """
        if self.training is not None and not _trains_elastic_data(run_context):
            self.training.step_begin()

    def on_train_step_end(self, run_context: Any) -> None:
        """Count the step, and change the cluster if a change is due after this step.

        Args:
            run_context: the context that MindSpore passes.

        Raises:
            KungFuError, ValueError: see `ElasticTraining.step_end`.
        """
        training = self.training
        assert training is not None
        params, is_elastic = run_context.original_args(), _trains_elastic_data(run_context)
        self._compile_ahead.after_step(params, training.step)
        samples = None if is_elastic else batch_rows(params)
        step, epoch = training.step + 1, training.epoch
        if self._others is not None:
            self._others.step_ends(training.request_stop)
        change = training.step_end(params.net_outputs, samples)
        if change.changed and not change.detached and training.dataset is not None:
            training.dataset.keep_all_busy()
        joined = change.changed and change.new_size > change.old_size - len(change.lost)
        if joined and not change.detached and self._others is not None:
            self._others.warn_of_what_is_not_carried()
        if change.undone and self._others is not None:
            self._others.undone(params.cur_step_num)
        # In asynchronous training, a cluster change may have moved this worker to the position of the furthest worker.
        params.cur_step_num += training.step - step
        params.cur_epoch_num += training.epoch - epoch
        self._epochs_before += training.epoch - epoch
        assignment = params.train_dataset._assignment() if is_elastic else ()
        if assignment != self._assignment or training.should_stop:
            self._assignment = assignment
            _tell_steps_of_epoch(params, self._steps)
        # With an ordinary dataset, a joining worker doesn't know at which step the other workers' epoch ends. So this
        # worker stops after step `_last_step`.
        if training.should_stop or (not is_elastic and training.step >= self._last_step):
            RunContext.request_stop(run_context)

    def on_train_epoch_end(self, run_context: Any) -> None:
        """Count the epoch, and stop after the last epoch.

        Args:
            run_context: the context that MindSpore passes.
        """
        training = self.training
        assert training is not None
        training.epoch_end()
        # With an ordinary dataset, epochs end at the same step on all workers only if this callback has replaced the
        # model's methods.
        self._epoch_ended = _trains_elastic_data(run_context) or bool(self._bound)
        # On a worker that has joined, Model.train counts epochs from the time of the join.
        if training.should_stop or training.epoch >= run_context.original_args().epoch_num:
            RunContext.request_stop(run_context)

    def on_train_end(self, run_context: Any) -> None:
        """End this call of ``Model.train``, and average the moving statistics over the workers.

        `run_context`: the context that MindSpore passes.
        """
        self._end_sharded()
        if self.training is not None:
            self.training.end()
            # If each worker trains its own model, the statistics belong to that model, so they aren't averaged.
            network = run_context.original_args().train_network
            if not self.training.asynchronous and not state_transfer.models_differ([network]):
                self.training.average_statistics()

    def _exec_preprocess(self, model: Any, is_train: bool, dataset: Any, *arguments: Any, **options: Any) -> Any:
        """Return the iterator over the training data, and the network.

        With an ordinary dataset, the iterator yields the same number of steps per epoch on all workers.
        """
        if is_train and isinstance(dataset, ElasticDataset):
            self._set_batch_size(dataset)
            choose_shards(model._train_network, dataset, self._options.as_run())  # before the iterator is created
        helper, network = Model._exec_preprocess(model, is_train, dataset, *arguments, **options)
        if is_train and not isinstance(dataset, ElasticDataset):
            return _AgreedSteps(helper, dataset, self._steps_left), network
        return helper, network

    def _eval_during_train(self, model: Any, valid_infos: Any, params: Any, callbacks: Any) -> None:
        """Evaluate after an epoch, if this worker takes part in training."""
        training = self.training
        takes_part = training is not None and not runtime.detached() and not is_behind()
        self._outputs.end_epoch(training if takes_part else None, params)
        if takes_part:
            Model._eval_during_train(model, valid_infos, params, callbacks)

    def _steps_left(self) -> int | None:
        """Return the number of steps left in an ordinary dataset's current epoch; None in asynchronous training."""
        training = self.training
        if training is None or training.asynchronous:
            return None
        return (training.epoch + 1) * self._steps - (training.step - training.first_step)

    def _agree_on_stops(self, run_context: Any) -> None:
        """Change `run_context` so that a stop request from one worker stops all workers after the same step."""
        training = self.training
        assert training is not None
        self._epoch_ended = False
        if training.asynchronous:
            return  # in asynchronous training, the first worker that finishes ends the call for all workers

        def get_stop_requested() -> bool:
            # MindSpore's loop calls this after all callbacks have run. At the end of an epoch, a callback that follows
            # this one may have requested a stop. So the workers agree here to stop at this epoch's end, not a step
            # later.
            ended, self._epoch_ended = self._epoch_ended, False
            if ended and not RunContext.get_stop_requested(run_context) and training.agree_on_stop():
                RunContext.request_stop(run_context)
            return bool(RunContext.get_stop_requested(run_context))

        # Replace these methods in a cluster of one worker, too; if not, a worker that joins in this step would continue
        # alone.
        run_context.request_stop, run_context.get_stop_requested = training.request_stop, get_stop_requested

    def _capture(self) -> dict[str, Any]:
        assert self._others is not None
        kept = {"last_step": self._last_step, "steps": self._steps, "callbacks": self._others.capture()}
        return kept if self._outputs.kept is None else {**kept, "outputs": self._outputs.kept}

    def _receive(self, captured: Any) -> None:
        if isinstance(captured, int):  # a checkpoint that an earlier version of ms_kungfu wrote
            self._last_step = captured
            return
        self._last_step, self._steps = captured["last_step"], captured["steps"]
        Others.received, Others.resumed = captured["callbacks"], not membership.is_joining()
        # A joining worker doesn't need these outputs, because a worker that ran the epoch's last step sends them at the
        # epoch's end.
        self._outputs.kept = captured.get("outputs") if Others.resumed else None


def _trains_elastic_data(run_context: Any) -> bool:
    return isinstance(run_context.original_args().train_dataset, ElasticDataset)


def _refuse_ordinary(kind: str, global_batch_size: int | None, resume: bool) -> None:
    """Raise ValueError if an option requires an `ElasticDataset` rather than an ordinary dataset of type `kind`."""
    for option, is_given in {"global_batch_size": global_batch_size is not None, "resume": resume}.items():
        if is_given:
            raise ValueError(f"{option} requires an ElasticDataset, but train_dataset is a {kind}")


def _warn_of_ordinary(kind: str) -> None:
    _log.warning(
        "misuse: check=dataset type=%s. A resize doesn't partition this dataset again, and each worker trains all of "
        "the dataset's samples unless the program shards it; pass ElasticDataset(train_dataset) to Model.train",
        kind,
    )


def _tell_steps_of_epoch(params: Any, steps: int) -> None:
    """Set `batch_num`. For an ordinary dataset its value is `steps`."""
    data = params.train_dataset
    is_elastic = isinstance(data, ElasticDataset)
    params.batch_num = _StepsOfEpoch(data.get_dataset_size(), params.cur_step_num - data.steps) if is_elastic else steps


class _StepsOfEpoch(int):
    """A `batch_num` for epochs with different numbers of steps.

    MindSpore computes the number of a step within its epoch as ``(cur_step_num - 1) % batch_num + 1``. If
    `batch_num` were a plain integer, the result would be wrong after epochs with other numbers of steps.
    A `ModelCheckpoint` could then overwrite files that it has written earlier in the same epoch.
    """

    _before: int

    def __new__(cls, steps: int, before: int = 0) -> _StepsOfEpoch:
        self = super().__new__(cls, steps)
        self._before = before
        return self

    def __rmod__(self, steps: int, /) -> int:
        return (steps - self._before) % int(self)


class _AgreedSteps:
    """Yield `steps_left()` batches of an ordinary dataset per epoch; repeat or skip batches if necessary."""

    def __init__(self, helper: Any, dataset: Any, steps_left: Callable[[], int | None]) -> None:
        self._batches, self._dataset, self._steps_left = helper, dataset, steps_left
        self._endless = False

    def __iter__(self) -> Iterator[Any]:
        left = self._steps_left()
        if left is None:
            yield from self._batches
            return
        while left > 0:
            empty = True
            for element in self._batches:
                empty = False
                if left > 0:  # the other batches are only read, because the pipeline must reach the end of its epoch
                    left -= 1
                    yield element
            if empty and self._endless:
                raise ValueError(
                    "this worker's share of train_dataset has no batch; train with smaller batches or fewer workers"
                )
            if left > 0:
                # MindSpore's iterator ends after the requested number of epochs. Repeating the share needs more epochs.
                self._batches, self._endless = self._dataset.create_tuple_iterator(num_epochs=-1), True


def compile_step(network: Any, dataset: Any, ahead: CompileAhead | None = None) -> None:
    """Compile `network` for the first batch of `dataset`, without running it.

    If `ahead` is given, also compile for the shapes that `ahead` selects. In PyNative mode the function does nothing,
    because there is no graph of the whole step.
    """
    if ms.get_context("mode") != ms.GRAPH_MODE:
        return
    shapes = zip(dataset.output_shapes(), dataset.output_types())
    columns = [ms.Tensor(np.zeros(shape, dtype)) for shape, dtype in shapes]
    began = membership.monotonic()
    network.compile(*columns)
    if ahead is not None:
        ahead.compile(network, dataset, columns, membership.monotonic() - began)


def _agreed(steps: int) -> int:
    """Return the lowest rank's `steps`. All workers that begin training together must call this."""
    runtime.init()
    if membership.is_joining() or runtime.current_cluster_size() == 1:
        return steps  # a joining worker receives the number with the training state
    return int(state_transfer.from_lowest_rank(partial(broadcast_json, lambda: steps)))


def _calling() -> tuple[Any, str]:
    """Return the Model whose method enters this callback (`__enter__`), and the name of that method."""
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_globals.get("__name__") == Model.__module__ and isinstance(frame.f_locals.get("self"), Model):
            return frame.f_locals["self"], frame.f_code.co_name
    return None, ""


def _sink_mode_asked_for() -> bool:
    """Return whether ``Model.train`` was called with sink mode on.

    On CPU, MindSpore ignores sink mode and reports to callbacks that it is off. A program with sink mode
    should fail on CPU, too, and not only on a device.
    """
    for frame, _ in walk_stack(sys._getframe()):
        if frame.f_code.co_name == "_train" and frame.f_globals.get("__name__", "").startswith("mindspore."):
            return bool(frame.f_locals.get("dataset_sink_mode"))
    return False
