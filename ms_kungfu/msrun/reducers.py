"""Reduce over the virtual world of V ranks. Each of `size` living workers does the work of V / `size` ranks."""

from __future__ import annotations

import ctypes
import functools
from typing import Any, Callable

import mindspore as ms
from mindspore import nn, ops
from mindspore.ops import composite
from mindspore.ops._grad_experimental.grad_base import bprop_getters

from ms_kungfu.msrun import context, world
from ms_kungfu.msrun.communication import check_group, refused, refusing
from ms_kungfu.ops import _plugin
from ms_kungfu.ops._base import Collective, check_root
from ms_kungfu.optimizers import KungFuGradReducer

_REDUCTIONS = ("sum", "min", "max")
_made = False


def made() -> bool:
    """Return whether the program has created a reducer or a collective that reduces."""
    return _made


def _note() -> None:
    global _made
    _made = True


@functools.cache
def _ask_python() -> Any:
    """Make the plugin's kernels call Python at each launch.

    Python returns whether this worker takes part in collectives, and which worker does the work of a virtual rank.
    """
    ask = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: int(world.takes_part()))
    who = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_uint8), ctypes.c_int)(
        lambda rank, lives, size: world.player_of(rank, [r for r in range(size) if lives[r]])
    )
    _plugin.load().kungfu_ms_ask_whether_it_takes_part(ask)
    _plugin.load().kungfu_ms_ask_who_plays(who)
    return ask, who  # the cache keeps these objects alive, because the plugin uses them


def _check_place(name: str) -> None:
    if not world.begun():
        raise RuntimeError(f"call init() of mindspore.communication before {name}")
    if ms.get_context("device_target") != "CPU":
        raise refused(f"{name} on a device", "this operation runs only on CPUs")


class AllReduce(Collective):
    """``ops.AllReduce``: reduce a tensor over all V ranks by ``"sum"``, ``"min"`` or ``"max"``.

    During training, the result is computed from the living workers' values. A sum is the mean of these values times V,
    computed in float64 and, for integer tensors, rounded to the nearest integer. A worker that hasn't begun training
    takes part in no collective: the result is its own value, multiplied by V for a sum.
    """

    def __init__(self, op: str = "sum", group: str | None = None) -> None:
        check_group(group)
        if not isinstance(op, str):
            raise TypeError(f"op of AllReduce must be a string such as ReduceOp.SUM, not {op!r}")
        if op not in _REDUCTIONS:
            raise refused(f"AllReduce({op!r})", f"a virtual world supports {', '.join(_REDUCTIONS)}")
        _check_place("AllReduce")
        super().__init__("KungFuWorldAllReduce", None, op=op, world=world.size())
        self.init_attrs = {"op": op, "group": group}
        _ask_python()
        _note()


@bprop_getters.register(AllReduce)
def _all_reduce(self: AllReduce) -> Callable[..., tuple[Any]]:
    if self.op != "sum":
        raise refused(f"the gradient of AllReduce({self.op!r})", "only the gradient of a sum is supported")
    grad = AllReduce("sum")

    def bprop(x: Any, out: Any, dout: Any) -> tuple[Any]:
        return (grad(ops.depend(dout, out)),)

    return bprop


class Broadcast(Collective):
    """``ops.Broadcast``: return the tensor or tuple of tensors of the worker that does the work of `root_rank`."""

    copies = True

    def __init__(self, root_rank: int = 0, group: str | None = None) -> None:
        check_group(group)
        if check_root(root_rank) >= world.size():
            raise ValueError(f"rank {root_rank} is out of range: -msrun-size sets {world.size()} ranks")
        _check_place("Broadcast")
        super().__init__("KungFuWorldBroadcast", None, root=root_rank)
        self.init_attrs = {"root_rank": root_rank, "group": group}
        _ask_python()


@bprop_getters.register(Broadcast)
def _broadcast(self: Broadcast) -> Callable[..., tuple[Any]]:
    def bprop(x: Any, out: Any, dout: Any) -> tuple[Any]:
        return (dout,)

    return bprop


_times = composite.MultitypeFuncGraph("times")


@_times.register("Number", "Tensor")
def _times_factor(factor, gradient):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return gradient * ops.cast(factor, ops.dtype(gradient))


class DistributedGradReducer(nn.Cell):
    """``nn.DistributedGradReducer``: return the sum of the ranks' gradients, or their mean if `mean` is true.

    The sum is over the V ranks of the virtual world. The mean is the sum divided by `degree`, which is V unless the
    program passes another number.

    The parameters' ``comm_fusion`` determines which gradients are reduced together (docs/fusion.md). `fusion_type` has
    no effect, because it is an ID for MindSpore's own compiler passes.
    """

    def __init__(
        self, parameters: Any, mean: bool | None = None, degree: int | None = None, fusion_type: int = 1,
        group: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(auto_prefix=False)
        check_group(group)
        self.mean = context.gradients_mean() if mean is None else mean
        degree = context.device_num() if degree is None else degree
        if isinstance(degree, bool) or not isinstance(degree, int) or degree <= 0:
            raise ValueError(f"degree of DistributedGradReducer must be a number of at least 1, not {degree!r}")
        self.factor = world.size() / degree if self.mean else float(world.size())
        self.scales = self.factor != 1.0
        self.reducer = KungFuGradReducer(tuple(parameters))
        self.map = composite.HyperMap()
        _note()

    def construct(self, grads):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        grads = self.reducer(grads)
        if self.scales:
            grads = self.map(ops.partial(_times, self.factor), grads)
        return grads


_SHAPE = "the result's shape depends on the number of ranks, but a worker does the work of several ranks"
_TO_ONE = "it connects two ranks, but one worker may do the work of both"
REFUSED_PRIMITIVES = {
    "AllGather": _SHAPE,
    "ReduceScatter": _SHAPE,
    "AlltoAll": _SHAPE,
    "AlltoAllV": _SHAPE,
    "AlltoAllVC": _SHAPE,
    "AllGatherV": _SHAPE,
    "ReduceScatterV": _SHAPE,
    "NeighborExchange": _TO_ONE,
    "NeighborExchangeV2": _TO_ONE,
    "CollectiveScatter": _SHAPE,
    "CollectiveGather": _SHAPE,
    "Reduce": _TO_ONE,
    "Send": _TO_ONE,
    "Receive": _TO_ONE,
    "BatchISendIRecv": _TO_ONE,
    "Barrier": "workers wait for each other in every step; outside of graphs there is comm_func.barrier",
}


def all_reduce(tensor: Any, op: str = "sum", group: str | None = None, async_op: bool = False) -> Any:
    """``comm_func.all_reduce``: return the result and None, because there is no handle."""
    if async_op:
        raise refused("all_reduce(async_op=True)", "the operation is complete when the call returns; omit async_op")
    return AllReduce(op, group)(tensor), None


def broadcast(tensor: Any, src: int = 0, group: str | None = None) -> Any:
    """``comm_func.broadcast``: return the value of the worker that does the work of the virtual rank `src`."""
    return Broadcast(src, group)(tensor)


def barrier(group: str | None = None) -> None:
    """``comm_func.barrier``: wait for all workers that take part in training."""
    check_group(group)
    if world.takes_part():
        from ms_kungfu import runtime

        runtime.run_barrier()


def refused_functions(module: Any) -> dict[str, Any]:
    """Return a replacement for each unsupported function of ``comm_func``. The replacement raises an error."""
    return {
        name: refusing(f"comm_func.{name}", "only all_reduce, broadcast and barrier are supported")
        for name in module.__all__
        if name not in ("all_reduce", "broadcast", "barrier")
    }
