"""Compute the factor by which the learning rate is multiplied at a cluster size.

This module uses no clock and no I/O.
"""

from __future__ import annotations

import math
from typing import Callable, Union

LRRule = Union[str, Callable[[int, int], float]]
"""``"linear"``, ``"sqrt"``, ``"none"``, or a function ``(size, start_size) -> factor``."""

FactorRule = Callable[[int, int], float]

_RULES: dict[str, FactorRule] = {
    # Goyal et al. 2017, Accurate, Large Minibatch SGD
    "linear": lambda size, start: size / start,
    # Krizhevsky 2014, One weird trick for parallelizing convolutional neural networks
    "sqrt": lambda size, start: math.sqrt(size / start),
}
_FORM = "use 'linear', 'sqrt', 'none' or a function (size, start_size) -> factor"


def parse_lr_rule(rule: LRRule) -> FactorRule | None:
    """Return the rule as a function ``(size, start_size) -> factor``; None for "none".

    Raise ValueError or TypeError if the rule is invalid.

    >>> parse_lr_rule("linear")(4, 2)
    2.0
    """
    if isinstance(rule, str):
        if rule == "none":
            return None
        if rule not in _RULES:
            raise ValueError(f"unknown lr_rule {rule!r}; {_FORM}")
        return _RULES[rule]
    if callable(rule):
        return _checked(rule)
    raise TypeError(f"lr_rule is {rule!r}; {_FORM}")


def _checked(rule: FactorRule) -> FactorRule:
    def factor(size: int, start_size: int) -> float:
        value = rule(size, start_size)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise ValueError(f"lr_rule({size}, {start_size}) returned {value!r}; return a factor above 0")
        return number

    return factor
