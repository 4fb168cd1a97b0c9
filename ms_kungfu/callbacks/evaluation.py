"""Let all workers evaluate together, so that each worker gets the same metrics.

Each worker evaluates a part of the batches, and the workers exchange the network's outputs. Then each worker updates
its metrics with the outputs of all batches, in the same order. So each built-in or custom metric works unchanged, and
its result is bit for bit the same as with one worker. One exception: the mean loss of a partitioned batch (kind
`dealt`) is computed from the losses of the parts, so its rounding differs. Before the evaluation, the network's moving
statistics are averaged over the workers.

An evaluation has one of four kinds, depending on the data:

- `dealt`: an `ElasticDataset` partitions each batch among the workers.
- `shared`: all workers have the same batches, in the same order, and each of n workers evaluates every n-th batch. The
  workers check that each batch is the same on all workers.
- `joined`: the program has sharded the dataset (`num_shards`). Each worker evaluates its own batches, and the metrics
  include the batches of all workers.
- `told`: the workers' batches differ for another reason (e.g. each worker shuffles independently), or their models
  differ by design. The lowest living rank evaluates its batches alone, and sends the result to the other ranks.

A worker waits for at most one batch of another worker at a time, so that a long evaluation doesn't exceed the
collective timeout. If a worker fails, the effect depends on the kind:

- `shared` and `dealt`: another worker evaluates the failed worker's part.
- `joined`: the metrics lack the failed worker's batches, and are the same on all survivors.
- `told`: if the lowest rank has failed, the next rank starts the evaluation again.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
from mindspore.train import Model
from mindspore.train.callback import RunContext
from mindspore.train.metrics import get_metric_fn

from ms_kungfu import membership, runtime
from ms_kungfu.agreement import gather_json
from ms_kungfu.callbacks.codec import pack, unpack
from ms_kungfu.callbacks.outputs import as_one
from ms_kungfu.dataset.elastic import ElasticDataset
from ms_kungfu.elastic import state_transfer
from ms_kungfu.elastic.program import is_behind
from ms_kungfu.elastic.training import ElasticTraining
from ms_kungfu.errors import KungFuError
from ms_kungfu.trained import inventory

_log = logging.getLogger(__name__)
_SHARED, _DEALT, _JOINED, _TOLD = "shared", "dealt", "joined", "told"


def together(
    training: ElasticTraining | None,
    model: Any,
    dataset: Any,
    callbacks: Any = None,
    params: Any = None,
    add_eval_loss: bool = False,
) -> Any:
    """Evaluate in ``Model.fit`` or ``Model.eval``, if the call has an elastic callback.

    `training`: the callback's `ElasticTraining`, or None outside of ``Model.fit``. The other arguments are those of
    ``Model._eval_process``.
    """
    runtime.init()
    # A cluster of one worker uses this code, too, because MindSpore's own `eval_loss` is the last batch's loss instead
    # of the mean.
    is_alone = runtime.detached() or membership.is_joining() or is_behind()
    if is_alone or (training is not None and training.asynchronous):
        # A worker that is behind the other workers also evaluates alone. The others wait for it at their next step or
        # sync point.
        return alone(model, dataset, callbacks, params, add_eval_loss)
    averaged = inventory.moving_statistics([model._network]) if training is None else training.averaged
    with _off_record(dataset), membership.doing("evaluation"):
        began = membership.monotonic()
        metrics = Evaluation(model, dataset, callbacks, params, add_eval_loss).run(averaged)
        if membership.speaks_for_all():
            membership.report("evaluated", seconds=membership.monotonic() - began)
        return metrics


def alone(model: Any, dataset: Any, *arguments: Any, **options: Any) -> Any:
    """Evaluate on this worker alone, e.g. for a callback in the program."""
    with runtime.keep_waiting(), _off_record(dataset):
        return Model._eval_process(model, dataset, *arguments, **options)


def _off_record(dataset: Any) -> AbstractContextManager[None]:
    return dataset.off_record() if isinstance(dataset, ElasticDataset) else nullcontext()


class Evaluation:
    """One evaluation by all workers together, which replaces ``Model._eval_process``."""

    def __init__(self, model: Any, dataset: Any, callbacks: Any, params: Any, loss_too: bool) -> None:
        self._model, self._dataset, self._callbacks, self._params = model, dataset, callbacks, params
        self._context = RunContext(params)
        self._loss = get_metric_fn("loss") if loss_too else None
        self._differ = state_transfer.models_differ([model._network])

    def run(self, averaged: Any) -> Any:
        """Evaluate, and return the metrics.

        If the workers' models are equal, first average the tensors in `averaged` over the workers.
        """
        if not self._differ:
            state_transfer.average(averaged)
        model, params, callbacks, context = self._model, self._params, self._callbacks, self._context
        params.dataset_sink_mode = False
        callbacks.on_eval_begin(context)
        callbacks.on_eval_epoch_begin(context)
        chosen: tuple[str, int] | None = self._choose()
        while chosen is not None:
            self._begin_anew()
            chosen = self._share() if chosen[0] == _SHARED else self._evaluate_own(*chosen)
        callbacks.on_eval_epoch_end(context)
        self._dataset.reset()
        metrics = params.metrics = model._get_metrics()
        if self._loss is not None:
            params.eval_results = {**metrics, "eval_loss": self._loss.eval()}
        callbacks.on_eval_end(context)
        return metrics

    def _choose(self) -> tuple[str, int]:
        """Choose the kind of evaluation, and for the kind `told` the rank that evaluates. All workers call this."""
        dealt = isinstance(self._dataset, ElasticDataset)
        if dealt and self._dataset.shards is not None:
            raise KungFuError(
                "the evaluation's ElasticDataset has shards; use one without shards, or an ordinary dataset"
            )
        position = self._dataset.state() if dealt else None
        rows = gather({"dealt": position, "sharded": self._dataset.is_sharded(), "differ": self._differ})
        root = min(rows)
        if any(row["differ"] for row in rows.values()):
            return _TOLD, root
        if all(row["dealt"] is not None for row in rows.values()):
            self._dataset.restore(rows[root]["dealt"])  # a worker that joined later has evaluated less often
            return _DEALT, root
        return (_JOINED if any(row["sharded"] for row in rows.values()) else _SHARED), root

    def _begin_anew(self) -> None:
        self._model._clear_metrics()
        if self._loss is not None:
            self._loss.clear()
        self._params.cur_step_num = 0

    def _iterator(self) -> Iterator[Any]:
        helper, _ = self._model._exec_preprocess(is_train=False, dataset=self._dataset, dataset_sink_mode=False)
        return (element for element in helper)  # next() after the end works with a generator, not with `helper`

    def _share(self) -> tuple[str, int] | None:
        """Evaluate the batches in rounds. In a round, each worker evaluates one batch.

        Return None at the end, or the kind and rank with which the evaluation must start again.
        """
        batches = self._iterator()
        workers = list(range(runtime.current_cluster_size()))
        while True:
            elements = [e for e in (next(batches, None) for _ in workers) if e is not None]
            digests = [_digest(element) for element in elements]
            outputs: dict[int, Any] = {}
            while True:
                missing = [i for i in range(len(elements)) if i not in outputs]
                mine = dict(zip(workers, missing)).get(runtime.current_rank())
                brought = None if mine is None else [mine, pack(self._outputs(elements[mine]))]
                told = gather({"digests": digests, "outputs": brought, "stop": self._context.get_stop_requested()})
                workers = sorted(told)
                if any(row["digests"] != told[workers[0]]["digests"] for row in told.values()):
                    if runtime.current_rank() == workers[0]:
                        _log.info('evaluation: rank=%d reason="the workers\' batches differ"', workers[0])
                    return _TOLD, workers[0]
                outputs.update({row["outputs"][0]: row["outputs"][1] for row in told.values() if row["outputs"]})
                if len(outputs) == len(elements):
                    break
            for i, element in enumerate(elements):
                self._update(element, unpack(outputs[i]))
            if not elements or any(row["stop"] for row in told.values()):
                return None

    def _evaluate_own(self, kind: str, root: int) -> tuple[str, int] | None:
        """Evaluate each worker's own batches, or only those of `root` if the kind is `told`.

        Return None at the end, or the kind and rank with which the evaluation must start again.
        """
        rank = runtime.current_rank()
        batches = self._iterator() if kind != _TOLD or rank == root else iter(())
        present = set(range(runtime.current_cluster_size()))
        while True:
            element = next(batches, None)
            # If a batch has fewer samples than the cluster has workers, some workers receive a sample that doesn't
            # count.
            counts = element is not None and not (kind == _DEALT and self._dataset.weight == 0)
            told = gather(
                {
                    "more": element is not None,
                    "samples": self._dataset.weight if kind == _DEALT else None,
                    "outputs": pack(self._outputs(element)) if counts else None,
                    "stop": self._context.get_stop_requested(),
                }
            )
            if kind == _TOLD and root not in told:
                return _TOLD, min(told)
            if kind == _DEALT and element is not None:
                self._dataset.commit(sorted(told))
            if kind == _JOINED and present - set(told):
                _log.warning(
                    "rank failed: rank=%d during=evaluation. The result lacks its share", min(present - set(told))
                )
            present = set(told)
            brought = {other: row for other, row in sorted(told.items()) if row["outputs"] is not None}
            outputs = {other: unpack(row["outputs"]) for other, row in brought.items()}
            if kind == _DEALT and len(outputs) > 1:
                whole = as_one([(row["samples"], outputs[other]) for other, row in brought.items()])
                if whole is not None:
                    outputs = {-1: whole}
            for other, output in outputs.items():
                self._update(element if other == rank else None, output)
            if any(row["stop"] for row in told.values()) or not any(row["more"] for row in told.values()):
                return None

    def _outputs(self, element: Any) -> Any:
        self._model._check_network_mode(self._model._eval_network, False)
        return self._model._eval_network(*_inputs(element))

    def _update(self, element: Any, outputs: Any) -> None:
        """Update the metrics after a batch, as MindSpore does. `element` is None if another worker has the batch."""
        params, callbacks = self._params, self._callbacks
        params.cur_step_num += 1
        params.eval_dataset_element = None if element is None else _inputs(element)
        callbacks.on_eval_step_begin(self._context)
        params.net_outputs = outputs
        callbacks.on_eval_step_end(self._context)
        self._model._update_metrics(outputs)
        if self._loss is not None:
            self._loss.update(outputs[self._model._eval_indexes[0]])


def gather(row: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return a dict that maps each living rank to its `row`, the same on all workers. All workers call this."""
    return gather_json(row, "kungfu/callbacks")


def _inputs(element: Any) -> tuple[Any, ...]:
    return tuple(element) if isinstance(element, (tuple, list)) else (element,)


def _digest(element: Any) -> str:
    """Return a hash of a batch's contents."""
    total = hashlib.blake2b(digest_size=16)
    for tensor in _inputs(element):
        values = np.ascontiguousarray(tensor.asnumpy())
        total.update(f"{values.dtype.str} {values.shape}".encode())
        total.update(values.data if values.dtype.kind not in "SU" else values.tobytes())
    return total.hexdigest()
