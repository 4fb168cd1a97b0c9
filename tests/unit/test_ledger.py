"""The ledger and its audit over simulated trainings: workers come, go and die at any instant of a step."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ms_kungfu.dataset import audit, ledger, sharding
from ms_kungfu.dataset.dealing import BatchSize
from ms_kungfu.dataset.history import in_order
from ms_kungfu.dataset.sharding import EpochCursor, count
from ms_kungfu.errors import KungFuError
from tests.conftest import examples


class Worker:
    """A process: its own view of the walk, its own file."""

    made = 0

    def __init__(self, folder, total, state=None, drop_remainder=False, errors="raise"):
        Worker.made += 1
        self.uid = Worker.made
        self.walk = EpochCursor(total, drop_remainder)
        if state is not None:
            self.walk.restore(json.loads(json.dumps(state)))
        self.ledger = ledger.Ledger(folder, 0, errors)

    def commit(self, version, size, rank, participants, record, common):
        epoch = self.walk.epoch
        for step in self.walk.commit(participants):
            if record:
                ledger.runtime.uid = lambda: self.uid
                full = {**common, "version": version, "size": size, "participants": participants}
                length = count(step.batch)
                delivered = step.share(rank) or sharding.part(step.batch, length - 1, length)
                self.ledger.step(epoch, step, rank, delivered, full)

    def end_epoch(self, version, size, rank, common):
        ledger.runtime.uid = lambda: self.uid
        self.ledger.end(self.walk, rank, {**common, "version": version, "size": size})
        self.walk.end_epoch()


def simulate(folder, rng, total, epochs, global_batch=None, per_worker=4, drop_remainder=False, seed=3):
    """Trains `epochs` under random resizes and deaths.

    Returns how many samples deaths gave back, and how many samples of each epoch were trained after each of its steps.
    """
    Worker.made = 0  # the same files for the same seed
    living = {rank: Worker(folder, total, drop_remainder=drop_remainder) for rank in range(rng.randint(1, 5))}
    version, size, members = 0, len(living), sorted(living)
    given_back = steps = 0
    progress = [[]]
    while True:
        batch = global_batch or per_worker * len(members)
        common = {"global_batch": batch, "drop_remainder": drop_remainder, "total": total, "seed": seed}
        common["shuffle"] = True
        handed_out = {worker.walk.take(batch, members) for worker in living.values()}
        assert len(handed_out) == 1, "all workers have the same step"
        step = handed_out.pop()
        if step is None:
            for rank, worker in living.items():
                worker.end_epoch(version, size, rank, common)
                if worker.walk.epoch == epochs:
                    epochs = 0
            if epochs == 0:
                return given_back, progress
            progress.append([])
            continue
        steps += 1
        assert steps < 10_000, "it comes to an end"
        # Some die before the outcome is decided, some after it before they record it, some after that.
        before, unrecorded, after = set(members) - set(living), set(), set()
        if rng.random() < 0.3:
            for rank in rng.sample(sorted(living), rng.randint(0, len(living) - 1)):
                rng.choice((before, unrecorded, after)).add(rank)
        participants = [rank for rank in members if rank not in before]
        lost = sum(count(step.share(rank)) for rank in before)
        # If no rank with a sample of its own is left, the repeated one is trained.
        given_back += lost - (lost == count(step.batch))
        trained = count(step.batch) - lost + (lost == count(step.batch))
        progress[-1].append(trained + (progress[-1][-1] if progress[-1] else 0))
        for rank in participants:
            living[rank].commit(version, size, rank, participants, rank not in unrecorded, common)
        living = {rank: worker for rank, worker in living.items() if rank not in before | unrecorded | after}
        # The survivors know the participants. A rank that died later gets one share more, unless the cluster changes.
        members = participants
        if rng.random() < 0.3:
            state = living[min(living)].walk.state()
            newest = [living[rank] for rank in sorted(living)][: rng.randint(1, 5)]
            newest += [Worker(folder, total, state, drop_remainder) for _ in range(rng.randint(0, 2))]
            version, living = version + 1, dict(enumerate(newest))
            size, members = len(living), sorted(living)


@pytest.fixture(autouse=True)
def fake_runtime(monkeypatch):
    class Runtime:
        uid = staticmethod(lambda: 0)

    monkeypatch.setattr(ledger, "runtime", Runtime())


def verdict(folder):
    return audit.audit(*audit.read(Path(folder)))


@settings(deadline=None, max_examples=examples(150))
@given(
    seed=st.integers(0, 2**32),
    total=st.integers(1, 150),
    epochs=st.integers(1, 3),
    global_batch=st.sampled_from([None, 1, 8, 24]),
    drop_remainder=st.booleans(),
)
@example(seed=0, total=1, epochs=2, global_batch=24, drop_remainder=False)
def test_each_sample_once_an_epoch_whatever_happens(seed, total, epochs, global_batch, drop_remainder):
    drop_remainder = drop_remainder and total > 40
    with tempfile.TemporaryDirectory() as folder:
        given_back, progress = simulate(
            Path(folder), random.Random(seed), total, epochs, global_batch, drop_remainder=drop_remainder
        )
        report = verdict(folder)
        assert report.problems == []
        assert report.exact
        assert [epoch.epoch for epoch in report.epochs] == list(range(epochs))
        for epoch in report.epochs:
            assert epoch.finished
            assert epoch.trained + len(epoch.dropped) == total
            assert drop_remainder or not epoch.dropped
        assert sum(epoch.given_back for epoch in report.epochs) == given_back
        assert [(epoch.steps, epoch.trained) for epoch in report.epochs] == [(len(p), p[-1]) for p in progress]


@pytest.fixture
def recorded(tmp_path):
    """Two epochs of 64 samples at 2 workers, none of which dies: (folder, lines of rank 0, lines of rank 1)."""
    workers = [Worker(tmp_path, 64), Worker(tmp_path, 64)]
    common = {"global_batch": 16, "drop_remainder": False, "total": 64, "seed": 0, "shuffle": True}
    for _ in range(2):
        while all(worker.walk.take(16, [0, 1]) for worker in workers):
            for rank, worker in enumerate(workers):
                worker.commit(0, 2, rank, [0, 1], True, common)
        for rank, worker in enumerate(workers):
            worker.end_epoch(0, 2, rank, common)
    # Not by name: whose is the greater one is chance.
    return sorted(tmp_path.glob("*.jsonl"), key=lambda path: json.loads(path.read_text().splitlines()[1])["rank"])


def change(path, edit, where=lambda line: True):
    """Writes the records of a file anew; `edit` returns the new one, a list of new ones, or None."""
    header, *records = map(json.loads, path.read_text().splitlines())
    lines = []
    for line in records:
        new = edit(line) if where(line) else line
        lines += new if isinstance(new, list) and new != [3] else [] if new is None else [new]
    write(path, [header, *lines])


def write(path, lines, form=2):
    """Lines as a worker writes them; the first is the header."""
    crc, text = 0, b""
    for number, line in enumerate(lines[2 - form :]):
        if not isinstance(line, dict):
            line, values = json.dumps(line).encode(), None
        else:
            values = {key: value for key, value in line.items() if key != "crc"}
            line = json.dumps(values).encode()
        if form == 2 and values is not None:
            line, crc = ledger.seal(values, crc if number else 0)
            crc = crc if number else 0
        text += line + b"\n"
    path.write_bytes(text)


def as_first_format(path):
    """The file as ms_kungfu wrote it before ledgers had a header."""
    write(path, [json.loads(line) for line in path.read_text().splitlines()], form=1)


def at(epoch, step):
    return lambda line: (line["epoch"], line.get("step")) == (epoch, step)


def behind(epoch, step):
    """Lines that come after this step."""
    return lambda line: (line["epoch"], line.get("step", line.get("steps"))) > (epoch, step)


def test_a_whole_ledger_is_exact(recorded):
    report = verdict(recorded[0].parent)
    assert report.exact
    assert [(e.steps, e.trained, e.finished) for e in report.epochs] == [(4, 64, True)] * 2
    assert "each of 64 samples once" in audit.to_text(report)


def tell_contents(path, contents):
    header, *records = map(json.loads, path.read_text().splitlines())
    write(path, [{**header, "contents": contents}, *records])


def test_audit_of_equal_contents_proves_numbers_and_contents(recorded):
    for path in recorded:
        tell_contents(path, {"samples": 8, "some": "ab"})
    report = verdict(recorded[0].parent)
    assert (report.exact, report.proves, report.epochs[0].compared) == (True, "numbers and contents", 8)
    text = audit.to_text(report)
    assert "contents: 8 of 64 samples compared, the same on all workers" in text
    assert text.endswith("2 finished epochs (numbers and contents)")


def test_audit_of_contents_that_one_file_lacks_proves_numbers_alone(recorded):
    tell_contents(recorded[0], {"samples": 8, "some": "ab"})
    report = verdict(recorded[0].parent)
    assert (report.exact, report.proves, report.epochs[0].compared) == (True, "numbers", 0)


@pytest.mark.parametrize(
    "other", [{"samples": 8, "some": "cd"}, {"samples": 64, "some": "ab", "all": "cd"}], ids=["some", "all"]
)
def test_audit_of_other_contents_behind_the_numbers_is_not_exact(recorded, other):
    tell_contents(recorded[0], {"samples": 64, "some": "ab", "all": "ab"})
    tell_contents(recorded[1], other)
    report = verdict(recorded[0].parent)
    assert not report.exact
    assert "the same sample numbers stood for different contents in the processes" in report.problems[0]


def test_samples_that_were_never_trained_are_named(recorded):
    for path in recorded:
        change(path, lambda line: {**line, "participants": [0]} if line["rank"] == 0 else None, at(0, 1))
    report = verdict(recorded[0].parent)
    assert not report.exact
    order = audit.sharding.permutation(64, 0, 0)
    assert report.epochs[0].missing == sorted(order[24:32].tolist())
    assert report.epochs[1].exact
    assert f"not trained: 8 samples: {', '.join(map(str, report.epochs[0].missing))}" in audit.to_text(report)


def test_samples_that_were_trained_twice_are_named_with_their_steps(recorded):
    edit = lambda line: {**line, "batch": [[0, 16]], "share": [[0, 8]] if line["rank"] == 0 else [[8, 16]]}  # noqa: E731
    for path in recorded:
        change(path, edit, at(1, 2))
    epoch = verdict(recorded[0].parent).epochs[1]
    order = audit.sharding.permutation(64, 0, 1)
    assert epoch.repeated == {int(i): [0, 2] for i in sorted(order[:16])}
    assert epoch.missing == sorted(order[32:48].tolist())


def test_failed_workers_record_of_a_step_committed_without_it_is_ignored(recorded):
    first, second = recorded
    # rank 1 died in the last step of epoch 0, of which it believes to be a part; rank 0 trained its share after it
    for path in recorded:
        change(path, lambda line: None, behind(0, 3))

    def alone(line):
        last = {**line, "participants": [0]}
        return [last, {**last, "step": 4, "members": [0], "batch": [[56, 64]], "share": [[56, 64]]}]

    change(first, alone, at(0, 3))
    report = verdict(first.parent)
    assert report.exact
    assert [e.given_back for e in report.epochs] == [8]
    assert report.notes == [
        "epoch 0, step 3: the record of rank 1 doesn't count, because the rank took no part in the step"
    ]


@pytest.mark.parametrize(("lacks", "exact"), [(2, True), (1, False)])
def test_failed_worker_may_lack_the_steps_of_its_last_update(recorded, lacks, exact):
    """Gradients of two steps are accumulated; rank 1 fails in the second update of epoch 1, before it writes."""
    for path in recorded:
        change(path, lambda line: {**line, "first": line["step"] // 2 * 2}, lambda line: "step" in line)
    change(recorded[1], lambda line: None, lambda line: line["epoch"] == 1 and line.get("step", 4) >= lacks)
    report = verdict(recorded[0].parent)
    assert report.exact == exact
    if not exact:
        (problem,) = report.problems
        assert problem == "epoch 1, step 1: no record of rank 1, which takes part until epoch 1, step 3"


@pytest.mark.parametrize(
    ("edit", "where", "problem"),
    [
        (lambda line: {**line, "seed": 5}, at(0, 2), "epoch 0, step 2: the workers contradict each other"),
        (lambda line: {**line, "batch": [[33, 49]]}, at(0, 2), "the workers contradict each other"),
        (lambda line: {**line, "share": [[40, 47]]}, at(0, 2), r"rank 1 trained \[40,47\), but its share is \[40,48\)"),
        (lambda line: None, at(1, 1), "epoch 1, step 1: no record of rank 1, which takes part until epoch 1, step 3"),
        (lambda line: None, at(1, 1), "line 8: epoch 1, step 2 after epoch 1, step 0: lines are missing, repeated or"),
        (lambda line: {**line, "participants": [1]}, at(0, 1), "epoch 0, step 1: without rank 0, which takes part un"),
        (lambda line: [line, line], at(1, 1), "rank 1 recorded the step twice"),
        (lambda line: {**line, "participants": [0]}, at(0, 0), "line 2: not a record of a step"),
        (lambda line: {**line, "batch": [[0, 65]]}, at(0, 0), "line 2: not a record of a step"),
        (lambda line: {**line, "first": 1}, at(0, 0), "line 2: not a record of a step"),
        (lambda line: {"step": 3}, at(0, 0), "line 2: not a record of a step"),
        (lambda line: {**line, "steps": 5}, lambda line: "steps" in line, "4 steps on record, but the epoch's end is"),
        (lambda line: [3], at(0, 0), "line 2: not a record of a step"),
    ],
)
def test_contradictions_and_damage_are_named(recorded, edit, where, problem):
    change(recorded[1], edit, where)
    report = verdict(recorded[0].parent)
    assert not report.exact
    assert any(re.search(problem, text) for text in report.problems), report.problems


def test_a_step_without_any_record_is_named(recorded):
    for path in recorded:
        change(path, lambda line: None, at(0, 2))
    report = verdict(recorded[0].parent)
    assert "epoch 0: no record of step 2" in report.problems
    assert len(report.epochs[0].missing) == 16


def test_a_torn_last_line_is_no_damage_and_a_torn_line_elsewhere_is(recorded):
    text = recorded[1].read_bytes()
    recorded[1].write_bytes(text[:-20])
    report = verdict(recorded[0].parent)
    assert report.exact
    assert "line 11: incomplete, not counted" in report.notes[0]
    recorded[1].write_bytes(text[:-20] + b"\n")
    assert not verdict(recorded[0].parent).exact


def test_an_unfinished_last_epoch_says_how_far_it_came(recorded):
    for path in recorded:
        change(path, lambda line: None, behind(1, 1))
    report = verdict(recorded[0].parent)
    assert report.exact
    assert "epoch 1: 2 steps so far, 32 of 64 samples, each once" in audit.to_text(report)
    assert audit.to_text(report).endswith("exact: each sample was trained once in each of 1 finished epoch (numbers)")


def test_an_unfinished_epoch_before_the_last_is_not_exact(recorded):
    for path in recorded:
        change(path, lambda line: None, lambda line: line["epoch"] == 0 and line.get("step", 9) > 1)
    assert len(verdict(recorded[0].parent).epochs[0].missing) == 32


@pytest.mark.parametrize("behind_s", [100, -1e6])
def test_a_job_that_resumes_from_a_checkpoint_replaces_what_came_after_it(recorded, behind_s):
    folder = recorded[0].parent
    # an earlier job came to the end of epoch 1; one that resumed from its second step trained these steps again
    copy = folder / "later.jsonl"
    copy.write_text("".join(path.read_text() for path in recorded[:1]))
    change(copy, lambda line: {**line, "job": "later", "time": line["time"] + behind_s})
    change(copy, lambda line: {**line, "members": [0], "participants": [0]})
    change(copy, lambda line: {**line, "share": line["batch"], "size": 1}, lambda line: "batch" in line)
    change(copy, lambda line: None, lambda line: not behind(1, 1)(line))
    report = verdict(folder)
    assert report.exact
    assert report.jobs == 2
    assert "job later begins with epoch 1, step 2: 6 records of earlier jobs" in report.notes[0]


@pytest.mark.parametrize("clocks", [(0, 100, 200), (200, 100, 0), (100, 200, 0)])
def test_jobs_follow_their_numbers_and_not_their_clocks(tmp_path, monkeypatch, clocks):
    """The second and the third go on from one checkpoint; the second has come farther when it dies."""
    for number, (first, last) in enumerate(((0, 3), (2, 4), (2, 4)), 1):
        monkeypatch.setattr(ledger, "job", lambda number=number: f"job{number}")
        monkeypatch.setattr(ledger.time, "time", lambda number=number: 1e6 + clocks[number - 1])
        worker = Worker(tmp_path, 32)
        common = {"global_batch": 8, "drop_remainder": False, "total": 32, "seed": 3, "shuffle": True}
        common["training"] = ("folder", number)
        for step in range(last):
            worker.walk.take(8, (0,))
            worker.commit(0, 1, 0, [0], step >= first, common)
        if number == 3:
            worker.walk.take(8, (0,))
            worker.end_epoch(0, 1, 0, common)
    report = verdict(tmp_path)
    assert (report.exact, report.jobs, report.epochs[0].finished, report.problems) == (True, 3, True, [])
    assert [note.split()[1] for note in report.notes] == ["job2", "job3"]


def test_a_job_of_another_folder_of_checkpoints_goes_by_its_clock() -> None:
    def job(name, when, training, first):
        claim = audit.Claim(0, 1, (0,), (0,), ((0, 8),), 32, 3, True)
        return audit.Record(name, name, when, 0, *first, 0, (), claim, training=training)

    jobs = [job("b", 2.0, ("new", 1), (0, 0)), job("a", 1.0, ("old", 7), (0, 0)), job("c", 0.0, ("new", 2), (0, 1))]
    assert in_order(jobs) == ["a", "b", "c"]


def test_a_synced_ledger_is_on_the_disk_with_its_name(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(ledger.os, "fsync", lambda fd: synced.append(Path(os.readlink(f"/proc/self/fd/{fd}"))))
    worker = Worker(tmp_path, 32)
    worker.ledger.sync()
    assert synced == []  # nothing is on record yet
    common = {"global_batch": 8, "drop_remainder": False, "total": 32, "seed": 3, "shuffle": True}
    worker.walk.take(8, (0,))
    worker.commit(0, 1, 0, [0], True, common)
    worker.ledger.sync()
    (file,) = tmp_path.iterdir()
    assert synced == [file, tmp_path]
    worker.ledger.sync()
    assert synced == [file, tmp_path, file]


@pytest.mark.parametrize("errors", ["raise", "warn"])
def test_a_ledger_that_cannot_be_synced_is_one_that_cannot_be_written(tmp_path, monkeypatch, errors):
    def fsync(fd):
        raise OSError(5, "Input/output error")

    worker = Worker(tmp_path, 32, errors=errors)
    worker.walk.take(8, (0,))
    worker.commit(
        0, 1, 0, [0], True, {"global_batch": 8, "drop_remainder": False, "total": 32, "seed": 3, "shuffle": True}
    )
    monkeypatch.setattr(ledger.os, "fsync", fsync)
    if errors == "raise":
        with pytest.raises(OSError, match="Input/output error: the ledger .* can't be written"):
            worker.ledger.sync()
    else:
        worker.ledger.sync()
    assert verdict(tmp_path).epochs[0].steps == 1


def test_a_worker_of_two_datasets_is_one_worker(recorded):
    for path in recorded:
        copy = path.with_name(path.name.replace("-0.jsonl", "-1.jsonl"))
        copy.write_text(path.read_text())
        change(copy, lambda line: {**line, "data": 1})
    report = verdict(recorded[0].parent)
    assert report.exact
    assert (report.workers, len(report.epochs)) == (2, 4)


def test_ledger_command_prints_an_outcome_and_exits_by_it(recorded):
    folder = recorded[0].parent

    def run(*arguments):
        command = [sys.executable, "-m", "ms_kungfu.dataset.audit", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    exact = run(folder)
    assert exact.returncode == 0
    assert exact.stdout.splitlines() == [
        "ledger of 2 workers in 1 job",
        "epoch 0: 4 steps, each of 64 samples once",
        "epoch 1: 4 steps, each of 64 samples once",
        "exact: each sample was trained once in each of 2 finished epochs (numbers)",
    ]
    document = json.loads(run(folder, "--json").stdout)
    assert document["exact"] is True
    assert [epoch["trained"] for epoch in document["epochs"]] == [64, 64]
    header, _, *rest = recorded[1].read_text().splitlines(True)
    recorded[1].write_text("".join([header, *rest]))
    wrong = run(folder)
    assert wrong.returncode == 1
    assert "problem: epoch 0, step 0: no record of rank 1" in wrong.stdout
    assert "NOT exact" in wrong.stdout.splitlines()[-1]
    for nothing in (folder / "nowhere", Path(folder, "empty")):
        Path(folder, "empty").mkdir(exist_ok=True)
        none = run(nothing)
        assert none.returncode == 2
        assert "has no ledger" in none.stderr
        assert "Traceback" not in none.stderr


def test_a_line_that_cannot_be_written_whole_is_an_error(tmp_path):
    worker = Worker(tmp_path, 64)
    worker.walk.take(16, [0])
    with open("/dev/full", "ab", buffering=0) as worker.ledger._file, pytest.raises(OSError, match="No space"):
        worker.commit(0, 1, 0, [0], True, {})


# -- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[1, 2], ids=["first format", "present format"])
def either(recorded, request):
    """`recorded` in both formats."""
    if request.param == 1:
        for path in recorded:
            as_first_format(path)
    return recorded


def test_both_formats_are_read(either):
    report = verdict(either[0].parent)
    assert report.exact
    assert report.problems == report.notes == []
    assert [(e.steps, e.trained, e.finished) for e in report.epochs] == [(4, 64, True)] * 2


def test_a_missing_file_is_found(either):
    either[1].unlink()
    report = verdict(either[0].parent)
    assert not report.exact
    problem = "epoch 0, step 0: no record of rank 1, which takes part until epoch 1, step 3; the same for 6 later steps"
    assert problem in report.problems
    assert report.notes[0].startswith("there are no files of rank 1; if the hosts don't share a folder, copy")


def test_a_missing_epoch_is_found_though_no_file_has_a_line_of_it(recorded):
    for path in recorded:  # the lines are sealed again: nothing in a file tells
        change(path, lambda line: None, lambda line: line["epoch"] == 0)
    report = verdict(recorded[0].parent)
    assert not report.exact
    assert report.problems == ["epoch 0: no record of any step"]


def test_an_epoch_of_which_only_the_end_is_on_record_is_found(recorded):
    for path in recorded:
        change(path, lambda line: None, lambda line: line["epoch"] == 1 and "step" in line)
    assert "epoch 1: no record of any step" in verdict(recorded[0].parent).problems


def test_a_job_without_a_step_is_found(recorded):
    folder = recorded[0].parent
    for path in recorded:
        change(path, lambda line: None, lambda line: "step" in line)
    report = verdict(folder)
    assert any(re.fullmatch("job [0-9a-f]+: no step is on record", text) for text in report.problems)
    for path in recorded:
        change(path, lambda line: None)
    report = verdict(folder)
    assert not report.exact
    assert audit.to_text(report).endswith("NOT exact: no step is on record")


@pytest.mark.parametrize("row", [1, 4, 5, 9])
@pytest.mark.parametrize("kind", ["cut", "doubled", "missing", "altered", "moved"])
def test_damage_to_a_line_is_found_where_it_is(recorded, kind, row):
    lines = recorded[1].read_bytes().splitlines(True)
    lines[row : row + 1] = {
        "cut": [lines[row][:70] + b"\n"],
        "doubled": [lines[row], lines[row]],
        "missing": [],
        "altered": [lines[row].replace(b'"seed":0', b'"seed":1')],
        "moved": [lines[row + 1], lines[row]],
    }[kind]
    if kind == "moved":
        del lines[row + 2]
    recorded[1].write_bytes(b"".join(lines))
    report = verdict(recorded[0].parent)
    assert not report.exact
    where = f"{recorded[1].name}, line {row + (2 if kind == 'doubled' else 1)}"
    assert any(text.startswith(where) for text in report.problems), report.problems


def test_a_file_without_its_header_is_found(recorded):
    recorded[1].write_bytes(b"".join(recorded[1].read_bytes().splitlines(True)[1:]))
    assert not verdict(recorded[0].parent).exact


def test_delivery_other_than_the_share_is_found_also_with_repeated_samples(tmp_path):
    """One sample, two workers: rank 1 repeats it."""
    workers = [Worker(tmp_path, 1), Worker(tmp_path, 1)]
    common = {"global_batch": 8, "drop_remainder": False, "total": 1, "seed": 0, "shuffle": True}
    for rank, worker in enumerate(workers):
        worker.walk.take(8, [0, 1])
        worker.commit(0, 2, rank, [0, 1], True, common)
    lines = [json.loads(path.read_text().splitlines()[1]) for path in sorted(tmp_path.glob("*.jsonl"))]
    assert [line["share"] for line in lines] == [[[0, 1]]] * 2
    assert verdict(tmp_path).exact


def test_a_newer_format_is_refused_by_its_version(recorded):
    header, *lines = recorded[1].read_bytes().splitlines(True)
    newer = header.replace(b'"ledger":2', b'"ledger":4').replace(ledger.VERSION.encode(), b"7.8.9")
    recorded[1].write_bytes(b"".join([newer, *lines]))
    command = [sys.executable, "-m", "ms_kungfu.dataset.audit", str(recorded[0].parent)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "has ledger format 4 and was written by ms_kungfu 7.8.9, " in done.stderr
    assert "reads formats 1 to 3" in done.stderr


def test_an_entry_that_a_later_version_adds_is_no_damage(recorded):
    for path in recorded:
        header, *lines = map(json.loads, path.read_text().splitlines())
        write(path, [{**header, "shards": 8}, *({**line, "weights": "5f3a"} for line in lines)])
    assert verdict(recorded[0].parent).exact


def damage(folder, rng):
    """Does one thing to the files in `folder`; says what."""
    path = rng.choice([path for path in sorted(folder.glob("*.jsonl")) if path.stat().st_size])
    content = path.read_bytes()
    lines = content.splitlines(True)
    row, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    kind = rng.choice(
        [
            "no file",
            "cut",
            "cut at a line",
            "no line",
            "doubled line",
            "moved line",
            "byte",
            "number",
            "copied",
            "foreign",
        ]
    )
    if kind == "no file":
        path.unlink()
        return kind
    if kind == "copied":
        path.with_name(f"copy-{path.name}").write_bytes(content)
        return kind
    if kind == "cut":
        content = content[: rng.randrange(len(content))]
    elif kind == "byte":
        at = rng.randrange(len(content))
        content = content[:at] + bytes([content[at] ^ rng.randrange(1, 256)]) + content[at + 1 :]
    elif kind == "number":
        numbers = list(re.finditer(rb"\d+", lines[row]))
        if not numbers:
            return "nothing"  # earlier damage has left none there
        found = rng.choice(numbers)
        value = b"%d" % max(0, int(found[0]) + rng.choice((-2, -1, 1, 2)))
        lines[row] = lines[row][: found.start()] + value + lines[row][found.end() :]
    elif kind == "cut at a line":
        del lines[row:]
    elif kind == "no line":
        del lines[row]
    elif kind == "doubled line":
        lines.insert(row, lines[row])
    elif kind == "moved line":
        lines.insert(other, lines.pop(row))
    elif kind == "foreign":
        lines[row] = rng.choice(rng.choice(sorted(folder.glob("*.jsonl"))).read_bytes().splitlines(True) or [b""])
    path.write_bytes(content if kind in ("cut", "byte") else b"".join(lines))
    return f"{kind}: {path.name}, line {row + 1}"


@settings(deadline=None, max_examples=examples(300))
@example(seed=455, total=1, epochs=1, global_batch=None, drop_remainder=False, times=3)
@given(
    seed=st.integers(0, 2**32),
    total=st.integers(1, 80),
    epochs=st.integers(1, 3),
    global_batch=st.sampled_from([None, 8, 24]),
    drop_remainder=st.booleans(),
    times=st.integers(1, 3),
)
def test_damaged_ledger_that_passes_the_audit_has_only_trained_samples(
    seed, total, epochs, global_batch, drop_remainder, times
):
    """It may be less of it: a cut at the end of all files leaves a shorter training."""
    rng = random.Random(seed)
    drop_remainder = drop_remainder and total > 40
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _, progress = simulate(folder, rng, total, epochs, global_batch, drop_remainder=drop_remainder)
        whole = verdict(folder)
        assert whole.exact
        done = [damage(folder, rng) for _ in range(times) if any(p.stat().st_size for p in folder.glob("*.jsonl"))]
        try:
            report = verdict(folder)
        except KungFuError:
            return  # a format that there isn't yet
        if not report.exact:
            return
        for epoch, before in zip(report.epochs, whole.epochs):
            if epoch.finished:
                assert epoch == before, done
            else:
                assert epoch is report.epochs[-1], done
                assert epoch.trained == progress[epoch.epoch][epoch.steps - 1], done
        assert len(report.epochs) <= len(whole.epochs)


# -- a full disk ------------------------------------------------------------------------------------------------------

_FILLED = """
import json, resource, sys
from pathlib import Path
from ms_kungfu.dataset import sharding, ledger

folder, errors, room = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
common = {"version": 0, "size": 1, "participants": [0], "global_batch": 8, "drop_remainder": False, "total": 64}
common.update(seed=0, shuffle=True)
walk, book = sharding.EpochCursor(64), ledger.Ledger(folder, 0, errors)
for epoch in range(2):
    while walk.take(8, [0]):
        for step in walk.commit([0]):
            book.step(epoch, step, 0, step.share(0), common)
    book.end(walk, 0, common)
    walk.end_epoch()
"""


@pytest.mark.parametrize("room", [300, 1500, 2300], ids=["not even the header", "after two steps", "after five"])
@pytest.mark.parametrize("errors", ["raise", "warn"])
def test_a_full_disk_ends_training_or_the_record_and_the_audit_names_it(tmp_path, errors, room):
    folder = tmp_path / "ledger"
    done = subprocess.run(
        [sys.executable, "-c", _FILLED, folder, errors, str(room)], capture_output=True, text=True, timeout=60
    )
    if errors == "raise":
        assert done.returncode == 1
        assert re.search(r"\nOSError: \[Errno \d+\] File too large: the ledger \S+ can't be written; ", done.stderr)
        assert (
            "training ends, because later steps can't be recorded; ledger_errors='warn' would continue training"
            in done.stderr
        )
    else:
        assert (done.returncode, done.stderr.count("File too large")) == (0, 1)
        assert "Training continues without the ledger, because of ledger_errors='warn'" in done.stderr
    report = verdict(folder)
    if room < 500:
        assert not report.exact
        assert "or its disk was full, before its first line" in report.notes[0]
        return
    steps = report.epochs[0].steps
    assert 0 < steps < 8
    (text,) = report.problems if errors == "warn" else report.notes
    assert f"no record from epoch 0, step {steps} on: File too large; its worker " in text
    assert report.exact == (errors == "raise")
    assert all(line.endswith(("}", " ")) for line in next(folder.iterdir()).read_text().splitlines())


def test_only_two_ways_to_take_an_error(tmp_path):
    with pytest.raises(ValueError, match="ledger_errors must be 'raise' or 'warn', got 'ignore'"):
        ledger.Ledger(tmp_path, 0, "ignore")


def test_integers_of_other_types_are_written_as_integers():
    """`seal` accepts plain integers alone, and a program may compute its batch size with NumPy."""
    size = BatchSize(None, np.int64(8), np.int64(2))
    line, _ = ledger.seal({"global_batch": size.of(2), "shards": size.shards})
    assert line.startswith(b'{"global_batch":8,"shards":2,"crc":')
