"""The configuration of fusion: MindSpore's ``comm_fusion``, checked as MindSpore checks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MB = 1 << 20
AUTO_MB = 64


class Mode(NamedTuple):
    """How to group gradients whose ``comm_fusion`` id is 1, which is the default.

    :func:`parse` and :func:`configured` return a mode.
    """

    name: str
    """``"none"``, ``"auto"``, ``"size"`` or ``"index"``."""
    limit_mb: int = 0
    """For "auto" and "size": the largest size of a group, in MB."""
    split_points: tuple[int, ...] = ()
    """For "index": the index of the last gradient of each group, except the last group."""

    def __str__(self) -> str:
        if self.name == "index":
            return f"index: groups end at {', '.join(map(str, self.split_points))}"
        return "none: nothing is fused" if self.name == "none" else f"{self.name}: up to {self.limit_mb} MB per group"


NONE = Mode("none")
AUTO = Mode("auto", AUTO_MB)


def for_overlap(mode: Mode, nbytes: int) -> Mode:
    """Adapt `mode` to groups whose reduction overlaps with the computation of later gradients.

    `nbytes` is the total size of the gradients. For "auto", a group's size limit becomes an eighth of
    the total, but at least 2 MB and at most 16 MB. The backward pass can hide the reduction of groups
    of this size, and each group is large enough for nearly the full speed of a network
    (docs/performance.md).
    """
    return Mode("auto", min(max(-(-nbytes // (8 * MB)), 2), 16)) if mode.name == "auto" else mode


def parse(fusion: Any, allowed: tuple[str, ...] = ("auto", "size", "index")) -> Mode:
    """Return the mode for a value of `fusion`, which is checked as MindSpore checks its ``comm_fusion``.

    The function raises the same errors as ``ms.set_auto_parallel_context(comm_fusion=...)``.

    Args:
        fusion: ``"none"``, ``"auto"``, or MindSpore's ``{"mode": ..., "config": ...}``.
        allowed: the modes that a mapping may have.

    Returns:
        The mode.

    Raises:
        KeyError: if the mode is missing or unknown.
        TypeError: if the type of ``config`` doesn't fit the mode.
        ValueError: if the value of ``config`` doesn't fit the mode.
    """
    if isinstance(fusion, str) and fusion in ("none", "auto"):
        return NONE if fusion == "none" else AUTO
    if not isinstance(fusion, Mapping):
        raise TypeError(f'fusion must be "none", "auto" or {{"mode": ..., "config": ...}}, not {fusion!r}')
    for key in ("mode", "config"):
        if key not in fusion:
            raise KeyError(f"fusion needs the key {key!r}, got {dict(fusion)!r}")
    mode, config = fusion["mode"], fusion["config"]
    if mode not in allowed:
        raise KeyError(f"the mode of fusion must be {' or '.join(allowed)}, not {mode!r}")
    if mode == "auto":
        return AUTO
    return Mode("index", split_points=_split_points(config)) if mode == "index" else _size(config)


def configured(comm_fusion: Mapping[str, Any], kind: str = "allreduce") -> Mode:
    """Return the mode that MindSpore's full configuration has for one kind of collective.

    Args:
        comm_fusion: the result of ``ms.get_auto_parallel_context("comm_fusion")``.
        kind: ``"allreduce"``, ``"allgather"`` or ``"reducescatter"``.

    Returns:
        The mode.

    Raises:
        KeyError, TypeError, ValueError: as in :func:`parse`.
    """
    if not comm_fusion.get("openstate", True):
        return NONE
    return parse(comm_fusion.get(kind, "auto"), ("auto", "size", "index") if kind == "allreduce" else ("auto", "size"))


def _size(config: Any) -> Mode:
    if isinstance(config, bool) or not isinstance(config, int):
        raise TypeError(f"the size of a fusion group must be a whole number of MB, not {config!r}")
    if config < 0:
        raise ValueError(f"the size of a fusion group in MB must be at least 0, not {config}")
    # With size 0, MindSpore skips its fusion pass, even if parameters have fusion ids.
    return NONE if config == 0 else Mode("size", config)


def _split_points(config: Any) -> tuple[int, ...]:
    if not config:
        raise ValueError("the split points of fusion can't be empty")
    if not isinstance(config, list):
        raise TypeError(f"the split points of fusion must be a list, not {config!r}")
    for point in config:
        if isinstance(point, bool) or not isinstance(point, int) or point < 0:
            raise TypeError(f"a split point of fusion must be the index of a gradient, not {point!r}")
    if sorted(set(config)) != config:
        raise ValueError(f"the split points of fusion must ascend, without repetitions; got {config}")
    return tuple(config)
