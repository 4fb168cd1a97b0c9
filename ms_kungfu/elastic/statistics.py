"""Collect statistics of this worker's steps for the job's event log.

Per step, this takes two reads of the clock and a few additions. About once a second, at the end of a step, the worker
reports the statistics.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

from ms_kungfu import _core, membership
from ms_kungfu.dataset.shares import steps_left
from ms_kungfu.elastic.measuring import Measuring
from ms_kungfu.elastic.program import Training
from ms_kungfu.monitoring.monitor import number_of

_REPORT_S = 1.0
_MOST_RANKS = 64  # if there are more ranks than this, each rank reports less often than once a second


class StepStatistics:
    """The statistics of this worker's steps.

    `training` provides the optimizers and the dataset, and `measuring` provides the monitor.
    """

    def __init__(self, training: Training, measuring: Measuring) -> None:
        self._training, self._measuring = training, measuring
        self.epochs: int | None = None
        """The number of epochs in this training call; None if it isn't known."""
        self.last_step: int | None = None
        """The number of this training call's last step, for programs without an ElasticDataset; None if unknown."""
        self._began: float | None = None  # when the current step began; None before the first step
        self._took, self._step = 0.0, 0  # duration and number of the step that has just ended
        self._is_first = True
        self._loss: Any = None
        self._clear()

    def _clear(self) -> None:
        self._since = self._began
        self._times: list[float] = []
        self._samples = 0
        self._trained: int | None = 0
        if self._began is not None:
            member = membership.current()
            self._collectives, self._spent = member.core.traffic()[3], dict(member.spent)

    def mark(self) -> None:
        """Record that a step ends now. Called before the workers agree on whether the step is valid."""
        began = self._began
        _core.trace_step_ends(self._training.step)
        self.resume()
        assert self._began is not None
        self._is_first = began is None
        self._took = 0.0 if began is None else self._began - began

    def resume(self) -> None:
        """Record that the next step begins now. The time since the end of the last step doesn't count."""
        is_first, self._began = self._began is None, membership.monotonic()
        _core.trace_step_begins()
        if is_first:
            self._clear()

    def committed(self, step: int, samples: int | None, trained: int | None, loss: Any) -> None:
        """Count the step that ended when `mark` was called. The workers have now committed it.

        `samples`: the number of this worker's samples in the step. `trained`: the number of all workers' samples; None
        if it isn't known.
        """
        if self._is_first:  # it isn't known when the first step began
            return
        self._times.append(self._took)
        self._samples += samples or 0
        self._trained = None if trained is None or self._trained is None else self._trained + trained
        self._step, self._loss = step, loss
        assert self._began is not None
        assert self._since is not None
        if self._began - self._since >= _REPORT_S * max(1.0, membership.size() / _MOST_RANKS):
            self._report()

    def report_rest(self) -> None:
        """Report the steps since the last report now. Called when training may end."""
        if self._times:
            self._report()

    def end(self) -> None:
        """Report the last steps. Called when training has ended."""
        self.report_rest()
        self._began = self._loss = None
        self._clear()

    def _report(self) -> None:
        member, times = membership.current(), sorted(self._times)
        assert self._began is not None
        assert self._since is not None
        spent = {what: member.spent.get(what, 0.0) - self._spent.get(what, 0.0) for what in ("data", "checkpoint")}
        report: dict[str, Any] = {
            "step": self._step,
            "seconds": self._began - self._since,
            "ended": len(times),
            "samples": self._samples,
            "trained": self._trained,
            "committed": sum(times),
            "p50": times[len(times) // 2],
            "p99": times[min(len(times) - 1, math.ceil(0.99 * len(times)) - 1)],
            "collectives": max(0.0, member.core.traffic()[3] - self._collectives),
            "checkpoint": spent["checkpoint"],
        }
        dataset = self._training.dataset
        if dataset is not None:
            report.update(data=spent["data"], batch=dataset.global_batch_size)
        if membership.speaks_for_all():
            report.update(self._of_all(self._loss))
        membership.report_steps({name: value for name, value in report.items() if value is not None})
        self._clear()

    def _of_all(self, loss: Any) -> dict[str, Any]:
        """Return the values that the lowest rank reports on behalf of all workers."""
        training, dataset = self._training, self._training.dataset
        found: dict[str, Any] = {"total_steps": self.last_step}
        if self.epochs is not None:
            found.update(epochs=self.epochs, epoch=min(training.epoch + 1, self.epochs))
            if dataset is not None and not training.asynchronous:
                found["total_steps"] = training.step + steps_left(dataset, self.epochs - training.epoch)
        # The program may pass any object as its loss, and an error here must not end training.
        with contextlib.suppress(Exception):
            number = number_of(loss)
            found["loss"] = number if math.isfinite(number) else None if loss is None else str(number)
        if self._training.optimizers:
            from ms_kungfu.elastic.learning_rates import learning_rate_of  # loads MindSpore

            found["learning_rate"] = learning_rate_of(self._training.optimizers, self._step - 1)
        if self._measuring.monitor is not None:
            found["noise_scale"] = self._measuring.monitor.noise_scale.noise_scale
        return found
