"""Compile the shapes that a change of the cluster will bring, before the change.

In GRAPH mode MindSpore compiles a step for each batch shape. Without shards a change gives each worker another share of
the global batch, so all workers would wait for the compilation. Therefore a worker compiles after its first step, or
before it joins:

- its share at each size of the schedule. Training needs these shapes anyway, so this moves time from the changes to the
  start.
- its shares after a failure, also in the last steps of an epoch, as long as all of these compilations of the process
  together take less than ``KUNGFU_COMPILE_AHEAD`` seconds. Whether a worker will fail is unknown, so a large network
  isn't worth this time.

Each worker decides alone. A worker whose shape isn't compiled compiles it at the change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import mindspore as ms
import numpy as np

from ms_kungfu import env, membership, runtime
from ms_kungfu.dataset import sharding
from ms_kungfu.dataset.elastic import ElasticDataset
from ms_kungfu.elastic import compiled
from ms_kungfu.elastic.schedule import Schedule, entries

_log = logging.getLogger(__name__)


class CompileAhead:
    """Compile the shapes of one training at one worker, once.

    Args:
        schedule: the schedule of the training.
        wait: whether the other workers wait at a step of the schedule for a worker that joins.
    """

    spent = 0.0
    """Seconds that this process has compiled for failures, for all of its networks."""

    def __init__(self, schedule: Schedule | None, wait: bool) -> None:
        self._schedule, self._wait = entries(schedule), wait
        self._is_done = False
        self._began = 0.0

    def begin(self) -> None:
        """Begin to measure the first step."""
        self._began = membership.monotonic()

    def after_step(self, params: Any, step: int) -> None:
        """Compile after the first step of a call. `params` are MindSpore's, before the next cluster change."""
        if self._is_done or not compiled.graph_mode():
            return
        seconds = membership.monotonic() - self._began
        self.compile(params.train_network, params.train_dataset, params.train_dataset_element, seconds, step)

    def compile(self, network: Any, dataset: Any, columns: Sequence[Any], seconds: float, step: int = 0) -> None:
        """Compile `network` for the shapes that may follow `step`, unless that has been done. Not collective.

        Args:
            network: the training network.
            dataset: the dataset that is trained.
            columns: the columns of a full batch at the present size.
            seconds: how long compiling one shape takes, as far as it is known.
            step: the number of trained steps.
        """
        if self._is_done or not compiled.graph_mode():
            return
        self._is_done = True
        if not isinstance(dataset, ElasticDataset) or not dataset.holds_global_batch or dataset.shards is not None:
            return
        rank, size, batch = runtime.current_rank(), runtime.current_cluster_size(), dataset.global_batch_size
        known = {columns[0].shape[0]}
        planned = [_share(batch, rank, n) for at, n in self._schedule if at >= step and rank < n]
        lengths = [batch, *_lengths_after_a_failure(dataset.same_at_all(), batch, size)]
        places = [place for place in (rank, rank - 1) if 0 <= place < size - 1]
        after_a_failure = [_share(length, place, size - 1) for length in lengths for place in places]
        delays_all = self._wait and membership.is_joining()
        limit = 0.0 if delays_all or not env.WATCH.get() else env.COMPILE_AHEAD.get()
        for rows in _new(planned, known):
            seconds = self._compile(network, columns, rows)
        for rows in _new(after_a_failure, known):
            if CompileAhead.spent + seconds <= limit:
                seconds = self._compile(network, columns, rows)
                CompileAhead.spent += seconds

    @staticmethod
    def _compile(network: Any, columns: Sequence[Any], rows: int) -> float:
        """Compile for batches of `rows` samples. Return the seconds that this took."""
        began, present = membership.monotonic(), columns[0].shape[0]
        shapes = [(rows, *c.shape[1:]) if c.shape[:1] == (present,) else c.shape for c in columns]
        try:
            network.compile(*(ms.Tensor(np.zeros(shape), c.dtype) for shape, c in zip(shapes, columns)))
        except Exception as error:  # whatever MindSpore's compiler raises; a step with this shape would raise it, too
            _log.debug('compiled ahead: batch=%d error="%s"', rows, str(error).partition("\n")[0])
        took = membership.monotonic() - began
        _log.debug("compiled ahead: batch=%d seconds=%.2f", rows, took)
        return took


def _lengths_after_a_failure(data: Mapping[str, Any], batch: int, size: int) -> list[int]:
    """Return the lengths of an epoch's last steps that are shorter than `batch`, after one of `size` workers failed.

    The failed worker's share is trained at the end of the epoch, unless its last step was complete. In the next epochs
    there is no such share.
    """
    found = []
    for more in (_share(batch, 0, size), _share(batch, size - 1, size), 0):
        left = 2 * batch + (data["samples"] + more) % batch  # the steps before these are full
        while length := sharding.step_length(left, batch, data["drop_remainder"]):
            left -= length
            found += [length] if length < batch else []
    return found


def _share(batch: int, place: int, workers: int) -> int:
    """Return the number of samples of a full step that the worker at `place` of `workers` trains."""
    return max(sharding.count([sharding.block(batch, place, workers)]), 1)  # one without a share repeats a sample


def _new(shares: Iterable[int], known: set[int]) -> list[int]:
    """Return the shares that aren't in `known`, each once, and add them to it."""
    found = [rows for rows in dict.fromkeys(shares) if rows not in known]
    known.update(found)
    return found
