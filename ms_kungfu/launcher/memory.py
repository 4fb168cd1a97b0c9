"""How much memory this host has left, and what a process uses of it."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator
from pathlib import Path

from ms_kungfu._processes import descendants

# Limit, use, and the part of the use in pages that the kernel reclaims, by version of the interface.
_CGROUP_2 = "memory.max", "memory.current", "inactive_file"
_CGROUP_1 = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def free_bytes(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how much more processes may use: of the machine, and of the cgroups of this process.

    Infinite if not known.
    """
    left = []
    with contextlib.suppress(OSError, ValueError):
        left.append(_kilobytes("MemAvailable", (proc / "meminfo").read_text()))
    for folder, names in _memory_cgroups(proc, cgroups):
        with contextlib.suppress(OSError, ValueError):  # no limit is "max", or there is no such file
            limit, used = (int((folder / name).read_text()) for name in names[:2])
            cached = re.search(rf"^{names[2]} (\d+)$", (folder / "memory.stat").read_text(), re.MULTILINE)
            left.append(limit - used + int(cached[1] if cached else 0))
    return min(left, default=math.inf)


def _memory_cgroups(proc: Path, cgroups: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Return the cgroups and those above.

    In a container the path may be the host's, and its own one the mount's root.
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
    """Return what another process like this one would use, with those below it; 0 if it has ended.

    It counts the pages of its own, without libraries and shared memory.
    """
    taken = 0
    for each in (pid, *descendants(pid)):
        with contextlib.suppress(OSError, ValueError):
            taken += _kilobytes("RssAnon", (proc / str(each) / "status").read_text())
    return taken


def _kilobytes(name: str, text: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise ValueError(name)
    return int(found[1]) * 1024
