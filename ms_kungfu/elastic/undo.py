"""A step with several gradient reductions is one step: where a worker dies between two of them, the others undo it.

Each reduction is whole, and the same at all survivors. Where an update follows each (a GAN's two optimizers), a worker
that dies between them has its part in the first update and none in the second, so its samples are neither trained nor
left. All survivors see that alike when the step is over: `membership.take_commits` goes by the generations in which its
reductions ended, which they share. They take back the Parameters and buffers that they had before the step, its samples
are handed out again, and it doesn't count.

That takes a copy before each step, which only programs pay whose steps have several reductions. How many there are is
known after the first step, before which everybody makes a copy.
"""

from __future__ import annotations

import logging
from typing import Any

from ms_kungfu import runtime
from ms_kungfu.comm import Array
from ms_kungfu.elastic import membership, state
from ms_kungfu.elastic.state import TrainingState
from ms_kungfu.errors import KungFuError

_log = logging.getLogger(__name__)


class LastStep:
    """What a training was before its last step."""

    def __init__(self) -> None:
        self._several: bool | None = None  # reductions in a step; None as long as it isn't known
        self._kept: list[tuple[Any, Array]] = []

    def begins(self, now: TrainingState) -> None:
        """A step follows: keep what may have to be taken back."""
        self._kept = []
        membership.take_commits()  # of nobody's step
        if self._several is not False and runtime.current_cluster_size() > 1:
            # asnumpy shares the memory that the step writes to.
            self._kept = [(t, t.asnumpy().copy()) for t in (*now.parameters, *now.buffers.values())]

    def ended(self, step: int) -> bool:
        """Whether it stands; where it doesn't, everything is as it was before it. The same at all workers."""
        commits, partly = membership.take_commits()
        self._several = bool(self._several) or commits > 1
        if not partly:
            return True
        ranks = ", ".join(map(str, partly))
        if not self._kept:
            raise KungFuError(
                f"step {step}: rank {ranks} died between two gradient reductions, in the first step that had several; "
                "what was before it isn't kept. Resume from a checkpoint"
            )
        for tensor, values in self._kept:
            state.assign(tensor, values)
        _log.warning(
            "step %d: rank %s died between two gradient reductions, so the step is undone and its samples are trained "
            "again",
            step,
            ranks,
        )
        return False
