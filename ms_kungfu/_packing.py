"""Encode arrays and plain objects as bytes, without pickle, so that decoding received data can't run code."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_ARRAY = 1  # the msgpack extension type for arrays


def layout_of(array: NDArray[Any]) -> str:
    """Return an array's dtype and shape as a string. Raise TypeError if the array contains Python objects."""
    if array.dtype.hasobject:
        raise TypeError(f"an array of {array.dtype} can't be shared")
    return f"{array.dtype.name if array.dtype.name == 'bfloat16' else array.dtype.str} {json.dumps(array.shape)}"


def dtype_of(kind: str) -> Any:
    """Return the dtype with the name `kind`, which is the first word of a layout string."""
    if kind != "bfloat16":
        return np.dtype(kind)
    try:  # NumPy has no bfloat16. A program that has encoded a bfloat16 array has one of these two packages.
        return np.dtype(import_module("ml_dtypes").bfloat16)
    except ImportError:
        return np.dtype(import_module("mindspore.common.np_dtype").bfloat16)


def encode(value: Any) -> bytes:
    """Return the msgpack encoding of None, a number, str, bytes, a NumPy array, or a list or dict of these.

    Raise TypeError for any other type, and OverflowError for an integer of more than 64 bits.
    """
    from msgspec import msgpack

    return msgpack.encode(value, enc_hook=_extension)


def decode(content: bytes) -> Any:
    """Decode the result of `encode`. Tuples and sets become lists. The decoded arrays are writable."""
    from msgspec import msgpack

    return msgpack.decode(content, ext_hook=_array)


def _extension(value: Any) -> Any:
    from msgspec import msgpack

    if isinstance(value, np.generic) and value.dtype.char in "?bBhHiIlLqQefd":
        return value.item()
    if isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray) and value.dtype.names is None:
        return msgpack.Ext(_ARRAY, layout_of(value).encode() + b"\n" + value.tobytes())
    raise TypeError(
        f"{type(value).__name__} can't be sent; only None, numbers, str, bytes, lists, dicts and NumPy arrays can; "
        "convert it first, for example a Tensor with asnumpy()"
    )


def _array(code: int, content: memoryview) -> NDArray[Any]:
    layout, _, data = bytes(content).partition(b"\n")
    kind, _, shape = layout.decode().partition(" ")
    return np.frombuffer(bytearray(data), dtype_of(kind)).reshape(json.loads(shape))
