"""Load the kernels into MindSpore. No other file loads them.

The kernels are in plugins. A plugin works with exactly one version of MindSpore, and would silently compute wrong
results with another. The package may contain plugins for several versions, each in a folder with the version's name.
This module loads the plugin for the running MindSpore, and then checks the plugin's MindSpore version again.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path

import mindspore

from ms_kungfu import _core, _device
from ms_kungfu._installation import is_of_a_wheel, reinstall

_FILES = {"CPU": "libkungfu_ms_cpu.so", "GPU": "libkungfu_ms_gpu.so", "Ascend": "libkungfu_ms_ascend.so"}
# For each plugin: the software that must be installed so that the build includes the plugin.
_NEEDS = {
    "CPU": "MindSpore",
    "GPU": "CUDA's headers (the toolkit, or nvidia-cuda-runtime-cu12, nvidia-cuda-nvcc-cu12 and nvidia-cuda-cccl-cu12)",
    "Ascend": "a MindSpore package with the Ascend plugin",
}
_PLUGINS = Path(_core.__file__).with_name("plugins")


def folder_for(running: str, plugins: Path) -> Path:
    """Return the folder in `plugins` for the MindSpore version `running`. Raise ImportError if there is none."""
    if (plugins / running).is_dir():
        return plugins / running
    built = sorted((path.name for path in plugins.glob("*")), key=lambda name: [*map(int, re.findall(r"\d+", name))])
    if not built:
        why = "ms_kungfu was built without MindSpore, so its kernels were left out"
        if is_of_a_wheel():
            why = "the kernels of ms_kungfu are missing: the installation is damaged"
        raise ImportError(f"{why}; {reinstall()}")
    raise _built_for_another(", ".join(built), running, built[-1])


def check_version(built_for: str, running: str) -> None:
    """Raise ImportError unless the plugin was built for the MindSpore that is running."""
    if built_for != running:
        raise _built_for_another(built_for, running, built_for)


def _built_for_another(built_for: str, running: str, newest: str) -> ImportError:
    other = (
        f"install a wheel of ms_kungfu for {running}" if is_of_a_wheel() else f"{reinstall()}, which builds them again"
    )
    return ImportError(
        f"the kernels of ms_kungfu were built for MindSpore {built_for}, but MindSpore {running} is running; run "
        f'`python -m pip install "mindspore=={newest}"`, or {other}'
    )


# Check here, so that a program gets the error when it first imports a part of this package that needs MindSpore.
folder_for(mindspore.__version__, _PLUGINS)


@functools.cache
def _load(device: str) -> ctypes.CDLL:
    if device not in _FILES:
        raise ValueError(f'device_target must be one of {", ".join(_FILES)}, not "{device}"')
    path = folder_for(mindspore.__version__, _PLUGINS) / _FILES[device]
    if not path.exists():
        why = f"the build did not find {_NEEDS[device]}"
        if is_of_a_wheel():
            why = "the installation is damaged, or the wheel was built without them"
        raise ImportError(
            f'{path.name}, the kernels of ms_kungfu for device_target "{device}", is missing: {why}; {reinstall()}'
        )
    if device != "CPU":
        _device.open_device(device)  # the plugin needs the device's libraries
    try:
        # RTLD_LOCAL is enough: the plugin links MindSpore's libraries, which are already loaded, and registers itself.
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"the kernels of ms_kungfu can't be loaded from {path}: {error}; {reinstall()}") from error
    library.kungfu_ms_version.restype = ctypes.c_char_p
    check_version(library.kungfu_ms_version().decode(), mindspore.__version__)
    return library


def load() -> ctypes.CDLL:
    """Load the library with the kernels for MindSpore's device_target, if it isn't loaded.

    The library also exports the C functions of ms_kungfu's runtime.

    Raises ImportError if the kernels are missing, if they were built for another MindSpore version, or if a vendor's
    library is missing. Raises ValueError if ms_kungfu has no kernels for the device.
    """
    return _load(mindspore.get_context("device_target"))


def compute_undivided() -> None:
    """Keep MindSpore's CPU kernels from dividing their work among pool threads from now on.

    Some kernels measure in their first launches which division is fastest, but the division affects the last bits of
    the result. See kernels/cpu/undivided.h.

    Raises RuntimeError if MindSpore has no such thread pool.
    """
    if load().kungfu_ms_compute_undivided() != 0:
        raise RuntimeError("this MindSpore has no thread pool whose size can be set")


def flush_denormals_of_queues() -> None:
    """Make the threads of PyNative mode's queues treat denormals as zero. Wait until the queues are empty.

    See kernels/cpu/denormals.h.

    Raises RuntimeError if a queued operation has failed. The next wait for the queues raises the original error.
    """
    if load().kungfu_ms_flush_denormals_of_queues() != 0:
        raise RuntimeError("an operation in PyNative mode's queue failed")
