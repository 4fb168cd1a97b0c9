"""Read, set, hold and scale the learning rates of MindSpore's optimizers.

After the end of a list of rates, its last rate applies. The scale is a factor that depends on the
cluster's size.
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
    """A learning rate schedule multiplied by a factor, which can change without compiling the graph again."""

    def __init__(self, schedule: Any, name: str) -> None:
        super().__init__()
        self.schedule = schedule
        self.factor = ms.Parameter(ms.Tensor(1.0, ms.float32), name=name, requires_grad=False)

    def construct(self, global_step):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        return self.schedule(global_step) * self.factor


class LearningRates:
    """Scale the learning rates of all optimizers in the trained cells, including rates of parameter groups.

    A rate may be a number, a list or a schedule. For a number or list, this class writes to the optimizer's Parameter.
    A schedule is wrapped in a `ScaledSchedule` before the optimizer is compiled. `bases` are the rates for a factor of
    1; they are Parameters, and part of the training state. If the program has changed a rate since the last change of
    the cluster, that rate applies to the current size.
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
        """Return the `LearningRates` of the optimizers in `trained`; the same object for the same optimizers.

        Several calls of training therefore scale from the same initial size. `follows` is the name of the quantity in
        `size`.

        Raises:
            ValueError: if there is no optimizer, or an optimizer's rate can't be scaled.
        """
        cells = collect_cells(trained).values()
        if grouped := next((cell for cell in cells if is_grouped(cell)), None):
            raise ValueError(
                f"lr_rule can't scale the learning rate of {type(grouped).__name__}, which schedulers set in its "
                "param_groups; call ms_kungfu.current_cluster_size() in the scheduler's function, or leave lr_rule out"
            )
        optimizers = [cell for cell in cells if isinstance(cell, nn.Optimizer)]
        if not optimizers:
            raise ValueError(
                "lr_rule requires an optimizer of mindspore.nn among the trained objects, but there is none"
            )
        if any(isinstance(optimizer, nn.LARS) for optimizer in optimizers):
            raise ValueError("lr_rule can't scale the learning rate of nn.LARS, which keeps it in two places")
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
                f"the lr_rule of the received state follows the number of {there}, but here it follows the "
                f"number of {self._follows} (with shards: the global batch); use the same shards= as when "
                "training began, or omit lr_rule"
            )
        self.start_size, self.factor = state["start_size"], state["factor"]

    def follow(self, rule: FactorRule, size: int) -> None:
        """Set the rates for `size`; workers with the same rates get the same bits."""
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
        """Return the Parameters that scale the rates of one optimizer."""
        rates: Any = optimizer.learning_rate
        if isinstance(rates, tuple):
            return list(rates)
        if not isinstance(rates, nn.CellList):
            if _parameter_of(rates) is None:
                optimizer.learning_rate = _wrap(optimizer, rates, "learning_rate_factor")
            return [_parameter_of(optimizer.learning_rate)]
        wrapped: dict[int, ScaledSchedule] = {}
        # One rate per parameter of the optimizer; parameters in a group share a rate.
        for i, rate in enumerate(list(rates)):
            if _parameter_of(rate) is None:
                if id(rate) not in wrapped:
                    wrapped[id(rate)] = _wrap(optimizer, rate, f"learning_rate_factor_{i}")
                rates[i] = wrapped[id(rate)]
        return [_parameter_of(rate) for rate in rates]


def _times(values: Any, factor: float) -> Any:
    return (values.astype(np.float64) * factor).astype(values.dtype)


def _parameter_of(rate: Any) -> Any:
    """Return the Parameter inside a cell of MindSpore or ms_kungfu that holds a number or list; None for a schedule."""
    if isinstance(rate, ms.Parameter):
        return rate
    if isinstance(rate, ScaledSchedule):
        return rate.factor
    known = isinstance(rate, LastingRates) or type(rate).__module__ == "mindspore.nn.optim.optimizer"
    return getattr(rate, "learning_rate", None) if known else None


def _wrap(optimizer: Any, schedule: Any, name: str) -> ScaledSchedule:
    if not isinstance(schedule, nn.learning_rate_schedule.LearningRateSchedule):
        raise ValueError(
            f"lr_rule can't scale the learning rate of {type(optimizer).__name__}, a {type(schedule).__name__}; "
            "give the optimizer a number, a list or a LearningRateSchedule"
        )
    if optimizer.compile_cache or optimizer.global_step.asnumpy().any():
        raise ValueError(
            f"lr_rule can't scale the {type(schedule).__name__} of {type(optimizer).__name__} after the optimizer has "
            "been compiled; pass lr_rule to the first call of training"
        )
    return ScaledSchedule(schedule, name)


def _rate_in(optimizer: Any) -> Any:
    """Return the Parameter that holds a number or list; None for a schedule, and for groups with their own rates."""
    if is_grouped(optimizer):
        rates = [group.get("lr") for group in optimizer.param_groups]
        return rates[0] if len(rates) == 1 and isinstance(rates[0], ms.Parameter) else None
    held = optimizer.learning_rate
    inner = held if isinstance(held, ms.Parameter) else getattr(held, "learning_rate", None)
    return inner if isinstance(inner, ms.Parameter) else None


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Set a constant learning rate from now on, which replaces the rest of a list; compiled graphs stay valid.

    Raises:
        ValueError: if the optimizer has a MindSpore schedule, or groups with their own rates.
    """
    inner = _rate_in(optimizer)
    if inner is None:
        groups = is_grouped(optimizer) or isinstance(optimizer.learning_rate, (tuple, list, nn.CellList))
        raise ValueError(
            f"a policy asked for the learning rate {rate:g}, but {type(optimizer).__name__} has "
            f"{'groups of parameters' if groups else 'a schedule'} with their own rates; give it a number or a list"
        )
    ms.ops.assign(inner, ms.Tensor(np.full(inner.shape, rate), dtype=inner.dtype))


def learning_rate_of(optimizers: Iterable[Any], step: int) -> float | None:
    """Return the first optimizer's learning rate in step `step` (0 or more); None for a schedule or groups."""
    inner = next((_rate_in(optimizer) for optimizer in optimizers), None)
    if inner is None:
        return None
    values = inner.asnumpy().ravel()
    return float(values[min(step, values.size - 1)])
