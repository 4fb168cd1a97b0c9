"""The numeric environment: the settings, besides the program, on which the exact results with shards depend.

Each checkpoint and the header of each ledger file contain the numeric environment. Workers compare their environments
when a worker joins. When a job resumes from a checkpoint or a program is replayed, each value that differs is reported.
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
"""The values that the program sets. Each step's record contains them, because a policy may change the batch."""
_CPU_CHARS = 48  # the ledger's header has a fixed size, which limits the processor's name


def of_machine(cores: int) -> dict[str, Any]:
    """Return the values of the numeric environment that don't depend on the program's arguments, as JSON."""
    import mindspore
    import numpy

    isa = instruction_set(Path(mindspore.__file__).parent / "lib")
    versions = {"ms_kungfu": VERSION, "mindspore": mindspore.__version__, "numpy": numpy.__version__}
    return {**versions, "isa": isa, "cpu": _processor(), "cores": cores}


@cache
def instruction_set(libraries: Path) -> str:
    """Return the widest vector instructions that the oneDNN library in this folder uses: one of `CAPS`.

    oneDNN computes MindSpore's convolutions and matrix products on CPUs. It uses the processor's widest vector
    instructions unless ``ONEDNN_MAX_CPU_ISA`` sets a lower limit. If the folder has no oneDNN, return the instructions
    that this runtime uses to sum gradients.
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
    """Return a text that lists the differing values of the keys in both mappings; empty if no value differs."""
    return ", ".join(
        f"{NAMES.get(key, key)} {first[key]} {at_first} and {second[key]} {at_second}"
        for key in first
        if key in second and first[key] != second[key]
    )
