"""Undo a step with several gradient reductions if a worker fails between two of them.

Each reduction is complete, and has the same result on all survivors. But an update may follow each reduction, as with a
GAN's two optimizers. Then a worker that fails between two reductions contributes only to the first update. At the end
of the step, all survivors detect such a failure from the generations in which the step's reductions ended. These
generations are the same on all survivors. The survivors restore the Parameters and buffers to their values before the
step, assign the step's samples again, and don't count the step.

To undo a step, a worker needs a copy of the state before the step. Workers make such copies only if training uses
several gradient reducers, or after the first step with several reductions.
"""

from __future__ import annotations

import logging
from typing import Any, Callable

from ms_kungfu import membership, runtime
from ms_kungfu.comm import Array
from ms_kungfu.elastic.state import TrainingState
from ms_kungfu.errors import KungFuError
from ms_kungfu.trained import inventory

_log = logging.getLogger(__name__)


class LastStep:
    """A copy of the training state before the current step."""

    def __init__(self, now: Callable[[], TrainingState]) -> None:
        self._now = now
        self._reductions = membership.watch_reductions()
        self._several = False  # whether a step may have several reductions
        self.reductions = 0
        """The number of gradient reductions in the last step."""
        self._begun = False
        self._kept: list[tuple[Any, Array]] | None = None  # None: no state is saved
        self._host: list[tuple[Callable[[Any], None], Any]] = []

    def watch(self, trained: Any) -> None:
        """Find out whether the trained objects contain several gradient reducers."""
        # Ignore reducers that leave the reduction to shards: steps with shards are never undone, so they need no copy.
        self._several = len(inventory.reducers(trained, left_to_shards=False)) > 1

    def begins(self) -> None:
        """Begin a step, and save the state that may have to be restored. Do nothing if the step has already begun."""
        if self._begun:
            return
        self._begun = True
        self._reductions.take_commits()  # don't count reductions outside of steps
        if self._several and runtime.current_cluster_size() > 1:
            now = self._now()
            # Copy, because asnumpy shares the memory to which the step writes.
            self._kept = [(t, t.asnumpy().copy()) for t in (*now.parameters, *now.buffers.values())]
            self._host = [(c.restore, c.capture()) for c in now.components if c.name == "loss_scale"]

    def ended(self, step: int) -> bool:
        """Return whether the step is valid. If it isn't, restore the state before the step.

        All workers get the same result.
        """
        commits, partly = self._reductions.take_commits()
        self._several, self.reductions = self._several or commits > 1, commits
        kept, host = (self._kept, self._host) if self._begun else (None, [])
        self._begun, self._kept, self._host = False, None, []
        if not partly:
            return True
        ranks = ", ".join(map(str, partly))
        if kept is None:
            raise KungFuError(
                f"step {step}: rank {ranks} failed between two gradient reductions, and the step can't be "
                "undone: it is the first step with several reductions, and ms_kungfu saves the state only before "
                "later steps. Resume from a checkpoint"
            )
        for tensor, values in kept:
            inventory.assign(tensor, values)
        for restore, captured in host:
            restore(captured)
        _log.warning(
            "step undone: step=%d failed=%s. A rank failed between two gradient reductions; the samples "
            "are trained again",
            step, ranks,
        )  # fmt: skip
        if membership.speaks_for_all():
            membership.report("step_undone", step=step, reason=f"rank {ranks} failed between two gradient reductions")
        return False

    def take_participants(self) -> list[int]:
        """Return the ranks whose samples were used in the last step."""
        return self._reductions.take_participants()
