"""Which records in a ledger are the training's.

A job that continues from a checkpoint replaces what earlier ones recorded from there on.

Jobs are ordered by their numbers in the folder of checkpoints. A job that continues from a step follows one with a
record of the step before. Clocks count only if neither decides, as between two trainings from the beginning without
checkpoints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from ms_kungfu.dataset.ledger import Claim, Record
from ms_kungfu.dataset.report import name_of

_Place = tuple[int, int]  # epoch and step


@dataclass
class History:
    """The records of the training: those of the last job, and of earlier ones what came before it."""

    records: list[Record]
    jobs: int
    problems: list[str]
    notes: list[str]


def history(records: list[Record]) -> History:
    """Return the records that count."""
    jobs = in_order(records)
    found = History([], len(jobs), [], [])
    for job in sorted(set(jobs) - {record.job for record in records if isinstance(record.claim, Claim)}):
        found.problems.append(f"job {job}: no step is on record")
    for job in jobs:
        new = [record for record in records if record.job == job]
        first: dict[int, tuple[int, int]] = {}
        for record in new:
            first[record.data] = min(record.place, first.get(record.data, record.place))
        before = [r for r in found.records if r.data not in first or r.place < first[r.data]]
        if left_out := len(found.records) - len(before):
            data, (epoch, step) = next(iter(first.items()))
            found.notes.append(
                f"job {job} begins with {name_of(data, epoch, step)}: {left_out} records of earlier jobs "
                "from there on are not counted"
            )
        found.records = before + new
    return found


@dataclass
class _Job:
    name: str
    time: float
    training: tuple[str, int] | None
    first: dict[int, _Place]  # of each dataset
    places: dict[int, set[_Place]]  # of its records

    def is_before(self, other: _Job) -> bool:
        """Return whether it precedes the other, by the numbers that both have in one folder of checkpoints."""
        mine, its = self.training, other.training
        return mine is not None and its is not None and mine[0] == its[0] and mine[1] < its[1]

    def follows(self, known: dict[int, set[_Place]]) -> bool:
        """Return whether the step that it continues from is recorded."""
        for data, (epoch, step) in self.first.items():
            places = known[data]
            if step and (epoch, step - 1) not in places:
                return False
            if epoch and not step and not any(before == epoch - 1 for before, _ in places):
                return False
        return True


def in_order(records: Iterable[Record]) -> list[str]:
    """Return the jobs in order, by their clocks only if nothing else decides.

    Each has a number if they share a folder of checkpoints. A job that continues from a step follows one that has
    recorded the step before.
    """
    jobs: dict[str, _Job] = {}
    for record in records:
        job = jobs.setdefault(record.job, _Job(record.job, record.time, record.training, {}, defaultdict(set)))
        job.time = min(job.time, record.time)
        job.training = max(filter(None, (job.training, record.training)), default=None)
        job.first[record.data] = min(record.place, job.first.get(record.data, record.place))
        job.places[record.data].add(record.place)
    known: dict[int, set[_Place]] = defaultdict(set)
    order: list[str] = []
    while jobs:
        free = [job for job in jobs.values() if not any(other.is_before(job) for other in jobs.values())]
        following = [job for job in free if job.follows(known)]
        job = min(following or free, key=lambda each: each.time)
        for data, places in job.places.items():
            known[data] |= places
        order.append(jobs.pop(job.name).name)
    return order
