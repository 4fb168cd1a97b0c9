"""Warnings of trainings that will hardly do what was intended.

For example two reducers or none reduce the gradients, or settings of MindSpore have no effect here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ms_kungfu import membership, runtime
from ms_kungfu.elastic.options import Options
from ms_kungfu.trained import inventory

_log = logging.getLogger(__name__)
_STEPS = 10  # mostly more than gradients are accumulated over; the consistency check finds differing workers within 100


class MisuseWarnings:
    """The warnings, each once in a process."""

    _told: set[str] = set()

    def __init__(self) -> None:
        self._without = 0  # steps in a row in which nothing was reduced
        self._synchronises = False

    def look(self, trained: Sequence[Any]) -> None:
        """Examine what is trained, as training begins."""
        import mindspore as ms
        from mindspore.parallel._auto_parallel_context import auto_parallel_context

        found = inventory.collect_cells(trained).values()
        kind = ms.nn.DistributedGradReducer
        if kind.__module__.startswith("ms_kungfu."):
            kind = ()  # it is ours, under --msrun
        theirs = [cell for cell in found if isinstance(cell, kind)]
        # MindSpore's own setting, not ms.get_auto_parallel_context, which another module may answer.
        mode, mean = auto_parallel_context().get_parallel_mode(), auto_parallel_context().get_gradients_mean()
        self._synchronises = inventory.synchronises(trained)
        if theirs and self._synchronises:
            self._say(
                "twice",
                "The gradients are reduced twice: by MindSpore's DistributedGradReducer, which parallel_mode=%r or the "
                "program makes, and by ms_kungfu's optimizer or reducer; leave the former out",
                mode,
            )
        elif mode != "stand_alone" or mean:
            self._say(
                "settings",
                "set_auto_parallel_context(parallel_mode=%r, gradients_mean=%r) is MindSpore's own parallelism, which "
                "knows nothing of these workers; leave it out: the optimizers of ms_kungfu average over them "
                "(gradients_mean=False of the optimizer: sum)",
                mode,
                mean,
            )

    def step(self, reductions: int, workers: int) -> None:
        """Note that a step with so many reductions of gradients is over."""
        self._without = 0 if reductions or workers == 1 else self._without + 1
        if self._without != _STEPS or self._synchronises:
            return
        from ms_kungfu.ops._base import Collective

        if not Collective._made:  # a reducer of the program's own may not report its reductions
            self._say(
                "unreduced",
                "None of %d workers has reduced gradients in %d steps: unless the program does so by ms_kungfu.comm, "
                "each trains a model of its own; give it an optimizer of ms_kungfu.optimizers, or a KungFuGradReducer",
                workers,
                _STEPS,
            )

    def _say(self, which: str, text: str, *arguments: Any) -> None:
        if which not in self._told:
            self._told.add(which)
            _log.warning("misuse: check=%s. " + text, which, *arguments)


def warn_of_one_epoch(options: Options) -> None:
    """Warn if a training of one epoch begins without a dataset: its cluster changes only between epochs."""
    asked = [name for name in ("schedule", "policy") if getattr(options, name)]
    if asked and membership.speaks_for_all():
        _log.warning(
            "misuse: check=epochs size=%d. ElasticTraining.epochs(1) without dataset= changes the cluster"
            " between epochs only, so %s changes nothing in this call of training; give dataset=, or "
            "divide the steps into epochs",
            runtime.current_cluster_size(), " and ".join(asked),
        )  # fmt: skip
