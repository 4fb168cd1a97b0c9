"""The names of a worker's log files."""

from __future__ import annotations

from pathlib import Path


def log_paths(logdir: Path | None, name: str) -> list[Path]:
    """Return the log files of the worker `name` (host.port); none without a folder for them."""
    return [] if logdir is None else [logdir / f"{name}.{what}.log" for what in ("stdout", "stderr")]
