"""Run asynchronous steps: each worker runs its steps independently, and the workers meet only at sync points.

`ms_kungfu.membership.sync_points` explains why all workers enter the same sync points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from ms_kungfu import membership, runtime
from ms_kungfu.agreement import broadcast_json, told_by_one
from ms_kungfu.comm import Array
from ms_kungfu.dataset.shares import Shares
from ms_kungfu.elastic import event_log
from ms_kungfu.elastic.changes import ClusterChanges
from ms_kungfu.elastic.checkpoint import Checkpointing
from ms_kungfu.elastic.options import Options
from ms_kungfu.elastic.policy import as_policy
from ms_kungfu.elastic.program import Training, is_behind
from ms_kungfu.membership import Change


@dataclass
class AsynchronousSteps:
    """One worker's asynchronous steps. `size_after` maps a step to the size that the schedule requests at that step."""

    training: Training
    size_after: Callable[[int], int | None]
    checkpoints: Checkpointing
    changes: ClusterChanges

    def step_end(self, loss: Any) -> Change:
        """End this worker's step; collective only if a sync point is due."""
        training = self.training
        self.changes.statistics.mark()
        samples = None if training.dataset is None else training.dataset.weight
        self.changes.statistics.committed(training.step, samples, None, loss)
        if training.dataset is not None:
            training.dataset.commit()  # not collective: this worker doesn't need the other workers' positions
        checkpoint = self.checkpoints.is_due(training.step)
        wanted = self.size_after(training.step)
        if membership.sync_point_is_due(wanted, checkpoint or bool(self.changes.job_end.signal)):
            return self.come_together(wanted, checkpoint=checkpoint)
        return membership.no_change()

    def end(self) -> None:
        """End the training call on all workers (collective)."""
        dataset = self.training.dataset
        if not self.training.should_stop:
            membership.sync_point_is_due(call=True)
            self.come_together(None, ended=True)
        if not runtime.detached() and not is_behind() and dataset is not None:
            dataset.suspended = False  # the dataset was suspended because another worker ended the loop

    def come_together(self, wanted: int | None, checkpoint: bool = False, ended: bool = False) -> Change:
        """Agree on a position in the training, and carry out all workers' requests (collective)."""
        began = membership.monotonic()
        membership.enter_sync_point()
        wanted, checkpoint, ended = self._go_to_the_furthest(wanted, checkpoint, ended)
        step, job_end = self.training.step, self.changes.job_end
        if wanted is not None:
            event_log.scheduled(step, wanted, wait=False)
        if checkpoint:
            self.checkpoints.write(step)
        job_end.carry_out(step)
        if ended:
            # If a cluster change is also due, the next training call's `begin` carries out the change.
            self.changes.suspend(True)
            return membership.no_change()
        membership.note_step(step)
        with event_log.refusals():
            change = membership.follow_sync_point(wanted)
        self.changes.follow(change, began)
        return change

    def _go_to_the_furthest(self, wanted: int | None, checkpoint: bool, ended: bool) -> tuple[int | None, bool, bool]:
        """Continue from the position of the worker that is furthest ahead (collective).

        Return the values on which the workers have agreed: the schedule's size, whether a checkpoint is due, and
        whether training ends.
        """
        training = self.training
        # Two workers can be at the same step although only one of them has counted the end of the epoch.
        epoch = training.epoch if training.dataset is None else training.dataset.epoch
        row = np.array([training.step, epoch, wanted or 0, checkpoint, ended, self.changes.job_end.signal], np.int64)

        def receive(root: int, rows: Mapping[int, Array]) -> Array:
            furthest = broadcast_json(self._position, root)
            if runtime.current_rank() != root:
                self._take_position(furthest)
            return np.array(list(rows.values()))

        rows = told_by_one(row, "kungfu/sync", _furthest, receive)
        sizes = rows[rows[:, 2] > 0]
        size = int(sizes[sizes[:, 0].argmax(), 2]) if sizes.size else None
        self.changes.job_end.agreed = int(rows[:, 5].max())
        return size, bool(rows[:, 3].any()), bool(rows[:, 4].any())

    def _position(self) -> dict[str, Any]:
        training = self.training
        dataset = None if training.dataset is None else training.dataset.state()
        return {"step": training.step, "epoch": training.epoch, "dataset": dataset}

    def _take_position(self, furthest: dict[str, Any]) -> None:
        training = self.training
        if self._position() == furthest:
            return
        training.step, training.epoch = furthest["step"], furthest["epoch"]
        if training.dataset is not None:
            training.dataset.restore(furthest["dataset"])


def _furthest(rows: Mapping[int, Array]) -> int:
    """Return the lowest rank among those with the highest (step, epoch)."""
    return max(rows, key=lambda rank: tuple(rows[rank][:2]))


def is_asynchronous(options: Options, optimizers: list[Any], dataset: Shares | None, monitor: Any) -> bool:
    """Return whether workers are asynchronous. Raise ValueError if another option requires synchronous workers."""
    able = bool(optimizers) and all(getattr(o, "asynchronous", False) for o in optimizers)
    if options.asynchronous and not able:
        names = ", ".join(type(o).__name__ for o in optimizers) or "no optimizer"
        raise ValueError(
            f"asynchronous=True requires PairAveragingOptimizer, but the objects passed to the training have {names}"
        )
    if options.asynchronous is False or not able:
        return False
    takes_all = {
        "policy": bool(as_policy(options.policy).parts),
        "monitor": monitor is not None,
        "wait=True": options.wait,
        "an exact ledger of the data": dataset is not None and dataset.keeps_ledger,
    }
    for what, given in takes_all.items():
        if given:
            raise ValueError(
                f"{what} requires all workers at every step, but {type(optimizers[0]).__name__} is asynchronous; "
                "leave out that option, or pass asynchronous=False so that workers meet at every step"
            )
    return True
