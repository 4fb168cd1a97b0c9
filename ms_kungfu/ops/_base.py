"""Base classes of the collectives' primitives."""

from __future__ import annotations

import sys
from typing import Any

from mindspore import dtype as mstype
from mindspore.ops import PrimitiveWithInfer

from ms_kungfu import membership, runtime
from ms_kungfu.fusion._mindspore import mode_of
from ms_kungfu.fusion.mode import MB
from ms_kungfu.ops import _plugin, _reparse

# Collectives without a name share one channel, where they are matched by the order of the calls. Don't derive a name
# by counting primitives: a joining worker creates another number of primitives than the others, in another order.
UNNAMED = "unnamed"

_DTYPES = (
    mstype.float16, mstype.bfloat16, mstype.float32, mstype.float64,
    mstype.int8, mstype.int16, mstype.int32, mstype.int64,
    mstype.uint8, mstype.uint16, mstype.uint32, mstype.uint64,
)  # fmt: skip


def element(dtype: Any) -> Any:
    """Return the element dtype of a tensor type."""
    return dtype.element_type() if isinstance(dtype, mstype.TensorType) else dtype


def is_undetermined(dtype: Any) -> bool:
    """Return whether the compiler doesn't know the type yet, as happens if a gradient is sparse."""
    return isinstance(dtype, type(mstype.undetermined))


def placeholders(count: int) -> tuple[Any, Any]:
    """Return placeholder shapes and dtypes for `count` tensors whose types the compiler doesn't know yet.

    The compiler accepts no unknown type from Python. It calls again once it knows the types.
    """
    return ((1,),) * count, (mstype.TensorType(mstype.float32),) * count


def check_root(root: int) -> int:
    """Check that `root` can be a rank, and return it.

    Only a call checks whether the cluster has this rank.
    """
    if isinstance(root, bool) or not isinstance(root, int):
        raise TypeError(f"root must be a rank, not {root!r}")
    if not 0 <= root < 2**32:
        raise ValueError(f"root must be a rank of at least 0, not {root}")
    return root


class Primitive(PrimitiveWithInfer):
    """A primitive with a kernel in the plugin. Its attributes are fixed at creation.

    `init_attrs` are the arguments that create an equal primitive. MindSpore uses them to copy the
    primitive. They are attributes of the kernel and, through ``add_prim_attr``, of the Python object.

    The compiler treats a call as having a side effect: equal calls are neither merged nor
    constant-folded, and a call whose result isn't used still runs. All such calls run in program order,
    at every step and every rank.
    """

    _talks = True  # whether it communicates with other workers

    def __init__(self, kernel: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        _plugin.load()
        if self._talks:  # otherwise a program that never calls init() would train in a cluster of one
            runtime.init()
        super().__init__(kernel)
        self.init_attrs = attributes
        self.init_prim_io_names(inputs=inputs, outputs=outputs)
        for name, value in attributes.items():
            self.add_prim_attr(name, value)
        # Chains the calls of a graph. Otherwise the compiler merges equal calls, and independent calls run in a
        # different order in the first step than in later steps. A joining worker and the other workers would then wait
        # for each other.
        self.add_prim_attr("side_effect_io", True)

    def set_prim_instance_name(self, instance_name: str) -> Any:
        """Set the name of this primitive as an attribute of a cell; MindSpore calls it.

        Args:
            instance_name: the attribute's name.

        Returns:
            What MindSpore's own method returns.
        """
        _reparse.mend_owner(sys._getframe(1))
        return super().set_prim_instance_name(instance_name)

    def __infer__(self, *inputs: dict[str, Any]) -> dict[str, Any]:
        """Infer the outputs; MindSpore calls it with the shape and the dtype of each input."""
        _reparse.refuse()
        shape, dtype = self._outputs(*inputs)
        return {"shape": shape, "dtype": dtype, "value": None}

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the shapes and the dtypes of the outputs.

        Raise TypeError or ValueError for invalid inputs.
        """
        raise NotImplementedError


class Collective(Primitive):
    """A collective that accepts a tensor or a tuple of tensors, and returns the same number of tensors.

    With `copies` nothing is computed, and any dtype is allowed: a Parameter may be bool or complex.
    """

    copies = False
    """Whether the primitive only moves data, and so accepts every dtype."""
    _takes_sparse = False
    """Whether callers convert sparse gradients to dense ones first (`_sparse.SparseReduction`)."""
    _made = False
    """Whether this process has created a reduction, that is, a collective that computes."""

    def __init__(self, kernel: str, name: str | None, **attributes: Any) -> None:
        super().__init__(kernel, ["x"], ["y"], **attributes)
        Collective._made |= not self.copies
        self.init_attrs = {"name": name, **attributes}
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name must be a non-empty string or None, not {name!r}")
        self.add_prim_attr("channel", name or UNNAMED)
        # The collectives in the gradient form a separate chain.
        self.add_prim_attr("side_effect_backprop", True)

    def output_shape(self, shape: list[int]) -> list[int]:
        """Return the shape of the output for one input tensor.

        Args:
            shape: the input's shape.

        Returns:
            The output's shape.
        """
        return shape

    def _check_dtype(self, dtype: Any) -> None:
        if is_undetermined(dtype):
            raise TypeError(
                f"{self.name} doesn't support a sparse gradient (RowTensor); use KungFuGradReducer or an optimizer of "
                "ms_kungfu.optimizers that averages gradients"
            )
        if not self.copies and element(dtype) not in _DTYPES:
            raise TypeError(
                f"{self.name} doesn't support a tensor of {element(dtype)}; supported are float16, bfloat16, float32, "
                "float64 and (u)int8 to (u)int64"
            )

    def _outputs(self, *inputs: dict[str, Any]) -> tuple[Any, Any]:
        shape, dtype = inputs[0]["shape"], inputs[0]["dtype"]
        if isinstance(dtype, (tuple, list)):
            if self._takes_sparse and any(map(is_undetermined, dtype)):
                return placeholders(len(dtype))
            for each in dtype:
                self._check_dtype(each)
            return tuple(self.output_shape(list(each)) for each in shape), dtype
        self._check_dtype(dtype)
        return self.output_shape(list(shape)), dtype


class SizedCollective(Collective):
    """A collective whose output's shape depends on the size of the cluster.

    `kind` is the collective's name in MindSpore's ``comm_fusion``. A tuple is divided into operations
    of limited size. The configuration sets the limit when the primitive is created.
    """

    def __init__(self, kernel: str, name: str | None, kind: str, **attributes: Any) -> None:
        super().__init__(kernel, name, **attributes)
        self.add_prim_attr("fusion_bytes", min(mode_of(kind=kind).limit_mb * MB, 2**62))

    def __call__(self, *args: Any) -> Any:
        membership.join()  # a process that hasn't joined yet doesn't know the size
        # Outside a graph, MindSpore caches what it inferred and built for a primitive by its attributes. The size is
        # an attribute, so a call after a resize is built again. In a compiled graph the kernel detects the difference.
        self.add_prim_attr("cluster_size", runtime.current_cluster_size())
        return super().__call__(*args)
