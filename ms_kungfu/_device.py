"""Open the device layer (`ops_src/include/kungfu/device.h`), and select the vendor libraries that it loads."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from dataclasses import dataclass

from . import _core, env
from .devices.libraries import ACL, CUDA_RUNTIMES, HCCL, NCCL, Library, candidates


@dataclass(frozen=True)
class _Kind:
    number: int  # value of kf_device_kind
    runtimes: tuple[Library, ...]  # in the order in which they are tried
    engine: Library


_KINDS = {"GPU": _Kind(0, CUDA_RUNTIMES, NCCL), "Ascend": _Kind(1, (ACL,), HCCL)}
TARGETS = ("CPU", *_KINDS)
ENGINES = ("auto", "vendor", "staging")  # in the order of kf_engine


def check_target(device: str) -> str:
    """Return MindSpore's spelling of a device target; raise ValueError if it is unknown."""
    for target in TARGETS:
        if isinstance(device, str) and device.upper() == target.upper():
            return target
    raise ValueError(f"device must be one of {', '.join(TARGETS)}, not {device!r}")


def _is_loaded(path: str) -> bool:
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    except OSError:
        return False
    return True


def _paths(libraries: Iterable[Library]) -> str:
    # Libraries that the process has already loaded come first. MindSpore may have loaded a copy of the CUDA runtime,
    # and a second copy would have its own current device.
    found = dict.fromkeys(path for library in libraries for path in candidates(library))
    return ":".join(sorted(found, key=lambda path: not _is_loaded(path)))


def open_device(target: str) -> None:
    """Open the vendor's libraries for `target` (``"GPU"`` or ``"Ascend"``). Idempotent.

    Raises:
        ImportError: if a library is missing (the message names it), or if there is no device.
        DeviceError: if the vendor's library rejects a call.
    """
    kind = _KINDS[target]
    _core.device_open(
        kind.number,
        env.DEVICE_RUNTIME_LIBRARY.get() or _paths(kind.runtimes),
        env.DEVICE_ENGINE_LIBRARY.get() or _paths([kind.engine]),
        ENGINES.index(env.DEVICE_ENGINE.get()),
        env.DEVICE_CHUNK_BYTES.get(),
        env.COLLECTIVE_TIMEOUT.get(),
    )


def engine_in_use() -> str:
    """Return the name of the engine of the last collective between devices, e.g. ``NCCL 2.21.5``.

    The text also contains the reason for the choice of this engine.
    """
    return str(_core.device_engine())
