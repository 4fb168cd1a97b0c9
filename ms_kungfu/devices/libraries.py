"""List where the vendors' libraries for GPUs and Ascend devices may be. This module doesn't open any library.

A location is a library name or a file in a Python package.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Library:
    """A library. `packaged` contains files below site-packages. If none exists, the loader tries `names` in order."""

    what: str
    names: tuple[str, ...]
    packaged: tuple[str, ...] = ()


CUDA_DRIVER = Library("the GPU's driver", ("libcuda.so.1",))
# The oldest version comes first, because MindSpore's GPU plugin is built for CUDA 11, and a process should load only
# one CUDA runtime.
CUDA_RUNTIMES = (
    Library("the CUDA runtime", ("libcudart.so.11.0",), ("nvidia/cuda_runtime/lib/libcudart.so.11.0",)),
    Library("the CUDA runtime", ("libcudart.so.12",), ("nvidia/cuda_runtime/lib/libcudart.so.12",)),
    Library("the CUDA runtime", ("libcudart.so.13", "libcudart.so"), ("nvidia/cu13/lib/libcudart.so.13",)),
)
NCCL = Library(
    "NCCL",
    ("libnccl.so.2", "libnccl.so"),
    (
        "nvidia/nccl/lib/libnccl.so.2",
        "mindspore/lib/plugin/gpu11.6/libnccl.so.2",
        "mindspore/lib/plugin/gpu11.1/libnccl.so.2",
    ),
)
ACL = Library("AscendCL", ("libascendcl.so",))
HCCL = Library("HCCL", ("libhccl.so",))
# The CUDA 11 libraries that MindSpore's own GPU plugin in the x86-64 wheels needs.
MINDSPORE_GPU = tuple(
    Library(name, (name,), (f"nvidia/{folder}/lib/{name}",))
    for name, folder in (
        ("libcudart.so.11.0", "cuda_runtime"),
        ("libcublas.so.11", "cublas"),
        ("libcudnn.so.8", "cudnn"),
        ("libcufft.so.10", "cufft"),
        ("libcurand.so.10", "curand"),
        ("libcusolver.so.11", "cusolver"),
        ("libcusparse.so.11", "cusparse"),
        ("libnvrtc.so.11.2", "cuda_nvrtc"),
    )
)


def candidates(library: Library, folders: Iterable[str] | None = None) -> list[str]:
    """Return the libraries to try, in order.

    Files of Python packages in `folders` come first, followed by names for the loader. By default, `folders` is
    Python's search path.
    """
    searched = list(sys.path if folders is None else folders)
    files = (Path(folder) / file for file in library.packaged for folder in searched)
    return [*dict.fromkeys(str(file) for file in files if file.is_file()), *library.names]
