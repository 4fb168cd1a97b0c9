"""The numeric environment of a training with shards: what its bits depend on besides its program.

It is in the header of each of its ledger's files and in its checkpoints. The workers compare it whenever a new one is
among them. A job that resumes, or a replay, reports what is no longer the same.
"""

from __future__ import annotations

import ctypes
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ms_kungfu import _core
from ms_kungfu._cpu_isa import CAPS
from ms_kungfu._version import VERSION

NAMES = {
    "ms_kungfu": "ms_kungfu",
    "mindspore": "MindSpore",
    "numpy": "NumPy",
    "isa": "instruction set",
    "cpu": "processor",
    "cores": "cores a worker",
    "shards": "shards",
    "global_batch": "global batch",
    "seed": "seed",
}
ARGUMENTS = ("shards", "global_batch", "seed")
"""The program's arguments among them, which each step records as well, since a policy may change the batch."""
_CPU_CHARS = 48  # limit of the space in the ledger's header


def of_machine(cores: int) -> dict[str, Any]:
    """Return those that don't depend on the program's arguments; JSON."""
    import mindspore
    import numpy

    isa = instruction_set(Path(mindspore.__file__).parent / "lib")
    versions = {"ms_kungfu": VERSION, "mindspore": mindspore.__version__, "numpy": numpy.__version__}
    return {**versions, "isa": isa, "cpu": _processor(), "cores": cores}


@cache
def instruction_set(libraries: Path) -> str:
    """Return the widest vector units that the oneDNN in this folder uses; one of `CAPS`.

    It computes MindSpore's convolutions and products on CPUs, with what the processor has, or with
    ``ONEDNN_MAX_CPU_ISA`` if that is less. Without such a library return what the runtime itself uses to add up
    gradients.
    """
    for library in sorted(libraries.glob("libdnnl.so*")):
        with suppress(OSError, AttributeError):
            found = ctypes.CDLL(str(library)).dnnl_get_effective_cpu_isa()
            return CAPS.get(found, hex(found))
    return _core.instruction_set()


@cache
def _processor() -> str:
    with suppress(OSError):
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if found:
            return found[1][:_CPU_CHARS]
    return platform.machine()


def differences(
    first: Mapping[str, Any], second: Mapping[str, Any], at_first: str = "there", at_second: str = "here"
) -> str:
    """Return in words what both have and isn't the same; empty without a difference."""
    return ", ".join(
        f"{NAMES.get(key, key)} {first[key]} {at_first} and {second[key]} {at_second}"
        for key in first
        if key in second and first[key] != second[key]
    )
