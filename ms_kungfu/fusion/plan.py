"""Partition the gradients of a step into groups that are reduced together. All ranks compute the same groups."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ms_kungfu.fusion.mode import MB, Mode

_log = logging.getLogger(__name__)


class Gradient(NamedTuple):
    """A gradient, described by its parameter's name and size."""

    name: str
    """The parameter's name."""
    nbytes: int
    """Size in bytes."""
    dtype: str
    """The dtype's name."""
    comm_fusion: int = 1
    """The parameter's id in MindSpore's fusion."""


class Group(NamedTuple):
    """Gradients of one dtype that one operation reduces."""

    name: str
    """The operation's name."""
    members: tuple[int, ...]
    """The gradients' indices in the list of gradients, ascending."""
    nbytes: int
    """Total size of the members in bytes."""
    dtype: str
    """The dtype's name."""
    comm_fusion: int
    """The members' id in MindSpore's fusion."""


@dataclass(frozen=True)
class Plan:
    """The partition of the gradients into groups, with each gradient in exactly one group.

    The groups are reduced in the order of their first gradients.

    Args:
        gradients: all gradients, in the order of the optimizer's parameters.
        groups: the groups, in the order of their reduction.
        mode: the mode that determined the groups.
    """

    gradients: tuple[Gradient, ...]
    groups: tuple[Group, ...]
    mode: Mode

    def group_of(self) -> tuple[int, ...]:
        """Return each gradient's group number."""
        of = {i: number for number, group in enumerate(self.groups) for i in group.members}
        return tuple(of[i] for i in range(len(self.gradients)))

    def runs(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return each group as ranges [start, stop) of the list of gradients."""
        return tuple(tuple(_runs(group.members)) for group in self.groups)

    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """Return the list of gradients as ranges of the groups, which is the inverse of `runs`.

        Returns:
            Tuples ``(group, start, stop)``, in the order of the gradients.
        """
        taken = [0] * len(self.groups)
        pieces = []
        for start, stop, g in sorted((*run, g) for g, runs in enumerate(self.runs()) for run in runs):
            pieces.append((g, taken[g], taken[g] + stop - start))
            taken[g] += stop - start
        return tuple(pieces)

    def __str__(self) -> str:
        total = sum(gradient.nbytes for gradient in self.gradients)
        lines = [
            f"{_count(len(self.gradients), 'gradient')}, {_size(total)}, in {_count(len(self.groups), 'group')} "
            f"({self.mode})"
        ]
        width = max((len(gradient.name) for gradient in self.gradients), default=0)
        for group in self.groups:
            lines.append(
                f"{group.name}: {_count(len(group.members), 'gradient')}, {_size(group.nbytes)}, {group.dtype}, "
                f"comm_fusion {group.comm_fusion}"
            )
            for i in group.members:
                lines.append(f"  {i:4}  {self.gradients[i].name:{width}}  {_size(self.gradients[i].nbytes):>10}")
        return "\n".join(lines)


def make_plan(gradients: Sequence[Gradient], mode: Mode, name: str = "gradients") -> Plan:
    """Partition gradients into the groups that are reduced together.

    A gradient's ``comm_fusion`` id determines its group. A gradient with id 0 is reduced alone.
    Gradients with id 1 are grouped by `mode`. Gradients that share any other id form one group. All
    gradients of a group have the same dtype, as in MindSpore. With mode "none", gradients aren't fused,
    regardless of ids.

    A group's name contains its number rather than its contents. So if the plans of two ranks
    differ, the first group that differs has the same name but another layout, and its collective
    fails immediately. If the names differed, each rank would wait for the other forever.

    Args:
        gradients: the gradients, in the order of the optimizer's parameters.
        mode: how to group gradients with the id 1.
        name: the prefix of the groups' names.

    Returns:
        The plan, which is the same on all ranks that pass the same arguments.
    """
    chosen = [i for i, gradient in enumerate(gradients) if gradient.comm_fusion == 1]
    parts = dict(zip(chosen, _parts([gradients[i] for i in chosen], mode)))
    members: dict[tuple[object, ...], list[int]] = {}
    for i, gradient in enumerate(gradients):
        alone = mode.name == "none" or gradient.comm_fusion == 0
        key = (i,) if alone else (gradient.comm_fusion, parts.get(i, 0), gradient.dtype)
        members.setdefault(key, []).append(i)
    groups = (
        Group(
            f"{name}/{number}",
            tuple(group),
            sum(gradients[i].nbytes for i in group),
            gradients[group[0]].dtype,
            gradients[group[0]].comm_fusion,
        )
        for number, group in enumerate(members.values())
    )
    return Plan(tuple(gradients), tuple(groups), mode)


def _parts(gradients: Sequence[Gradient], mode: Mode) -> list[int]:
    """Return the number of each gradient's part.

    Gradients with the same part and dtype form a group.
    """
    if mode.name == "index":
        for point in mode.split_points:
            if point >= len(gradients):
                _log.warning(
                    "fusion: split_point=%d gradients=%d. The split point is beyond the last gradient",
                    point, len(gradients),
                )  # fmt: skip
        return [bisect_left(mode.split_points, i) for i in range(len(gradients))]
    parts: list[int] = []
    filled: dict[str, tuple[int, int]] = {}  # dtype -> (the part that is being filled, the number of bytes in it)
    for gradient in gradients:
        part, nbytes = filled.get(gradient.dtype, (0, 0))
        # A gradient that is larger than the limit forms a group alone.
        if nbytes and nbytes + gradient.nbytes > mode.limit_mb * MB:
            part, nbytes = part + 1, 0
        filled[gradient.dtype] = part, nbytes + gradient.nbytes
        parts.append(part)
    return parts


def _runs(members: Sequence[int]) -> list[tuple[int, int]]:
    starts = [k for k in range(len(members)) if k == 0 or members[k] != members[k - 1] + 1]
    return [(members[k], members[last - 1] + 1) for k, last in zip(starts, [*starts[1:], len(members)])]


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _size(nbytes: int) -> str:
    for unit, size in (("MB", MB), ("KB", 1 << 10)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes} B"
