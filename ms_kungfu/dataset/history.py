"""Find the records in a ledger that belong to the training run.

If a job continues from a checkpoint, its records replace those that earlier jobs wrote after the checkpoint.

Jobs that share a checkpoint folder are ordered by their numbers in that folder. A job that continues from a step comes
after a job that recorded the previous step. If neither rule applies (e.g. to two training runs that started from the
beginning without checkpoints), the jobs are ordered by the recorded times.
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
    """The records of the training run. From a job's first step on, its records replace those of earlier jobs."""

    records: list[Record]
    jobs: int
    problems: list[str]
    notes: list[str]


def history(records: list[Record]) -> History:
    """Return the records that belong to the training run."""
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
                "from that step on don't count"
            )
        found.records = before + new
    return found


@dataclass
class _Job:
    name: str
    time: float
    training: tuple[str, int] | None
    first: dict[int, _Place]  # dataset -> the job's first step
    places: dict[int, set[_Place]]  # dataset -> the job's steps

    def is_before(self, other: _Job) -> bool:
        """Return whether both jobs share a checkpoint folder and this job has the lower number in that folder."""
        mine, its = self.training, other.training
        return mine is not None and its is not None and mine[0] == its[0] and mine[1] < its[1]

    def follows(self, known: dict[int, set[_Place]]) -> bool:
        """Return whether `known` contains the step after which this job continues."""
        for data, (epoch, step) in self.first.items():
            places = known[data]
            if step and (epoch, step - 1) not in places:
                return False
            if epoch and not step and not any(before == epoch - 1 for before, _ in places):
                return False
        return True


def in_order(records: Iterable[Record]) -> list[str]:
    """Return the names of the jobs in the order that the module's description defines."""
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
