"""Proves from the ledger that each sample was trained once an epoch: ``python -m ms_kungfu.dataset.audit LOGDIR``.

Reads what the workers of an ElasticDataset with a ``ledger`` wrote (`ms_kungfu.dataset.ledger`) and nothing else. Exit
status 0: every finished epoch has trained each sample exactly once (with ``drop_remainder``: but for a remainder
smaller than a global batch), the last, unfinished one none twice, and no two records contradict each other. 1: it isn't
so; the samples and the contradictions are named. 2: there is no ledger to read.

What is checked
- All workers that a step contains agree on it: cluster version, members, participants, the batch, seed and total. A
  record of a worker that the others' records leave out doesn't count: it died, and the step was committed without it.
- Each worker's own share is the one that follows from the batch and the members.
- The steps of an epoch have consecutive numbers, and a worker's records have no gap; one that died may lack its last.
- Over an epoch the shares of the participants contain each position of the permutation once.

A job that goes on from a checkpoint of an earlier one writes to the same folder: what the earlier one recorded from
there on isn't part of the training any more, and isn't counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ms_kungfu.dataset import dealing
from ms_kungfu.dataset.dealing import Range, Step

_SHOWN = 20  # samples or problems that the text names before it says how many more there are


@dataclass(frozen=True)
class Claim:
    """What one record says that all records of the step have to say."""

    version: int
    size: int
    members: tuple[int, ...]
    participants: tuple[int, ...]
    batch: tuple[Range, ...]
    total: int
    seed: int
    shuffle: bool


@dataclass(frozen=True)
class End:
    """What a worker says of an epoch that is over, and what all workers have to say."""

    left: tuple[Range, ...]
    global_batch: int
    drop_remainder: bool


@dataclass(frozen=True)
class Record:
    """A line of the ledger."""

    where: str
    job: str
    time: float
    data: int
    epoch: int
    step: int
    """At the end of an epoch: the number of its steps."""
    rank: int
    share: tuple[Range, ...]
    claim: Claim | End


@dataclass
class Epoch:
    """What the ledger says of an epoch. Samples are numbers in the source, not positions in the permutation."""

    data: int
    epoch: int
    steps: int
    total: int
    finished: bool
    trained: int
    """Samples trained at least once."""
    missing: list[int] = field(default_factory=list)
    """Samples of a finished epoch that weren't trained."""
    repeated: dict[int, list[int]] = field(default_factory=dict)
    """Sample: the steps that trained it, where these are several."""
    dropped: list[int] = field(default_factory=list)
    """Samples left out because `drop_remainder` says so."""
    given_back: int = 0
    """Samples that a worker had taken when it died, and which others trained later."""

    @property
    def exact(self) -> bool:
        return not (self.missing or self.repeated)


@dataclass
class Report:
    """The outcome of an audit."""

    workers: int
    jobs: int
    epochs: list[Epoch]
    problems: list[str]
    """Contradictions and damage."""
    notes: list[str]
    """What is in order but worth knowing."""

    @property
    def exact(self) -> bool:
        return not self.problems and all(epoch.exact for epoch in self.epochs)


def _ranges(value: Any) -> tuple[Range, ...]:
    ranges = tuple((first, last) for first, last in value)
    if not all(type(first) is int and type(last) is int and 0 <= first < last for first, last in ranges):
        raise ValueError(value)
    return ranges


def _parse(line: dict[str, Any], where: str) -> Record:
    """The record in a line; ValueError, KeyError or TypeError where it isn't one."""
    step = line["steps" if "steps" in line else "step"]
    own = line["data"], line["epoch"], step, line["rank"]
    version, size, total, global_batch = (line[key] for key in ("version", "size", "total", "global_batch"))
    if not all(type(number) is int for number in (*own, version, size, total, global_batch, line["seed"])):
        raise ValueError(line)
    share, batch = _ranges(line.get("share", ())), _ranges(line["left" if "steps" in line else "batch"])
    if size < 1 or max((last for _, last in batch), default=0) > total:
        raise ValueError(line)
    claim: Claim | End
    if "steps" in line:
        claim = End(batch, global_batch, bool(line["drop_remainder"]))
    else:
        members, participants = tuple(line["members"]), tuple(line["participants"])
        if not (batch and own[3] in participants and set(participants) <= set(members) <= set(range(size))):
            raise ValueError(line)
        seed, shuffle = line["seed"], bool(line["shuffle"])
        claim = Claim(version, size, members, participants, batch, total, seed, shuffle)
    return Record(where, str(line["job"]), float(line["time"]), *own, share, claim)


def read(folder: Path) -> tuple[dict[str, list[Record]], list[str], list[str]]:
    """The records of each file of the ledger in `folder`, in their order; problems; notes."""
    files: dict[str, list[Record]] = {}
    problems, notes = [], []
    for path in sorted(folder.glob("*.jsonl")):
        lines = path.read_bytes().split(b"\n")
        records = files[path.name] = []
        for number, content in enumerate(lines, 1):
            where = f"{path.name}, line {number}"
            if number == len(lines):
                if content:
                    notes.append(f"{where}: torn, not counted (its worker was killed while it wrote)")
                continue
            try:
                records.append(_parse(json.loads(content), where))
            except (ValueError, KeyError, TypeError):
                problems.append(f"{where}: not a record of a step")
    return files, problems, notes


def audit(files: dict[str, list[Record]], problems: Iterable[str] = (), notes: Iterable[str] = ()) -> Report:
    """Checks the records of `files` (a list for each worker, in the order written)."""
    report = Report(len(files), 0, [], list(problems), list(notes))
    epochs: dict[tuple[int, int], dict[int, list[Record]]] = defaultdict(lambda: defaultdict(list))
    ends: dict[tuple[int, int], list[Record]] = defaultdict(list)
    last_of: dict[str, tuple[int, int]] = {}  # of a worker: the last step that it recorded
    for record in _history([record for file in files.values() for record in file], report):
        if isinstance(record.claim, End):
            ends[record.data, record.epoch].append(record)
        else:
            epochs[record.data, record.epoch][record.step].append(record)
            worker = _worker(record, record.claim, record.rank)
            last_of[worker] = max(last_of.get(worker, (-1, -1)), (record.epoch, record.step))
    for (data, number), steps in sorted(epochs.items()):
        agreed = {}
        for step, found in sorted(steps.items()):
            name = _name(data, number, step)
            agreed[step] = claim = _agree(name, found, report)
            recorded = {record.rank for record in found if record.claim == claim}
            for rank in sorted(set(claim.participants) - recorded):
                if last_of.get(_worker(found[0], claim, rank), (-1, -1)) > (number, step):
                    report.problems.append(f"{name}: no record of rank {rank}, which has later ones")
        end = _end(_name(data, number), ends[data, number], max(agreed) + 1, report)
        finished = end is not None or any(other == data and later > number for other, later in epochs)
        report.epochs.append(_cover(data, number, agreed, finished, end, report))
    return report


def _worker(record: Record, claim: Claim, rank: int) -> str:
    return f"{record.job} {record.data} {claim.version} {rank}"


def _end(name: str, records: list[Record], steps: int, report: Report) -> End | None:
    """What all workers that came to the end of the epoch say of it."""
    said = {(record.step, record.claim): record for record in records}
    if len(said) > 1 or any(counted != steps for counted, _ in said):
        counts = ", ".join(f"{record.step} by rank {record.rank} ({record.where})" for record in said.values())
        report.problems.append(f"{name}: {_number(steps, 'step')} on record, its end after step {counts}")
    return next((claim for _, claim in said if isinstance(claim, End)), None)


def _history(records: list[Record], report: Report) -> list[Record]:
    """The records that the training consists of: those of the last job, and of earlier ones what came before it."""
    begins: dict[str, float] = {}
    for record in records:
        begins[record.job] = min(record.time, begins.get(record.job, record.time))
    jobs = sorted(begins, key=lambda job: begins[job])
    report.jobs = len(jobs)
    kept: list[Record] = []
    for job in jobs:
        new = [record for record in records if record.job == job]
        first: dict[int, tuple[int, int]] = {}
        for record in new:
            place = record.epoch, record.step
            first[record.data] = min(place, first.get(record.data, place))
        before = [r for r in kept if r.data not in first or (r.epoch, r.step) < first[r.data]]
        if len(before) < len(kept):
            data, (epoch, step) = next(iter(first.items()))
            report.notes.append(
                f"job {job} begins with {_name(data, epoch, step)}: {len(kept) - len(before)} records of earlier jobs "
                "from there on are not counted"
            )
        kept = before + new
    return kept


def _name(data: int, epoch: int, step: int | None = None) -> str:
    of = f"dataset {data}, " if data else ""
    return f"{of}epoch {epoch}" + ("" if step is None else f", step {step}")


def _agree(name: str, records: Sequence[Record], report: Report) -> Claim:
    """What the workers that are in the step say of it."""
    claims = Counter(record.claim for record in records if isinstance(record.claim, Claim))
    # The claim all of whose participants make it, as far as they are on record.
    stands = [c for c in claims if all(r.claim == c for r in records if r.rank in c.participants)]
    agreed = stands[0] if len(stands) == 1 else claims.most_common(1)[0][0]
    if len(stands) != 1:
        said = "; ".join(
            f"rank {r.rank} of {r.claim.size} ({r.where}): participants {list(r.claim.participants)}, "
            f"batch {_text(r.claim.batch)}, version {r.claim.version}, seed {r.claim.seed}, {r.claim.total} samples"
            for r in {record.claim: record for record in records}.values()
            if isinstance(r.claim, Claim)
        )
        report.problems.append(f"{name}: the workers contradict each other: {said}")
    seen = set()
    for record in records:
        if record.claim != agreed:
            if len(stands) == 1:
                report.notes.append(
                    f"{name}: the record of rank {record.rank}, which is not in the step, doesn't count"
                )
            continue
        if record.rank in seen:
            report.problems.append(f"{name}: rank {record.rank} recorded it twice ({record.where})")
        seen.add(record.rank)
        share = Step(record.step, agreed.batch, agreed.members).share(record.rank)
        if record.share != share:
            own = f"rank {record.rank} trained {_text(record.share)}, its share is {_text(share)} ({record.where})"
            report.problems.append(f"{name}: {own}")
    return agreed


def _text(ranges: Iterable[Range]) -> str:
    return "+".join(f"[{first},{last})" for first, last in ranges) or "nothing"


def _cover(data: int, number: int, steps: dict[int, Claim], finished: bool, end: End | None, report: Report) -> Epoch:
    """What the participants of all steps trained together."""
    first = next(iter(steps.values()))
    total, last_step = first.total, max(steps)
    missing_steps = sorted(set(range(last_step + 1)) - set(steps))
    if missing_steps:
        report.problems.append(f"{_name(data, number)}: no record of step {', '.join(map(str, missing_steps))}")
    times = np.zeros(total, dtype=np.int32)
    trained: list[tuple[int, Range]] = []
    given_back = 0
    for step, claim in steps.items():
        if (claim.total, claim.seed, claim.shuffle) != (first.total, first.seed, first.shuffle):
            report.problems.append(
                f"{_name(data, number, step)}: {claim.total} samples, seed {claim.seed}, shuffle {claim.shuffle}; "
                f"the epoch began with {first.total}, {first.seed}, {first.shuffle}"
            )
            continue
        own, back = Step(step, claim.batch, claim.members).outcome(claim.participants)
        given_back += dealing.count(back)
        for begin, stop in own:
            times[begin:stop] += 1
            trained.append((step, (begin, stop)))
    order = dealing.permutation(total, first.seed, number, first.shuffle)
    left = np.flatnonzero(times == 0)
    dropped = np.zeros(total, dtype=bool)
    if end is not None and end.drop_remainder and dealing.count(end.left) < end.global_batch:
        dropped[dealing.positions(end.left)] = True
    finished = finished or left.size == 0
    epoch = Epoch(data, number, last_step + 1, total, finished, int(np.count_nonzero(times)), given_back=given_back)
    if finished:
        epoch.missing = sorted(order[left[~dropped[left]]].tolist())
        epoch.dropped = sorted(order[left[dropped[left]]].tolist())
    repeated: dict[int, list[int]] = {int(order[position]): [] for position in np.flatnonzero(times > 1)}
    for step, (begin, stop) in trained if repeated else ():
        for position in begin + np.flatnonzero(times[begin:stop] > 1):
            repeated[int(order[position])].append(step)
    epoch.repeated = dict(sorted(repeated.items()))
    return epoch


def _some(items: Sequence[Any]) -> str:
    more = f" and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return ", ".join(str(item) for item in items[:_SHOWN]) + more


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def to_text(report: Report) -> str:
    """The report for people; its last line is the verdict."""
    lines = [f"ledger of {_number(report.workers, 'worker')} in {_number(report.jobs, 'job')}"]
    for epoch in report.epochs:
        steps, total = _number(epoch.steps, "step"), epoch.total
        if not epoch.finished:
            text = f"{steps} so far, {epoch.trained} of {_number(total, 'sample')}"
            text += ", each once" if not epoch.repeated else ""
        elif epoch.exact and not epoch.dropped:
            text = f"{steps}, each of {_number(total, 'sample')} once"
        else:
            text = f"{steps}, {epoch.trained} of {_number(total, 'sample')}"
        if epoch.dropped:
            text += f", the remainder of {len(epoch.dropped)} dropped"
        if epoch.given_back:
            text += f"; {epoch.given_back} of them dealt out again after a death"
        lines.append(f"{_name(epoch.data, epoch.epoch)}: {text}")
        if epoch.missing:
            lines.append(f"  not trained: {_number(len(epoch.missing), 'sample')}: {_some(epoch.missing)}")
        if epoch.repeated:
            items = [f"{sample} (steps {', '.join(map(str, steps))})" for sample, steps in epoch.repeated.items()]
            lines.append(f"  trained more than once: {_number(len(items), 'sample')}: {_some(items)}")
    for kind, texts in (("note", report.notes), ("problem", report.problems)):
        lines += [f"{kind}: {text}" for text in texts[:_SHOWN]]
        if len(texts) > _SHOWN:
            lines.append(f"{kind}: and {len(texts) - _SHOWN} more")
    finished = sum(epoch.finished for epoch in report.epochs)
    if report.exact:
        lines.append(f"exact: each sample was trained once in each of {_number(finished, 'finished epoch')}")
    else:
        wrong = sum(not epoch.exact for epoch in report.epochs)
        lines.append(
            f"NOT exact: {_number(wrong, 'epoch')} with samples left out or repeated, "
            f"{_number(len(report.problems), 'problem')} in the records"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ms_kungfu.dataset.audit",
        description="Proves from the ledger of an ElasticDataset that each sample was trained once an epoch.",
        epilog="Exit status: 0 exact, 1 not exact (what isn't is named), 2 no ledger there.",
    )
    parser.add_argument("logdir", metavar="LOGDIR", type=Path, help="ledger= or KUNGFU_LEDGER_DIR of the training")
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")
    args = parser.parse_args(argv)
    try:
        files, problems, notes = read(args.logdir)
    except OSError as error:
        parser.error(f"can't read the ledger: {error}")
    if not any(files.values()) and not problems:
        parser.error(f"{args.logdir} has no ledger: no file *.jsonl with a record in it")
    report = audit(files, problems, notes)
    if args.json:
        print(json.dumps({"exact": report.exact, **asdict(report)}, indent=2))
    else:
        print(to_text(report))
    return 0 if report.exact else 1


if __name__ == "__main__":
    sys.exit(main())
