"""Prove from the ledger that each sample was used once per epoch: ``python -m ms_kungfu.dataset.audit LOGDIR``.

The audit reads only the ledger files, which the workers write if their ElasticDataset has a ``ledger``
(`ms_kungfu.dataset.ledger`). The exit status of the command is:
- 0: Every finished epoch used each sample exactly once. With ``drop_remainder``, a remainder smaller than a global
  batch may be unused. An unfinished last epoch used no sample twice. No two records contradict each other, and no
  record is missing.
- 1: A condition of status 0 doesn't hold, or the ledger has no record of any step. The report names the samples,
  contradictions and gaps.
- 2: There is no ledger, or this version of ms_kungfu can't read it.

The audit checks these conditions:
- All workers that took part in a step recorded the same cluster version, members, participants, batch, seed and total.
  A worker's record doesn't count if the other workers' records don't include that worker, because the worker failed and
  the step was committed without it.
- Each worker received the share that can be computed from the batch and the members.
- If a step is partitioned into shards (format 3), its whole batch is used even if workers failed in the step. Each
  worker computed at least its assigned shards. Each shard of a failed worker counts for exactly one other worker. If a
  participant failed before it wrote a record, the audit assumes that the participant computed its assigned shards,
  except those that another worker recorded.
- The lines of a file are consecutive: each line continues the ``crc`` of the line before, and steps and ends of epochs
  have consecutive numbers. Only the last line may be incomplete.
- A worker that takes part in a step of a cluster version also takes part in all earlier steps of that version, and has
  a record of each. Only the records of its last update may be missing, if the worker failed before it wrote them. The
  report lists such missing records as a note, because the other workers' records contain that worker's share.
- If workers recorded checksums after a step (`ledger_fingerprints`), the checksums are the same on all workers.
- Epochs have consecutive numbers, steps of an epoch have consecutive numbers, and a job's cluster versions increase.
- Over an epoch, the shares of the participants contain each position of the permutation once.
- If all files have hashes of sample contents (`ms_kungfu.dataset.contents`), the hashes are the same.

The ledger itself proves only which sample *numbers* were used. The hashes show, for some or all samples, that a number
refers to the same sample in each process. The report's last line contains what is proven: ``(numbers)`` or ``(numbers
and contents)``.

The audit can't detect a loss of records if the last lines are missing from every file of the ledger.

A job that continues from a checkpoint of an earlier job writes to the same folder. Records that the earlier job wrote
after that checkpoint no longer belong to the training run and don't count (`ms_kungfu.dataset.history`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from ms_kungfu import _core
from ms_kungfu._words import counted
from ms_kungfu.dataset import sharding, shards
from ms_kungfu.dataset.history import history
from ms_kungfu.dataset.ledger import Claim, End, Record, Stop, read, worker_of
from ms_kungfu.dataset.report import Epoch, Report, name_of, name_of_data, to_text
from ms_kungfu.dataset.sharding import Range, Step
from ms_kungfu.errors import KungFuError

__all__ = ["Claim", "End", "Epoch", "Record", "Report", "Stop", "audit", "main", "read", "to_text"]

_Place = tuple[int, int]  # epoch and step
_Steps = dict[int, dict[_Place, list[Record]]]  # records by dataset and place


def audit(files: dict[str, list[Record]], problems: Iterable[str] = (), notes: Iterable[str] = ()) -> Report:
    """Audit the records. `files` maps each file's name to its records, in the order in which a worker wrote them."""
    report = Report(len(set(map(worker_of, files))), 0, [], list(problems), list(notes))
    for records in files.values():
        _follow_one_another(records, report)
    steps: _Steps = defaultdict(lambda: defaultdict(list))
    ends: dict[tuple[int, int], list[Record]] = defaultdict(list)
    kept = history([record for file in files.values() for record in file])
    report.jobs = kept.jobs
    report.problems += kept.problems
    report.notes += kept.notes
    for record in kept.records:
        if isinstance(record.claim, End):
            ends[record.data, record.epoch].append(record)
        elif isinstance(record.claim, Claim):
            steps[record.data][record.place].append(record)
        else:
            text = f"{record.where}: no record from {name_of(record.data, *record.place)} on: {record.claim.reason}"
            if record.claim.goes_on:
                report.problems.append(
                    f"{text}; its worker continued to train without a ledger, because of ledger_errors='warn'"
                )
            else:
                report.notes.append(f"{text}; its worker stopped training")
    for data in sorted({*steps, *(data for data, _ in ends)}):
        found = steps[data]
        agreed = {place: _agree(name_of(data, *place), records, report) for place, records in sorted(found.items())}
        _attend(data, found, agreed, report)
        _compare(data, found, agreed, report)
        compared = _compare_contents(data, found, agreed, report)
        numbers = {epoch for epoch, _ in agreed} | {epoch for other, epoch in ends if other == data}
        for number in range(max(numbers) + 1):
            of_epoch = {step: claim for (epoch, step), claim in agreed.items() if epoch == number}
            if not of_epoch:
                report.problems.append(f"{name_of(data, number)}: no record of any step")
                continue
            end = _end(name_of(data, number), ends[data, number], max(of_epoch) + 1, report)
            finished = end is not None or number < max(numbers)
            trained = {
                step: _trained(name_of(data, number, step), claim, found[number, step], report)
                for step, claim in of_epoch.items()
            }
            epoch = _cover(data, number, of_epoch, trained, finished, end, report)
            epoch.compared = compared
            report.epochs.append(epoch)
    return report


def _follow_one_another(records: Sequence[Record], report: Report) -> None:
    """Check that no step and no end of an epoch is missing after a worker's first record."""
    for before, record in zip(records, records[1:]):
        if isinstance(record.claim, Stop):
            break
        ended, ends = isinstance(before.claim, End), isinstance(record.claim, End)
        # In the record of an epoch's end, `step` is the number of steps in the epoch.
        due = (before.epoch + 1, 0) if ended else (before.epoch, before.step + 1)
        follows = (record.job, record.data, record.place) == (before.job, before.data, due)
        if not follows or (ended and ends):
            after = f"the end of {name_of(before.data, before.epoch)}" if ended else name_of(before.data, *before.place)
            now = "its end" if ends else name_of(record.data, *record.place)
            report.problems.append(f"{record.where}: {now} after {after}: lines are missing, repeated or out of order")


def _attend(data: int, found: dict[_Place, list[Record]], agreed: dict[_Place, Claim], report: Report) -> None:
    """Check that a step's participants recorded the cluster version's earlier steps, and that versions increase."""
    versions: dict[tuple[str, int], list[_Place]] = defaultdict(list)
    of_job: dict[str, int] = {}
    first = next(iter(agreed.values()), None)
    for place, claim in agreed.items():
        name, job = name_of(data, *place), found[place][0].job
        versions[job, claim.version].append(place)
        if claim.version < of_job.get(job, claim.version):
            report.problems.append(f"{name}: cluster version {claim.version} after version {of_job[job]}")
        of_job[job] = claim.version
        if first is not None and claim.order != first.order:
            report.problems.append(
                f"{name}: {claim.total} samples, seed {claim.seed}, shuffle {claim.shuffle}; "
                f"the first record has {first.total}, {first.seed}, {first.shuffle}"
            )
    took_part = {rank for claim in agreed.values() for rank in claim.participants}
    if silent := sorted(took_part - {record.rank for records in found.values() for record in records}):
        report.notes.append(
            f"there are no files of rank {', '.join(map(str, silent))}; if the hosts don't share a folder, "
            "copy the ledgers of all hosts into one folder and audit that folder"
        )
    for (_, version), places in versions.items():
        sizes = sorted({agreed[place].size for place in places})
        if len(sizes) > 1:
            report.problems.append(f"{name_of(data, *places[0])}: version {version} has sizes {sizes}")
        for rank in sorted({rank for place in places for rank in agreed[place].participants}):
            where = [place for place in places if rank in agreed[place].participants]
            recorded = {
                place for place in where if any(r.rank == rank and r.claim == agreed[place] for r in found[place])
            }
            until = f"rank {rank}, which takes part until {name_of(data, *where[-1])}"
            begins = agreed[where[-1]].first
            last = where[-1] if begins is None else (where[-1][0], begins)  # an update's steps are committed together
            for kind, lacking in (
                ("no record of", [place for place in where if place < last and place not in recorded]),
                ("without", [place for place in places if place < where[-1] and place not in where]),
            ):
                if lacking:
                    more = f"; the same for {counted(len(lacking) - 1, 'later step')}" if len(lacking) > 1 else ""
                    report.problems.append(f"{name_of(data, *lacking[0])}: {kind} {until}{more}")
            if where[-1] not in recorded:
                report.notes.append(
                    f"{name_of(data, *where[-1])}: no record of rank {rank} in its last step of version "
                    f"{version}: the rank failed before it wrote the record, or couldn't write it (see its "
                    "log). The other ranks' records contain its share"
                )


def _compare(data: int, found: dict[_Place, list[Record]], agreed: dict[_Place, Claim], report: Report) -> None:
    """Check that all workers recorded the same checksums after a step.

    Report only the first step whose checksums differ, because later checksums differ as a consequence.
    """
    for place, claim in agreed.items():
        had: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
        for record in found[place]:
            if record.claim == claim and record.fingerprint is not None:
                for tensor, checksum in record.fingerprint.tensors.items():
                    had[tensor][checksum].append(record.rank)
        apart = {tensor: ranks for tensor, ranks in had.items() if len(ranks) > 1}
        if apart:
            tensor, ranks = next(iter(apart.items()))
            told = "; ".join(f"{bits} at rank {', '.join(map(str, sorted(who)))}" for bits, who in ranks.items())
            more = f" (and {counted(len(apart) - 1, 'more tensor')})" if len(apart) > 1 else ""
            report.problems.append(
                f"{name_of(data, *place)}: after this step {tensor!r} differed between workers: {told}{more}"
            )
            return


def _compare_contents(data: int, found: dict[_Place, list[Record]], agreed: dict[_Place, Claim], report: Report) -> int:
    """Return how many samples have the same contents in all workers' files; 0 if a file has no hashes."""
    of_files: dict[str, Record] = {}
    for place, claim in agreed.items():
        for record in found[place]:
            if record.claim == claim:
                of_files.setdefault(record.where.rpartition(",")[0], record)
    known = [record for record in of_files.values() if record.contents is not None]
    for kind in ("some", "all"):
        by_hash: dict[str, list[Record]] = defaultdict(list)
        for record in known:
            if record.contents is not None and kind in record.contents:
                by_hash[str(record.contents[kind])].append(record)
        if len(by_hash) > 1:
            told = "; ".join(
                f"{bits} in {', '.join(sorted(record.where.rpartition(',')[0] for record in records)[:3])}"
                for bits, records in by_hash.items()
            )
            report.problems.append(
                f"{name_of_data(data)}the same sample numbers stood for different contents in the "
                f"processes: hash {told}"
            )
            return 0
    if len(known) < len(of_files):
        return 0
    return min((record.contents["samples"] for record in known if record.contents is not None), default=0)


def _end(name: str, records: list[Record], steps: int, report: Report) -> End | None:
    """Return the values that the workers recorded at an epoch's end; None if no worker recorded that end."""
    said = {(record.step, record.claim): record for record in records}
    if len(said) > 1 or any(counted != steps for counted, _ in said):
        counts = ", ".join(f"{record.step} by rank {record.rank} ({record.where})" for record in said.values())
        report.problems.append(
            f"{name}: {counted(steps, 'step')} on record, but the epoch's end is recorded after step {counts}"
        )
    return next((claim for _, claim in said if isinstance(claim, End)), None)


def _agree(name: str, records: Sequence[Record], report: Report) -> Claim:
    """Return the claim that a step's participants agree on, and report workers that contradict it."""
    claims = Counter(record.claim for record in records if isinstance(record.claim, Claim))
    # Find the claim on which all participants with a record of the step agree.
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
                    f"{name}: the record of rank {record.rank} doesn't count, because the rank took no part in the step"
                )
            continue
        if record.rank in seen:
            report.problems.append(f"{name}: rank {record.rank} recorded the step twice ({record.where})")
        seen.add(record.rank)
        if agreed.shards is not None:
            continue  # `_trained` checks sharded steps
        share = Step(record.step, agreed.batch, agreed.members, agreed.ranks).share(record.rank)
        if not _is_delivered(record.share, share, agreed.batch):
            own = f"rank {record.rank} trained {_text(record.share)}, but its share is {_text(share)} ({record.where})"
            report.problems.append(f"{name}: {own}")
    return agreed


def _is_delivered(given: tuple[Range, ...], share: tuple[Range, ...], batch: tuple[Range, ...]) -> bool:
    """Return whether a worker received its share: the same positions in the same order.

    A worker without a share repeats the step's last position. The first format doesn't record that position.
    """
    if not share and given:
        length = sharding.count(batch)
        share = sharding.part(batch, length - 1, length)
    return np.array_equal(sharding.positions(given), sharding.positions(share))


# The ranges that a step used, and the number of the step's samples that were assigned to failed workers.
_Trained = tuple[list[Range], int]


def _trained(name: str, claim: Claim, records: Sequence[Record], report: Report) -> _Trained:
    """Return the ranges that a step's participants used."""
    step = Step(0, claim.batch, claim.members, claim.ranks)
    if claim.shards is None:
        own, back = step.outcome(claim.participants)
        return list(own), sharding.count(back)
    unit, length = claim.shards.unit, sharding.count(claim.batch)
    count = shards.count(length, unit)
    dealt = {
        rank: _core.partition_shards(count, list(claim.members), list(claim.shards.weights), rank)
        for rank in claim.members
    }
    failed = set(claim.members) - set(claim.participants)
    times, idle = Counter[int](), Counter[int]()
    recorded = {record.rank: record for record in records if record.claim == claim}
    for rank, record in recorded.items():
        try:
            given = shards.shards_in(record.share, claim.batch, unit)
        except ValueError:
            given = []
        if not set(dealt[rank]) <= set(given) or len(set(given)) < len(given):
            report.problems.append(
                f"{name}: rank {rank} trained {_text(record.share)}, but the shards {dealt[rank]} of "
                f"the batch {_text(claim.batch)} were assigned to it ({unit} samples per shard; {record.where})"
            )
        for shard in given:
            (times if dealt[rank] or shard < count - 1 else idle)[shard] += 1
    lost = {shard for rank in failed for shard in dealt[rank]}
    unwritten = [rank for rank in claim.participants if rank not in recorded]
    for shard in range(count):
        # A worker without a shard recomputes the last shard. The result counts only if that shard's worker has failed.
        others = {shard for rank in unwritten for shard in dealt[rank]} | (lost if unwritten or idle[shard] else set())
        if times[shard] == 0 and shard in others:
            times[shard] = 1
        # If a second ShardedStep runs on the batch after a failure, all shards are assigned to the living ranks again.
        # So two ranks may have received the same shard.
        if claim.shards.sums > 1 and failed:
            times[shard] = min(times[shard], 1)
        if times[shard] != 1:
            owner = next(rank for rank in claim.members if shard in dealt[rank])
            said = "no worker" if times[shard] == 0 else f"{times[shard]} workers"
            report.problems.append(f"{name}: shard {shard} of {count}, assigned to rank {owner}, was trained by {said}")
    trained = [
        piece
        for shard in times.elements()
        for piece in sharding.part(claim.batch, shard * unit, min((shard + 1) * unit, length))
    ]
    return trained, sum(min(unit, length - shard * unit) for shard in lost)


def _text(ranges: Iterable[Range]) -> str:
    return "+".join(f"[{first},{last})" for first, last in ranges) or "nothing"


def _cover(
    data: int,
    number: int,
    steps: dict[int, Claim],
    outcomes: dict[int, _Trained],
    finished: bool,
    end: End | None,
    report: Report,
) -> Epoch:
    """Return which samples of an epoch all participants together used, missed or repeated."""
    first = next(iter(steps.values()))
    total, last_step = first.total, max(steps)
    missing_steps = sorted(set(range(last_step + 1)) - set(steps))
    if missing_steps:
        report.problems.append(f"{name_of(data, number)}: no record of step {', '.join(map(str, missing_steps))}")
    times = np.zeros(total, dtype=np.int32)
    trained: list[tuple[int, Range]] = []
    given_back = 0
    for step, claim in steps.items():
        if claim.order != first.order:
            continue  # `_attend` has reported the step
        own, back = outcomes[step]
        given_back += back
        for begin, stop in own:
            times[begin:stop] += 1
            trained.append((step, (begin, stop)))
    order = sharding.permutation(total, first.seed, number, first.shuffle)
    left = np.flatnonzero(times == 0)
    dropped = np.zeros(total, dtype=bool)
    if end is not None and end.drop_remainder and sharding.count(end.left) < end.global_batch:
        dropped[sharding.positions(end.left)] = True
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


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m ms_kungfu.dataset.audit",
        description="Proves from the ledger of an ElasticDataset that each sample was trained once per epoch.",
        epilog="Exit status: 0 exact; 1 not exact, the report says why; 2 no ledger, or a ledger of a newer format.",
    )
    parser.add_argument("logdir", metavar="LOGDIR", type=Path, help="the training run's ledger= or KUNGFU_LEDGER_DIR")
    parser.add_argument("--json", action="store_true", help="the whole report as JSON")
    args = parser.parse_args(argv)
    try:
        files, problems, notes = read(args.logdir)
    except (OSError, KungFuError) as error:
        parser.error(f"can't read the ledger: {error}")
    if not files:
        parser.error(f"{args.logdir} has no ledger: there is no file *.jsonl")
    report = audit(files, problems, notes)
    if args.json:
        print(json.dumps({"exact": report.exact, "proves": report.proves, **asdict(report)}, indent=2))
    else:
        print(to_text(report))
    return 0 if report.exact else 1


if __name__ == "__main__":
    sys.exit(main())
