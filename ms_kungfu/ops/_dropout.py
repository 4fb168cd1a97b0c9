"""The primitive of `ms_kungfu.nn.Dropout`. Its mask depends on the shard, or on the process if there are no shards."""

from __future__ import annotations

import functools
import secrets
from typing import Any, Callable

import mindspore as ms
from mindspore import dtype as mstype
from mindspore.ops import PrimitiveWithInfer
from mindspore.ops._grad_experimental.grad_base import bprop_getters

from ms_kungfu import membership
from ms_kungfu.ops._base import Primitive, element

_FLOATS = (mstype.float16, mstype.bfloat16, mstype.float32, mstype.float64)
_BOOL = mstype.TensorType(mstype.bool_)


@functools.cache
def _seed_of_process() -> int:
    return secrets.randbits(63)


class Dropout(Primitive):
    """Return the input without the dropped elements, and the mask, which is true for elements that are kept.

    While a shard is computed, the mask depends on the dataset's seed, the step, the shard, and the number of masks that
    were already generated for this shard. Outside of shards, the mask depends on `seed`, `rank`, and the number of
    masks that the process has already generated.
    """

    _talks = False

    def __init__(self, threshold: int, seed: int, rank: int) -> None:
        super().__init__("KungFuDropout", ["x"], ["y", "mask"], threshold=threshold, seed=seed, rank=rank)
        self.add_prim_attr("recompute", False)  # recomputing would generate a different mask

    @classmethod
    def of(cls, p: float) -> Dropout:
        """Create a primitive that drops each element with probability `p`, rounded to 32 bits.

        The mask depends on the current global seed and this worker's rank. A process that hasn't joined yet uses the
        rank for which it was started, so that it needn't wait to create a layer.
        """
        seed = ms.get_seed()
        return cls(min(round(p * 2**32), 2**32 - 1), _seed_of_process() if seed is None else seed, membership.rank())

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        shape, dtype = inputs[0]["shape"], inputs[0]["dtype"]
        if element(dtype) not in _FLOATS:
            raise TypeError(f"Dropout supports float16, bfloat16, float32 or float64, not a tensor of {element(dtype)}")
        return (shape, shape), (dtype, _BOOL)


class DropoutGrad(PrimitiveWithInfer):
    """Return the gradient of Dropout's input, given the gradient of its first output and the mask.

    The primitive has no side effect, so MindSpore removes it if its result isn't used.
    """

    def __init__(self, threshold: int) -> None:
        super().__init__("KungFuDropoutGrad")
        self.init_attrs = {"threshold": threshold}
        self.init_prim_io_names(inputs=["dy", "mask"], outputs=["dx"])
        self.add_prim_attr("threshold", threshold)

    def __infer__(self, dy: dict[str, Any], mask: dict[str, Any]) -> dict[str, Any]:
        return {"shape": dy["shape"], "dtype": dy["dtype"], "value": None}


@bprop_getters.register(Dropout)
def _of_dropout(self: Dropout) -> Callable[..., tuple[Any]]:
    grad = DropoutGrad(self.threshold)

    def bprop(x: Any, out: Any, dout: Any) -> tuple[Any]:
        return (grad(dout[0], out[1]),)

    return bprop
