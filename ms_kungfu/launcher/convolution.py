"""Print how many milliseconds oneDNN needs for a small convolution.

`cpu_isa` starts this program, with the path of MindSpore's libdnnl.so as its argument. The program imports neither
MindSpore nor ms_kungfu, because each import takes seconds. It prepares the convolution at each launch, as MindSpore's
kernel does.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import time

LIMIT_S = 5
_LONG_ENOUGH_S = 0.5
_LAUNCHES = 4
# Constants from dnnl_types.h of oneDNN 3.
_CPU, _IN_ORDER, _FORWARD, _DIRECT, _F32, _ABCD = 1, 1, 64, 1, 3, 5
_SOURCE, _WEIGHTS, _RESULT = 1, 33, 17
_SHAPES = {_SOURCE: (16, 64, 14, 14), _WEIGHTS: (64, 64, 3, 3), _RESULT: (16, 64, 12, 12)}


class _Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_int)]


class _Argument(ctypes.Structure):
    _fields_ = [("number", ctypes.c_int), ("memory", ctypes.c_void_p)]


def _sizes(*sizes: int) -> ctypes.Array[ctypes.c_int64]:
    return (ctypes.c_int64 * 12)(*sizes)


def milliseconds(path: str) -> float:
    """Return the time of the fastest launch, in milliseconds.

    Raises OSError or RuntimeError if the library can't be loaded or reports an error.
    """
    library = ctypes.CDLL(path)

    def make(name: str, *arguments: object) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        check(getattr(library, f"dnnl_{name}")(ctypes.byref(made), *arguments))
        return made

    def check(status: int) -> None:
        if status:
            raise RuntimeError(f"oneDNN returned status {status}")

    library.dnnl_version.restype = ctypes.POINTER(_Version)
    library.dnnl_memory_desc_get_size.restype = ctypes.c_size_t
    major = library.dnnl_version().contents.major
    if major != 3:
        raise RuntimeError(f"oneDNN has major version {major}; only 3 is supported")
    engine = make("engine_create", _CPU, ctypes.c_size_t(0))
    stream = make("stream_create", engine, _IN_ORDER)
    shapes = {
        number: make("memory_desc_create_with_tag", len(shape), _sizes(*shape), _F32, _ABCD)
        for number, shape in _SHAPES.items()
    }
    described = make(
        "convolution_forward_primitive_desc_create", engine, _FORWARD, _DIRECT, shapes[_SOURCE], shapes[_WEIGHTS], None,
        shapes[_RESULT], _sizes(1, 1), _sizes(), _sizes(), _sizes(), None,
    )  # fmt: skip
    convolution = make("primitive_create", described)
    buffers = {n: ctypes.create_string_buffer(library.dnnl_memory_desc_get_size(shape)) for n, shape in shapes.items()}
    arguments = (_Argument * 3)(
        *(_Argument(n, make("memory_create", shapes[n], engine, buffer)) for n, buffer in buffers.items())
    )
    took: list[float] = []
    while len(took) < _LAUNCHES and sum(took) < _LONG_ENOUGH_S:
        begin = time.perf_counter()
        check(library.dnnl_primitive_execute(convolution, stream, 3, arguments))
        check(library.dnnl_stream_wait(stream))
        took.append(time.perf_counter() - begin)
    return min(took) * 1e3


if __name__ == "__main__":
    signal.alarm(LIMIT_S)  # ends this process even if the launcher is killed
    print(milliseconds(sys.argv[1]))
