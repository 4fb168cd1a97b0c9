"""Measure baselines in turns: each once per round, while the others are blocked in a read.

Absolute times drift on shared machines, but times within the same second are comparable. So the ratio of two baselines
is computed in each round, and the result is the median over the rounds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from benchmarks.group import Group


@dataclass
class Entry:
    """One line of a result: a task, the group that executes it, and the times. Entries may share a group."""

    label: str
    group: Group
    task: Any
    about: dict[str, Any] = field(default_factory=dict)
    rounds: list[list[float]] = field(default_factory=list)  # seconds of the rank that counts, by round
    wrong: str | None = None
    unsupported: str | None = None
    others_cpu_s: float = 0.0  # processor time of the other baselines' ranks during wall_s; they should be idle
    wall_s: float = 0.0
    answers: list[dict[str, Any]] = field(default_factory=list)  # of the last round, by rank

    def ratio_to(self, base: Entry) -> float:
        """Return the time as a multiple of the time of `base`."""
        return median(median(mine) / median(its) for mine, its in zip(self.rounds, base.rounds))


def run(entries: Sequence[Entry], rounds: int) -> list[Entry]:
    """Fill in the results, and return the entries whose baseline supports the task. One extra round warms up."""
    groups = {id(entry.group): entry.group for entry in entries}
    for turn in range(rounds + 1):
        for entry in entries:
            if entry.unsupported is not None:
                continue
            others = [g for key, g in groups.items() if key != id(entry.group)]
            cpu_before, begin = sum(g.cpu_seconds() for g in others), time.monotonic()
            answers = entry.group.measure(entry.task)
            if "unsupported" in answers[0]:
                entry.unsupported = str(answers[0]["unsupported"])
                print(f"bench: {entry.label}: {entry.unsupported}", file=sys.stderr)
                continue
            entry.answers = answers
            entry.wrong = entry.wrong or next((a["wrong"] for a in answers if a["wrong"]), None)
            if turn == 0:
                continue
            pick = np.min if entry.group.contender.last_to_come_counts else np.max
            entry.rounds.append(pick([a["samples"] for a in answers], axis=0).tolist())
            entry.others_cpu_s += sum(g.cpu_seconds() for g in others) - cpu_before
            entry.wall_s += time.monotonic() - begin
    return [entry for entry in entries if entry.unsupported is None]
