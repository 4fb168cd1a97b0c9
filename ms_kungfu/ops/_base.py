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

# Collectives without a name share one channel, in which calls are matched by their order. Don't derive names by
# counting primitives: joining workers create a different number of primitives, in a different order.
UNNAMED = "unnamed"

_DTYPES = (
    mstype.float16, mstype.bfloat16, mstype.float32, mstype.float64,
    mstype.int8, mstype.int16, mstype.int32, mstype.int64,
    mstype.uint8, mstype.uint16, mstype.uint32, mstype.uint64,
)  # fmt: skip


def element(dtype: Any) -> Any:
    """Return the dtype of the elements of a tensor type."""
    return dtype.element_type() if isinstance(dtype, mstype.TensorType) else dtype


def is_undetermined(dtype: Any) -> bool:
    """Return whether the compiler doesn't know the type yet, as happens if a gradient is sparse."""
    return isinstance(dtype, type(mstype.undetermined))


def placeholders(count: int) -> tuple[Any, Any]:
    """Return placeholder shapes and dtypes for `count` tensors whose types the compiler doesn't know yet.

    The compiler doesn't accept unknown types from Python. When the compiler knows the types, it infers the shapes
    again.
    """
    return ((1,),) * count, (mstype.TensorType(mstype.float32),) * count


def check_root(root: int) -> int:
    """Check that `root` can be a rank, and return it. The collective checks whether the cluster has this rank."""
    if isinstance(root, bool) or not isinstance(root, int):
        raise TypeError(f"root must be a rank, not {root!r}")
    if not 0 <= root < 2**32:
        raise ValueError(f"root must be a rank of at least 0, not {root}")
    return root


class Primitive(PrimitiveWithInfer):
    """A primitive with a kernel in the plugin. The constructor fixes the primitive's attributes.

    `init_attrs` contains the arguments with which MindSpore creates a copy of the primitive. These
    arguments are also attributes of the kernel and, through ``add_prim_attr``, of the Python
    object.

    The compiler treats a call as having a side effect: equal calls are neither merged nor
    constant-folded, and a call whose result isn't used still runs. All such calls run in program order,
    in every step and on every rank.
    """

    _talks = True  # whether the primitive communicates with other workers

    def __init__(self, kernel: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        _plugin.load()
        if self._talks:  # without this call, each worker would train alone if the program never calls init()
            runtime.init()
        super().__init__(kernel)
        self.init_attrs = attributes
        self.init_prim_io_names(inputs=inputs, outputs=outputs)
        for name, value in attributes.items():
            self.add_prim_attr(name, value)
        # This attribute chains the calls in a graph. Without the attribute, the compiler would merge equal calls, and
        # run independent calls in a different order in the first step than in later steps. A joining worker and the
        # other workers would then wait for each other.
        self.add_prim_attr("side_effect_io", True)

    def set_prim_instance_name(self, instance_name: str) -> Any:
        """Set the name of the cell attribute that holds this primitive.

        MindSpore calls this method.

        Args:
            instance_name: the attribute's name.

        Returns:
            The result of MindSpore's own method.
        """
        _reparse.mend_owner(sys._getframe(1))
        return super().set_prim_instance_name(instance_name)

    def __infer__(self, *inputs: dict[str, Any]) -> dict[str, Any]:
        """Infer the outputs. MindSpore calls this method with the shape and the dtype of each input."""
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

    If `copies` is true, the collective computes nothing, so it allows any dtype, including bool and complex.
    """

    copies = False
    """Whether the primitive only moves data, and so accepts every dtype."""
    _takes_sparse = False
    """Whether callers first convert sparse gradients to dense gradients (`_sparse.SparseReduction`)."""
    _made = False
    """Whether this process has created a reduction."""

    def __init__(self, kernel: str, name: str | None, **attributes: Any) -> None:
        super().__init__(kernel, ["x"], ["y"], **attributes)
        Collective._made |= not self.copies
        self.init_attrs = {"name": name, **attributes}
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name must be a non-empty string or None, not {name!r}")
        self.add_prim_attr("channel", name or UNNAMED)
        # The collectives of the backward pass form a separate chain.
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
                f"{self.name} doesn't support a tensor of {element(dtype)}; supported types: float16, bfloat16, "
                "float32, float64 and (u)int8 to (u)int64"
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

    A tuple of tensors is split over several operations of limited size. When the primitive is
    created, it reads the limit from MindSpore's ``comm_fusion`` entry for the collective `kind`.
    """

    def __init__(self, kernel: str, name: str | None, kind: str, **attributes: Any) -> None:
        super().__init__(kernel, name, **attributes)
        self.add_prim_attr("fusion_bytes", min(mode_of(kind=kind).limit_mb * MB, 2**62))

    def __call__(self, *args: Any) -> Any:
        membership.join()  # a process that hasn't joined yet doesn't know the cluster's size
        # Outside of a graph, MindSpore caches built primitives, and the cache's key contains the attributes. Because
        # the size is an attribute, MindSpore builds the primitive again after a resize. In a compiled graph, the kernel
        # detects that the size has changed.
        self.add_prim_attr("cluster_size", runtime.current_cluster_size())
        return super().__call__(*args)
