"""Name the log files of workers."""

from __future__ import annotations

from pathlib import Path


def log_paths(logdir: Path | None, name: str) -> list[Path]:
    """Return the log files of the worker `name` (host.port); an empty list if there is no log folder."""
    return [] if logdir is None else [logdir / f"{name}.{what}.log" for what in ("stdout", "stderr")]
