"""Before the cluster changes, compile the training step for the batch shapes that are needed after the change.

In GRAPH mode, MindSpore compiles the step for each batch shape. Without shards, a worker's number of samples per step
changes with the cluster's size, and all workers would wait for the compilation. So a worker compiles the step for these
numbers of samples, after its first step or before it joins:

- Its numbers of samples at each size in the schedule. Training needs these graphs in any case, so compiling them early
  only moves the time from the cluster changes to the start.
- Its numbers of samples after another worker has failed, including those in the last steps of an epoch. The process
  compiles for failures only while these compilations take less than ``KUNGFU_COMPILE_AHEAD`` seconds in total, because
  compiling a large network takes long and perhaps no worker ever fails.

Each worker chooses its shapes independently. If it hasn't compiled for a shape before a change, it compiles for that
shape at the change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np

from ms_kungfu import env, membership, runtime
from ms_kungfu.dataset import batch_sizes
from ms_kungfu.dataset.elastic import ElasticDataset
from ms_kungfu.elastic import compiled
from ms_kungfu.elastic.schedule import Schedule, entries

_log = logging.getLogger(__name__)


class CompileAhead:
    """Compile the step for later batch shapes, once per `KungFuElasticCallback`.

    Args:
        schedule: the schedule of cluster sizes.
        wait: whether the other workers wait at a step in the schedule until a joining worker is ready.
    """

    spent = 0.0
    """How many seconds this process has spent compiling for failures, over all of its networks."""

    def __init__(self, schedule: Schedule | None, wait: bool) -> None:
        self._schedule, self._wait = entries(schedule), wait
        self._is_done = False
        self._began = 0.0

    def begin(self) -> None:
        """Begin to measure how long the first step takes."""
        self._began = membership.monotonic()

    def after_step(self, params: Any, step: int) -> None:
        """Compile after the first step of a call of ``Model.train``, before the cluster changes.

        `params` are the parameters that MindSpore passes to callbacks.
        """
        if self._is_done or not compiled.graph_mode():
            return
        seconds = membership.monotonic() - self._began
        self.compile(params.train_network, params.train_dataset, params.train_dataset_element, seconds, step)

    def compile(self, network: Any, dataset: Any, columns: Sequence[Any], seconds: float, step: int = 0) -> None:
        """Compile `network` for the shapes that may be needed after `step`. Only the first call has an effect.

        This method isn't collective.

        Args:
            network: the training network.
            dataset: the training dataset.
            columns: the columns of a full batch at the current cluster size.
            seconds: how long the compilation for one shape takes, as far as it is known.
            step: the number of completed steps.
        """
        if self._is_done or not compiled.graph_mode():
            return
        self._is_done = True
        if not isinstance(dataset, ElasticDataset) or not dataset.holds_global_batch or dataset.shards is not None:
            return
        rank, size, batch = runtime.current_rank(), runtime.current_cluster_size(), dataset.global_batch_size
        known = {columns[0].shape[0]}
        planned = [batch_sizes.share(batch, rank, n) for at, n in self._schedule if at >= step and rank < n]
        after_a_failure = batch_sizes.after_a_failure(dataset.same_at_all(), batch, rank, size)
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
        """Compile `network` for batches of `rows` samples. Return how many seconds this took."""
        began, present = membership.monotonic(), columns[0].shape[0]
        shapes = [(rows, *c.shape[1:]) if c.shape[:1] == (present,) else c.shape for c in columns]
        try:
            network.compile(*(ms.Tensor(np.zeros(shape), c.dtype) for shape, c in zip(shapes, columns)))
        except Exception as error:  # any error of MindSpore's compiler; a step with this shape would raise it, too
            _log.debug('compiled ahead: batch=%d error="%s"', rows, str(error).partition("\n")[0])
        took = membership.monotonic() - began
        _log.debug("compiled ahead: batch=%d seconds=%.2f", rows, took)
        return took


def _new(shares: Iterable[int], known: set[int]) -> list[int]:
    """Return the numbers in `shares` that aren't in `known`, without duplicates, and add them to `known`."""
    found = [rows for rows in dict.fromkeys(shares) if rows not in known]
    known.update(found)
    return found
