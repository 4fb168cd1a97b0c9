"""Measure how much memory this host has left, and how much a process uses."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

from ms_kungfu._processes import descendants

# For each cgroup version: the files with the limit and the usage, and the field for reclaimable memory in memory.stat.
_CGROUP_2 = "memory.max", "memory.current", "inactive_file"
_CGROUP_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many more bytes of memory the machine and the cgroups of this process allow.

    Returns infinity if the amount is unknown.
    """
    left = []
    with contextlib.suppress(OSError, ValueError):
        left.append(_kilobytes("MemAvailable", (proc / "meminfo").read_text()))
    for folder, names in _memory_cgroups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):  # without a limit, the file contains "max" or doesn't exist
            limit, used = (int((folder / name).read_text()) for name in names[:2])
            cached = re.search(rf"^{names[2]} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            left.append(limit - used + int(cached[1] if cached else 0))
    return min(left, default=math.inf)


def _memory_cgroups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yield the memory cgroups of this process and their ancestors.

    In a container, the path in /proc/self/cgroup may be a path on the host, and the container's own cgroup may be the
    root of the mounted file system.
    """
    lines: list[str] = []
    with contextlib.suppress(OSError):
        lines = (proc / "self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            root, names = cgroups, _CGROUP_2
        elif "memory" in controllers.split(","):
            root, names = cgroups / "memory", _CGROUP_1
        else:
            continue
        folder = root / path.lstrip("/")
        for each in (folder, *folder.parents):
            if each.is_relative_to(root):
                yield each, names


def taken_bytes(pid: int, proc: Path = Path("/proc")) -> int:
    """Return how many more bytes another process like `pid`, with its descendants, would use.

    Only private pages count, not libraries and shared memory. Return 0 if the process has ended.
    """
    taken = 0
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, ValueError):
            taken += _kilobytes("RssAnon", (proc / str(each) / "status").read_text())
    return taken


def resident_bytes(pid: int, proc: Path = Path("/proc")) -> int | None:
    """Return the resident memory of a process in bytes, with libraries and shared memory.

    Return None if the process has ended.
    """
    try:
        return _kilobytes("VmRSS", (proc / str(pid) / "status").read_text())
    except (OSError, ValueError):
        return None


def _kilobytes(name: str, text: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise ValueError(name)
    return int(found[1]) * 1024
