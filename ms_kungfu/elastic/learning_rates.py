"""Read, set and scale the learning rates of MindSpore's optimizers.

If an optimizer has a list of rates, the last rate applies to all steps after the end of the list.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn

from ms_kungfu.elastic.lr_rule import FactorRule
from ms_kungfu.errors import KungFuError
from ms_kungfu.trained.inventory import assign, collect_cells, is_grouped
from ms_kungfu.trained.rates import LastingRates


class ScaledSchedule(nn.learning_rate_schedule.LearningRateSchedule):
    """A learning rate schedule, multiplied by a factor. The graph isn't recompiled if the factor changes."""

    def __init__(self, schedule: Any, name: str) -> None:
        super().__init__()
        self.schedule = schedule
        self.factor = ms.Parameter(ms.Tensor(1.0, ms.float32), name=name, requires_grad=False)

    def construct(self, global_step):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        return self.schedule(global_step) * self.factor


class LearningRates:
    """Scale the learning rates of the given optimizers, including the rates of parameter groups.

    A rate may be a number, a list or a schedule. For a number or a list, this class changes the optimizer's Parameter.
    A schedule is wrapped in a `ScaledSchedule` before the optimizer is compiled. `bases` are the unscaled rates, which
    apply if the factor is 1. They are Parameters, and part of the training state. If the program has changed a rate
    since the last change of the cluster, the new value counts as the rate for the current size.
    """

    def __init__(self, optimizers: Iterable[Any], size: int, follows: str = "workers") -> None:
        found = [self._scalable(optimizer) for optimizer in optimizers]
        self.rates = list({id(rate): rate for rates in found for rate in rates}.values())
        self.bases = [
            ms.Parameter(ms.Tensor(rate.asnumpy().copy()), name=f"kungfu_base/{i}/{rate.name}", requires_grad=False)
            for i, rate in enumerate(self.rates)
        ]
        self.start_size, self._follows = size, follows
        self.factor = 1.0

    @staticmethod
    def of(trained: Iterable[Any], size: int, follows: str = "workers") -> LearningRates:
        """Return the `LearningRates` of the optimizers in `trained`.

        For the same optimizers, the result is the same object. Several training calls therefore scale from the same
        initial size. `follows` is the unit of `size`: workers or samples.

        Raises:
            ValueError: if there is no optimizer, or an optimizer's rate can't be scaled.
        """
        cells = collect_cells(trained).values()
        if grouped := next((cell for cell in cells if is_grouped(cell)), None):
            raise ValueError(
                f"lr_rule can't scale the learning rate of {type(grouped).__name__}, because schedulers set this rate; "
                "call ms_kungfu.current_cluster_size() in the scheduler's function, or leave lr_rule out"
            )
        optimizers = [cell for cell in cells if isinstance(cell, nn.Optimizer)]
        if not optimizers:
            raise ValueError(
                "lr_rule requires an optimizer of mindspore.nn, but no such optimizer was passed to the training"
            )
        if any(isinstance(optimizer, nn.LARS) for optimizer in optimizers):
            raise ValueError(
                "lr_rule can't scale the learning rate of nn.LARS, which stores the rate in two places; leave "
                "lr_rule out"
            )
        known = vars(optimizers[0]).get("_kungfu_learning_rates")
        if known is None:
            known = LearningRates(optimizers, size, follows)
            vars(optimizers[0])["_kungfu_learning_rates"] = known
        return known

    def state(self) -> Any:
        return {"start_size": self.start_size, "factor": self.factor, "follows": self._follows}

    def restore(self, state: Any) -> None:
        there = state.get("follows", self._follows)
        if there != self._follows:
            raise KungFuError(
                f"lr_rule scaled by the number of {there} until now, but in this program it scales by the number of "
                f"{self._follows} (with shards, it scales by the global batch); use the same shards= as when training "
                "began, or omit lr_rule"
            )
        self.start_size, self.factor = state["start_size"], state["factor"]

    def follow(self, rule: FactorRule, size: int) -> None:
        """Set the rates for `size`. Rates that are bitwise equal on two workers stay equal."""
        factor = rule(size, self.start_size)
        if factor == self.factor:
            return
        for rate, base in zip(self.rates, self.bases):
            now, full = rate.asnumpy(), base.asnumpy()
            ours = now == _times(full, self.factor)
            if not ours.all():
                full = np.where(ours, full, _times(now, 1 / self.factor)).astype(now.dtype)
                assign(base, full)
            assign(rate, _times(full, factor))
        self.factor = factor

    @staticmethod
    def _scalable(optimizer: Any) -> list[Any]:
        """Return the Parameters through which one optimizer's rates can be scaled. Wrap schedules if necessary."""
        rates: Any = optimizer.learning_rate
        if isinstance(rates, tuple):
            return list(rates)
        if not isinstance(rates, nn.CellList):
            if _parameter_of(rates) is None:
                optimizer.learning_rate = _wrap(optimizer, rates, "learning_rate_factor")
            return [_parameter_of(optimizer.learning_rate)]
        wrapped: dict[int, ScaledSchedule] = {}
        # The list has one rate for each parameter of the optimizer. Parameters of the same group share a rate object.
        for i, rate in enumerate(list(rates)):
            if _parameter_of(rate) is None:
                if id(rate) not in wrapped:
                    wrapped[id(rate)] = _wrap(optimizer, rate, f"learning_rate_factor_{i}")
                rates[i] = wrapped[id(rate)]
        return [_parameter_of(rate) for rate in rates]


def _times(values: Any, factor: float) -> Any:
    return (values.astype(np.float64) * factor).astype(values.dtype)


def _parameter_of(rate: Any) -> Any:
    """Return the Parameter that holds a rate, if the rate is a number or a list. Return None for a schedule.

    The Parameter may be inside a cell of MindSpore or ms_kungfu.
    """
    if isinstance(rate, ms.Parameter):
        return rate
    if isinstance(rate, ScaledSchedule):
        return rate.factor
    known = isinstance(rate, LastingRates) or type(rate).__module__ == "mindspore.nn.optim.optimizer"
    return getattr(rate, "learning_rate", None) if known else None


def _wrap(optimizer: Any, schedule: Any, name: str) -> ScaledSchedule:
    if not isinstance(schedule, nn.learning_rate_schedule.LearningRateSchedule):
        raise ValueError(
            f"lr_rule can't scale the learning rate of {type(optimizer).__name__}, which is a "
            f"{type(schedule).__name__}; give the optimizer a number, a list or a LearningRateSchedule"
        )
    if optimizer.compile_cache or optimizer.global_step.asnumpy().any():
        raise ValueError(
            f"lr_rule can't scale the {type(schedule).__name__} of {type(optimizer).__name__} after the optimizer has "
            "been compiled; pass lr_rule to the first training call"
        )
    return ScaledSchedule(schedule, name)


def _rate_in(optimizer: Any) -> Any:
    """Return the Parameter that holds an optimizer's rate, if the rate is a number or a list.

    Return None if the rate is a schedule, or if parameter groups have their own rates.
    """
    if is_grouped(optimizer):
        rates = [group.get("lr") for group in optimizer.param_groups]
        return rates[0] if len(rates) == 1 and isinstance(rates[0], ms.Parameter) else None
    held = optimizer.learning_rate
    inner = held if isinstance(held, ms.Parameter) else getattr(held, "learning_rate", None)
    return inner if isinstance(inner, ms.Parameter) else None


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set a constant learning rate. It replaces the rest of a list of rates. Compiled graphs remain valid.

    Raises:
        ValueError: if the optimizer has a MindSpore schedule, or parameter groups with their own rates.
    """
    inner = _rate_in(optimizer)
    if inner is None:
        groups = is_grouped(optimizer) or isinstance(optimizer.learning_rate, (tuple, list, nn.CellList))
        raise ValueError(
            f"a policy asked for the learning rate {rate:g}, but {type(optimizer).__name__} has "
            f"{'groups of parameters with their own rates' if groups else 'a schedule'}; give the optimizer a number "
            "or a list of numbers"
        )
    ms.ops.assign(inner, ms.Tensor(np.full(inner.shape, rate), dtype=inner.dtype))


def learning_rate_of(optimizers: Iterable[Any], step: int) -> float | None:
    """Return the first optimizer's rate in step `step`, counted from 0; None if it has a schedule or groups."""
    inner = next((_rate_in(optimizer) for optimizer in optimizers), None)
    if inner is None:
        return None
    values = inner.asnumpy().ravel()
    return float(values[min(step, values.size - 1)])
