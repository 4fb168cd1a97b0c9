"""The reduction operations."""

from __future__ import annotations


class ReduceOp:
    """The reduction operations, with MindSpore's names and ``MEAN``.

    ``MEAN`` is the sum divided by the number of ranks that took part. A mean of integers truncates
    towards zero and never overflows. Sums and products of integers wrap around in their own dtype.
    """

    SUM = "sum"
    """The sum over the ranks."""
    MEAN = "mean"
    """The sum divided by the number of ranks that took part."""
    MIN = "min"
    """The smallest of the ranks' values."""
    MAX = "max"
    """The largest of the ranks' values."""
    PROD = "prod"
    """The product over the ranks."""

    ALL = (SUM, MEAN, MIN, MAX, PROD)
    """All operations above."""


def check_reduce_op(op: str) -> str:
    """Return the operation's canonical name.

    MindSpore's ``"avg"`` becomes ``"mean"``. If `op` isn't an operation, raise a ValueError or
    TypeError that lists the allowed values.
    """
    if not isinstance(op, str):
        raise TypeError(f"op must be one of {', '.join(ReduceOp.ALL)}, not {op!r} ({type(op).__name__})")
    if op == "avg":
        return ReduceOp.MEAN
    if op not in ReduceOp.ALL:
        raise ValueError(f'op must be one of {", ".join(ReduceOp.ALL)}, not "{op}"')
    return op
