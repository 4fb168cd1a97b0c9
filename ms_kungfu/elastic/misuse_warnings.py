"""Warn about programs that probably don't do what their authors intended.

For example, a program reduces its gradients twice or not at all, or uses a MindSpore setting that has no effect.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ms_kungfu import membership, runtime
from ms_kungfu.elastic.options import Options
from ms_kungfu.trained import inventory

_log = logging.getLogger(__name__)
# After this number of steps without a reduction, a warning is logged. Programs that accumulate gradients usually reduce
# more often. The consistency check may need 100 steps to find different weights.
_STEPS = 10


class MisuseWarnings:
    """Log each misuse warning once per process."""

    _told: set[str] = set()

    def __init__(self) -> None:
        self._without = 0  # consecutive steps without a gradient reduction
        self._synchronises = False

    def look(self, trained: Sequence[Any]) -> None:
        """Check the trained objects. Called when training begins."""
        import mindspore as ms
        from mindspore.parallel._auto_parallel_context import auto_parallel_context

        found = inventory.collect_cells(trained).values()
        kind = ms.nn.DistributedGradReducer
        if kind.__module__.startswith("ms_kungfu."):
            kind = ()  # under --msrun, ms_kungfu has replaced MindSpore's class with its own class
        theirs = [cell for cell in found if isinstance(cell, kind)]
        # Read MindSpore's own setting: ms.get_auto_parallel_context may have been replaced.
        mode, mean = auto_parallel_context().get_parallel_mode(), auto_parallel_context().get_gradients_mean()
        self._synchronises = inventory.synchronises(trained)
        if theirs and self._synchronises:
            self._say(
                "twice",
                "The gradients are reduced twice: by MindSpore's DistributedGradReducer, which parallel_mode=%r or "
                "the program creates, and by ms_kungfu's optimizer or reducer; remove MindSpore's reducer",
                mode,
            )
        elif mode != "stand_alone" or mean:
            self._say(
                "settings",
                "set_auto_parallel_context(parallel_mode=%r, gradients_mean=%r) has no effect on these workers: it "
                "configures MindSpore's own parallelism. Remove the call: ms_kungfu's optimizers average the gradients "
                "over the workers (or sum them, with the optimizer's gradients_mean=False)",
                mode,
                mean,
            )

    def step(self, reductions: int, workers: int) -> None:
        """Count a step. `reductions`: the number of gradient reductions in the step."""
        self._without = 0 if reductions or workers == 1 else self._without + 1
        if self._without != _STEPS or self._synchronises:
            return
        from ms_kungfu.ops._base import Collective

        if not Collective._made:  # if the program creates collectives itself, its reductions may not be counted
            self._say(
                "unreduced",
                "None of %d workers has reduced gradients in %d steps: unless the program reduces them "
                "with ms_kungfu.comm, each worker trains a separate model; use an optimizer of "
                "ms_kungfu.optimizers, or a KungFuGradReducer",
                workers,
                _STEPS,
            )

    def without_steps(self) -> None:
        """Warn that the loop has ended an epoch without counting a step."""
        if membership.speaks_for_all():
            self._say(
                "steps",
                "The loop has ended an epoch without step_end(): no step counts as trained, and the cluster doesn't "
                "change; call step_end() after each step",
            )

    def _say(self, which: str, text: str, *arguments: Any) -> None:
        if which not in self._told:
            self._told.add(which)
            _log.warning("misuse: check=%s. " + text, which, *arguments)


def warn_of_one_epoch(options: Options) -> None:
    """Warn that the cluster can't change in a training call of a single epoch without a dataset.

    Without a dataset, the cluster changes only between epochs.
    """
    asked = [name for name in ("schedule", "policy") if getattr(options, name)]
    if asked and membership.speaks_for_all():
        _log.warning(
            "misuse: check=epochs size=%d. ElasticTraining.epochs(1) without dataset= changes the cluster"
            " only between epochs, so %s changes nothing in this training call; give dataset=, or "
            "divide the steps into several epochs",
            runtime.current_cluster_size(), " and ".join(asked),
        )  # fmt: skip
