"""Undo a step with several gradient reductions if a worker fails between two of them.

Each reduction is whole, and the same at all survivors. If an update follows each (a GAN's two optimizers), a worker
that fails between them contributes to the first update only. Its samples are then neither trained nor untrained. All
survivors detect that alike when the step is over, by the generations in which its reductions ended, which they share.
They restore the Parameters and buffers from before the step, assign its samples again, and don't count it.

That needs a copy before each step. Only trainings with several gradient reducers, or with several reductions in a step
before, make it.
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
    """The state of a training before its last step."""

    def __init__(self, now: Callable[[], TrainingState]) -> None:
        self._now = now
        self._reductions = membership.watch_reductions()
        self._several = False  # reductions in a step
        self.reductions = 0
        """Reductions of gradients in the step that is over."""
        self._begun = False
        self._kept: list[tuple[Any, Array]] | None = None  # None: nothing is kept
        self._host: list[tuple[Callable[[Any], None], Any]] = []

    def watch(self, trained: Any) -> None:
        """Register what is trained."""
        # Steps of shards always stand, and need no copy.
        self._several = len(inventory.reducers(trained, left_to_shards=False)) > 1

    def begins(self) -> None:
        """Begin a step, unless it has begun already: keep what may have to be restored."""
        if self._begun:
            return
        self._begun = True
        self._reductions.take_commits()  # of no step
        if self._several and runtime.current_cluster_size() > 1:
            now = self._now()
            # asnumpy shares the memory that the step writes to.
            self._kept = [(t, t.asnumpy().copy()) for t in (*now.parameters, *now.buffers.values())]
            self._host = [(c.restore, c.capture()) for c in now.components if c.name == "loss_scale"]

    def ended(self, step: int) -> bool:
        """Return whether the step stands; if it doesn't, restore the state before it. The same at all workers."""
        commits, partly = self._reductions.take_commits()
        self._several, self.reductions = self._several or commits > 1, commits
        kept, host = (self._kept, self._host) if self._begun else (None, [])
        self._begun, self._kept, self._host = False, None, []
        if not partly:
            return True
        ranks = ", ".join(map(str, partly))
        if kept is None:
            raise KungFuError(
                f"step {step}: rank {ranks} died between two gradient reductions, in the first step that had several; "
                "what was before it isn't kept. Resume from a checkpoint"
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
        """Return the ranks whose samples are in the step."""
        return self._reductions.take_participants()
