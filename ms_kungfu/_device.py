"""Opening the device layer (`ops_src/include/kungfu/device.h`), and which of the vendors' libraries it is to take."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from . import _core, env


@dataclass(frozen=True)
class _Library:
    """`names`: as the loader knows it, the newest first; `package`: the Python package that may bring it."""

    names: tuple[str, ...]
    package: str | None = None


@dataclass(frozen=True)
class _Kind:
    number: int  # a kf_device_kind
    runtime: _Library
    engine: _Library


_KINDS = {
    "GPU": _Kind(
        0,
        _Library(("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0", "libcudart.so"), "nvidia.cuda_runtime"),
        _Library(("libnccl.so.2", "libnccl.so"), "nvidia.nccl"),
    ),
    "Ascend": _Kind(1, _Library(("libascendcl.so",)), _Library(("libhccl.so",))),
}
TARGETS = ("CPU", *_KINDS)
ENGINES = ("auto", "vendor", "staging")  # in the order of kf_engine


def check_target(device: str) -> str:
    """MindSpore's spelling of a device target; ValueError for another one."""
    for target in TARGETS:
        if isinstance(device, str) and device.upper() == target.upper():
            return target
    raise ValueError(f"device must be one of {', '.join(TARGETS)}, not {device!r}")


def _candidates(library: _Library) -> str:
    # What the process has loaded already comes first: a second CUDA runtime beside MindSpore's would have another idea
    # of which device is current.
    loaded, other = [], []
    for name in library.names:
        try:
            ctypes.CDLL(name, mode=os.RTLD_NOLOAD)
            loaded.append(name)
        except OSError:
            other.append(name)
    wheel: list[str] = []
    try:
        spec = find_spec(library.package) if library.package else None
    except ModuleNotFoundError:
        spec = None
    for folder in spec.submodule_search_locations or () if spec else ():
        wheel += [str(path) for path in sorted(Path(folder, "lib").glob(library.names[-1] + "*"))]
    return ":".join([*loaded, *other, *wheel])


def open_device(target: str) -> None:
    """Open the vendor's libraries for `target` (``"GPU"`` or ``"Ascend"``). Idempotent.

    Raises:
        ImportError: with the name of the library that is missing, or where there is no device.
        DeviceError: where the vendor's library refuses.
    """
    kind = _KINDS[target]
    _core.device_open(
        kind.number,
        env.DEVICE_RUNTIME_LIBRARY.get() or _candidates(kind.runtime),
        env.DEVICE_ENGINE_LIBRARY.get() or _candidates(kind.engine),
        ENGINES.index(env.DEVICE_ENGINE.get()),
        env.DEVICE_CHUNK_BYTES.get(),
        env.COLLECTIVE_TIMEOUT.get(),
    )


def engine_in_use() -> str:
    """What the collectives between devices went through last, and why, e.g. ``NCCL 2.21.5``; for people."""
    return str(_core.device_engine())
