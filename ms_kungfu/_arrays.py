"""Check arrays, and convert them for the runtime's collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # importing numpy.typing takes a tenth as long as importing NumPy
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[Any]
else:
    Array = np.ndarray

#: The ``op`` of a reduction -> its number in the C ABI. The ``mean`` of integers is rounded towards zero.
OPS = {"sum": 0, "mean": 1, "min": 2, "max": 3, "prod": 4}
UINT8, _BFLOAT16 = 1, 9
# NumPy's type characters of the dtypes that the buffer protocol can describe and that the runtime can reduce.
_NUMBERS = frozenset("bBhHiIlLqQefd")


def number_of_op(op: str) -> int:
    try:
        return OPS[op]
    except KeyError:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {op!r}") from None


def native_input(value: ArrayLike) -> Array:
    """Return the input as a C-contiguous array in native byte order."""
    if type(value) is not np.ndarray:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                "the mask of a masked array would be lost; pass array.filled(...), or its data and its mask as two "
                "arrays"
            )
        value = np.asarray(value)
    if not value.flags.c_contiguous:
        value = np.ascontiguousarray(value)
    if not value.dtype.isnative:
        value = value.astype(value.dtype.newbyteorder("="))
    return value


def reducible(array: Array) -> tuple[Array, int]:
    """Return the array in a form that the buffer protocol supports, and the dtype's number in the C ABI.

    The number is -1 if the buffer protocol can describe the dtype.
    """
    if array.dtype.char in _NUMBERS:
        return array, -1
    if array.dtype.name == "bfloat16":
        return array.view(np.uint16), _BFLOAT16
    raise TypeError(
        f"can't reduce an array of {array.dtype}; supported types: (u)int8 to 64, float16, bfloat16, float32, float64"
    )


def movable(array: Array) -> tuple[Array, int, str]:
    """Prepare an array for an operation that only moves data: return (array, dtype number, layout).

    If the runtime doesn't support the dtype, the array is sent as bytes, and `layout` describes its dtype and shape.
    """
    if array.dtype.char in _NUMBERS or array.dtype.name == "bfloat16":
        return (*reducible(array), "")
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} can't be shared; use `comm.all_gather_object` for objects")
    return array.reshape(-1).view(np.uint8), UINT8, f"{array.dtype}{array.shape} in bytes "


def output_like(array: Array, out: Array | None) -> Array:
    if out is None:
        return np.empty(array.shape, array.dtype)
    if type(out) is not np.ndarray and (not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray)):
        raise TypeError(f"out must be a NumPy array, got {type(out).__name__}")
    if out.dtype != array.dtype or out.shape != array.shape:
        raise ValueError(f"out must be {array.dtype}{array.shape}, got {out.dtype}{out.shape}")
    flags = out.flags
    if not flags.c_contiguous or not flags.writeable:
        raise ValueError(f"out must be C-contiguous and not read-only, got an array with\n{flags}")
    return out
