"""The origin of a result: commit and machine. A machine is described by its cores and CPU only."""

from __future__ import annotations

import os
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

import ms_kungfu
from ms_kungfu import _core
from ms_kungfu.tools.doctor.system import System


def commit() -> str:
    """Return the commit of the current folder's checkout, with a + if files have changed.

    Without a checkout, return the package's version.
    """
    try:
        if (Path(_git("rev-parse", "--show-toplevel")) / "benchmarks").is_dir():
            return _git("describe", "--always", "--dirty=+", "--abbrev=10", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        pass
    return f"v{ms_kungfu.__version__}"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True).stdout.strip()


@lru_cache(maxsize=1)
def facts() -> dict[str, Any]:
    return {
        "machine": {"cores": len(os.sched_getaffinity(0)), "cpu": System().cpu(), "simd": _core.instruction_set()},
        "commit": commit(),
    }


def cache_bytes() -> int:
    """Return the size of the last-level cache, 32 MiB if the system doesn't report it."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = file.read_text().strip()
        if text.endswith("K") and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << 10)
    return max(sizes, default=32 << 20)
