"""The gradients of the collectives, defined like those of MindSpore's collectives.

The collective that computes a gradient has the name of the forward collective, followed by "/grad". If the forward
collective has no name, the gradient's collective has no name either.

For the compiler, the collectives of a forward pass form one chain, and those of a backward pass form another. Each
gradient waits for the result of its own forward call (`ops.depend`), even if it doesn't need that result. Without this
wait, the compiler could run the two passes of a linear function in different orders on different ranks.
"""

from __future__ import annotations

from typing import Any, Callable

import mindspore.ops as ops
from mindspore.ops._grad_experimental.grad_base import bprop_getters

from ms_kungfu.ops._base import UNNAMED, Collective
from ms_kungfu.ops.all_gather import KungFuAllGather
from ms_kungfu.ops.all_reduce import KungFuAllReduce
from ms_kungfu.ops.broadcast import KungFuBroadcast
from ms_kungfu.ops.reduce_op import ReduceOp
from ms_kungfu.ops.reduce_scatter import KungFuReduceScatter

Bprop = Callable[..., tuple[Any]]


def _name(primitive: Collective) -> str | None:
    return None if primitive.channel == UNNAMED else primitive.channel + "/grad"


def _of_result(grad: Collective) -> Bprop:
    """Return a function that applies `grad` to the result's gradient, after the forward call."""

    def bprop(x: Any, out: Any, dout: Any) -> tuple[Any]:
        return (grad(ops.depend(dout, out)),)

    return bprop


def _keep_where_equal(x: Any, out: Any, dx: Any) -> Any:
    return dx * ops.cast(ops.equal(x, out), ops.dtype(dx))


@bprop_getters.register(KungFuAllReduce)
def _all_reduce(self: KungFuAllReduce) -> Bprop:
    grad = KungFuAllReduce(ReduceOp.MEAN if self.op == ReduceOp.MEAN else ReduceOp.SUM, _name(self))

    if self.op in (ReduceOp.SUM, ReduceOp.MEAN):
        return _of_result(grad)
    if self.op == ReduceOp.PROD:

        def bprop(x: Any, out: Any, dout: Any) -> tuple[Any]:
            if isinstance(x, (tuple, list)):
                products = ()
                for i in range(len(x)):
                    products = products + (dout[i] * out[i],)  # type: ignore[assignment]
                sums = grad(products)
                dx = ()
                for i in range(len(x)):
                    dx = dx + (sums[i] / x[i],)  # type: ignore[assignment]
                return (dx,)
            return (grad(dout * out) / x,)

    else:

        def bprop(x: Any, out: Any, dout: Any) -> tuple[Any]:
            sums = grad(ops.depend(dout, out))
            if isinstance(x, (tuple, list)):
                dx = ()
                for i in range(len(x)):
                    dx = dx + (_keep_where_equal(x[i], out[i], sums[i]),)  # type: ignore[assignment]
                return (dx,)
            return (_keep_where_equal(x, out, sums),)

    return bprop


@bprop_getters.register(KungFuBroadcast)
def _broadcast(self: KungFuBroadcast) -> Bprop:
    def bprop(x: Any, out: Any, dout: Any) -> tuple[Any]:
        return (dout,)

    return bprop


@bprop_getters.register(KungFuAllGather)
def _all_gather(self: KungFuAllGather) -> Bprop:
    return _of_result(KungFuReduceScatter(ReduceOp.SUM, _name(self)))


@bprop_getters.register(KungFuReduceScatter)
def _reduce_scatter(self: KungFuReduceScatter) -> Bprop:
    if self.op != ReduceOp.SUM:
        raise RuntimeError(f"KungFuReduceScatter supports the gradient of {ReduceOp.SUM} only, not of {self.op}")
    return _of_result(KungFuAllGather(_name(self)))
