"""The common part of the collectives' primitives."""

from __future__ import annotations

import sys
from typing import Any

from mindspore import dtype as mstype
from mindspore.ops import PrimitiveWithInfer

from ms_kungfu import membership, runtime
from ms_kungfu.fusion._mindspore import mode_of
from ms_kungfu.fusion.mode import MB
from ms_kungfu.ops import _plugin, _reparse

# Collectives without a name share one channel, matched by the order of the calls. A counter in each primitive's name
# would do harm: a joining worker creates its primitives in another order, and in another number, than the others did.
UNNAMED = "unnamed"

_DTYPES = (
    mstype.float16, mstype.bfloat16, mstype.float32, mstype.float64,
    mstype.int8, mstype.int16, mstype.int32, mstype.int64,
    mstype.uint8, mstype.uint16, mstype.uint32, mstype.uint64,
)  # fmt: skip


def element(dtype: Any) -> Any:
    """Return the dtype of the elements of a tensor's type."""
    return dtype.element_type() if isinstance(dtype, mstype.TensorType) else dtype


def is_undetermined(dtype: Any) -> bool:
    """Return whether the compiler doesn't know the type yet, as of gradients if one of them is sparse."""
    return isinstance(dtype, type(mstype.undetermined))


def placeholders(count: int) -> tuple[Any, Any]:
    """Return shapes and dtypes of so many tensors, for the compiler while it doesn't know the types.

    It takes no unknown type from Python, and comes again when it knows them.
    """
    return ((1,),) * count, (mstype.TensorType(mstype.float32),) * count


def check_root(root: int) -> int:
    """Check that `root` can be a rank, and return it.

    Whether it is one of the cluster's is known at the time of the call.
    """
    if isinstance(root, bool) or not isinstance(root, int):
        raise TypeError(f"root must be a rank, not {root!r}")
    if not 0 <= root < 2**32:
        raise ValueError(f"root must be a rank of at least 0, not {root}")
    return root


class Primitive(PrimitiveWithInfer):
    """A primitive with a kernel in the plugin; its attributes are fixed at creation.

    `init_attrs` are the arguments that make an equal one, for MindSpore to copy it. They are the kernel's attributes,
    and by ``add_prim_attr`` Python's, too.

    It has a side effect for the compiler: equal calls are neither merged nor constants, and one whose result isn't used
    still runs. All of them run in the order of the program, at every step and at every rank.
    """

    _talks = True  # communicates with other workers

    def __init__(self, kernel: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        _plugin.load()
        if self._talks:  # otherwise a program that never calls init() would train in a cluster of one
            runtime.init()
        super().__init__(kernel)
        self.init_attrs = attributes
        self.init_prim_io_names(inputs=inputs, outputs=outputs)
        for name, value in attributes.items():
            self.add_prim_attr(name, value)
        # Puts the calls of a graph into a chain. Without it equal calls are merged, and the order of independent ones
        # differs between the first step and later ones. Then a joining worker and the others would wait for each other.
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

        It raises TypeError or ValueError for inputs that don't fit.
        """
        raise NotImplementedError


class Collective(Primitive):
    """A collective that takes one tensor or a tuple of tensors, and returns as many.

    With `copies` nothing is computed, and any dtype is allowed: a Parameter may be of bool, or complex.
    """

    copies = False
    """Whether the primitive only moves data, and so takes every dtype."""
    _takes_sparse = False
    """Whether callers make sparse gradients dense before (`_sparse.SparseReduction`)."""
    _made = False
    """Whether this process has made any that computes."""

    def __init__(self, kernel: str, name: str | None, **attributes: Any) -> None:
        super().__init__(kernel, ["x"], ["y"], **attributes)
        Collective._made |= not self.copies
        self.init_attrs = {"name": name, **attributes}
        if name is not None and (not isinstance(name, str) or not name):
            raise TypeError(f"name must be a text that isn't empty, or None, not {name!r}")
        self.add_prim_attr("channel", name or UNNAMED)
        # The collectives in the gradient make a chain of their own.
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
                f"{self.name} can't take a sparse gradient (RowTensor); KungFuGradReducer and the optimizers of "
                "ms_kungfu.optimizers that average gradients take it"
            )
        if not self.copies and element(dtype) not in _DTYPES:
            raise TypeError(
                f"{self.name} can't take a tensor of {element(dtype)}; supported are float16, bfloat16, float32, "
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

    `kind` is its name in MindSpore's ``comm_fusion``. When the primitive is made, that sets the size of the operations
    into which a tuple is divided.
    """

    def __init__(self, kernel: str, name: str | None, kind: str, **attributes: Any) -> None:
        super().__init__(kernel, name, **attributes)
        self.add_prim_attr("fusion_bytes", min(mode_of(kind=kind).limit_mb * MB, 2**62))

    def __call__(self, *args: Any) -> Any:
        membership.join()  # a process that hasn't yet knows the size only now
        # Outside a graph MindSpore keeps what it inferred and built for a primitive by its attributes. With the size as
        # one of them a call after a resize is built again. Within a compiled graph the kernel finds it out.
        self.add_prim_attr("cluster_size", runtime.current_cluster_size())
        return super().__call__(*args)
