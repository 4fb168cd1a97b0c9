"""Encode tensors, arrays and plain values as JSON, and decode them.

The decoded values equal the originals exactly. Decoding runs no code from the data.
"""

from __future__ import annotations

import base64
from typing import Any

import mindspore as ms
import numpy as np

_ARRAY = "array"  # keys that mark values of types that JSON lacks
_TUPLE = "tuple"
_DICT = "dict"


def pack(value: Any) -> Any:
    """Return `value` in a form that can be written as JSON.

    Raises:
        TypeError: `value` is or contains an object that isn't data, such as a function, a cell or a lock.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, tuple):
        return {_TUPLE: [pack(item) for item in value]}
    if isinstance(value, dict):  # encoded as pairs, because JSON's keys must be strings
        return {_DICT: [[pack(key), pack(item)] for key, item in value.items()]}
    if isinstance(value, ms.Tensor):
        kind = "parameter" if isinstance(value, ms.Parameter) else "tensor"
        # NumPy has no bfloat16, but float32 can represent all of its values.
        array = value.astype(ms.float32).asnumpy() if value.dtype == ms.bfloat16 else value.asnumpy()
        told = {"dtype": str(value.dtype), "name": value.name if kind == "parameter" else ""}
    elif isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        kind, array, told = "numpy" if isinstance(value, np.ndarray) else "scalar", np.asarray(value), {}
    else:
        raise TypeError(f"a {type(value).__name__} can't be sent to another worker")
    content = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {_ARRAY: kind, "type": array.dtype.str, "shape": array.shape, "content": content, **told}


def unpack(packed: Any) -> Any:
    """Return the value that :func:`pack` has encoded."""
    if isinstance(packed, list):
        return [unpack(item) for item in packed]
    if not isinstance(packed, dict):
        return packed
    if _TUPLE in packed:
        return tuple(unpack(item) for item in packed[_TUPLE])
    if _DICT in packed:
        return {unpack(key): unpack(item) for key, item in packed[_DICT]}
    flat = np.frombuffer(base64.b64decode(packed["content"]), packed["type"])
    array = flat.reshape(packed["shape"]).copy()
    kind = packed[_ARRAY]
    if kind == "scalar":
        return array[()]
    if kind == "numpy":
        return array
    tensor = ms.Tensor(array, dtype=getattr(ms, packed["dtype"].lower()))
    return ms.Parameter(tensor, name=packed["name"]) if kind == "parameter" else tensor
