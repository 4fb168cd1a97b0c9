"""Determine how many cores the quotas of control groups allow (docker --cpus, or a CPU limit in Kubernetes)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Callable, Optional

Read = Callable[[str], Optional[str]]


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def cpu_quota(read: Read = _read) -> float | None:
    """Return the smallest CPU quota of this process's control group and its ancestors, in cores.

    Return None if there is no quota. `read(path)` returns the text of a file, or None if the file doesn't exist.
    """
    quotas: list[float | None] = []
    for line in (read("/proc/self/cgroup") or "").splitlines():
        _, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        # cgroup v1 lists controllers by name. A container often sees its own group as the root of the file system.
        roots = (f"/{controllers}", "/cpu") if controllers else ("", "/unified")
        parts = [part for part in path.split("/") if part]
        groups = ["/".join(["", *parts[:depth]]) for depth in range(len(parts) + 1)]
        quotas += [_quota(read, f"/sys/fs/cgroup{root}{group}") for root in roots for group in groups]
    return min((quota for quota in quotas if quota is not None), default=None)


def within_quota(cores: int, quota: float | None) -> int:
    """Return how many of `cores` cores may be busy at the same time. The quota is rounded up, at least to 1."""
    return cores if quota is None else min(cores, max(1, math.ceil(quota)))


def _quota(read: Read, group: str) -> float | None:
    texts = (read(f"{group}/cpu.max") or "").split()
    texts = texts or [read(f"{group}/cpu.cfs_{what}_us") or "" for what in ("quota", "period")]
    numbers = [int(text) for text in texts if text.strip().isdecimal() and int(text) > 0]
    return numbers[0] / numbers[1] if len(numbers) == 2 else None
