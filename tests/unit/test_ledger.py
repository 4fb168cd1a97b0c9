"""The ledger and its audit over simulated trainings: workers come, go and die at any instant of a step."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ms_kungfu.dataset import audit, ledger
from ms_kungfu.dataset.dealing import Walk, count


class Worker:
    """A process: its own view of the walk, its own file."""

    made = 0

    def __init__(self, folder, total, state=None, drop_remainder=False):
        Worker.made += 1
        self.uid = Worker.made
        self.walk = Walk(total, drop_remainder)
        if state is not None:
            self.walk.restore(json.loads(json.dumps(state)))
        self.ledger = ledger.Ledger(folder, 0)

    def commit(self, version, size, rank, participants, record, common):
        epoch = self.walk.epoch
        for step in self.walk.commit(participants):
            if record:
                ledger.runtime.uid = lambda: self.uid
                full = {**common, "version": version, "size": size, "participants": participants}
                self.ledger.step(epoch, step, rank, full)

    def end_epoch(self, version, size, rank, common):
        ledger.runtime.uid = lambda: self.uid
        self.ledger.end(self.walk, rank, {**common, "version": version, "size": size})
        self.walk.end_epoch()


def simulate(folder, rng, total, epochs, global_batch=None, per_worker=4, drop_remainder=False, seed=3):
    """Trains `epochs` under random resizes and deaths; returns how many samples deaths gave back."""
    living = {rank: Worker(folder, total, drop_remainder=drop_remainder) for rank in range(rng.randint(1, 5))}
    version, size, members = 0, len(living), sorted(living)
    given_back = steps = 0
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
                return given_back
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
        # Where nobody with a sample of its own is left, the repeated one is trained.
        given_back += lost - (lost == count(step.batch))
        for rank in participants:
            living[rank].commit(version, size, rank, participants, rank not in unrecorded, common)
        living = {rank: worker for rank, worker in living.items() if rank not in before | unrecorded | after}
        # The survivors know who took part. Who died after that is dealt to once more, unless the cluster changes.
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


@settings(deadline=None, max_examples=150)
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
        given_back = simulate(
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
    return sorted(tmp_path.glob("*.jsonl"))


def change(path, edit, where=lambda line: True):
    """Rewrites the records of a file; `edit` returns the new one, a list of new ones, or None."""
    lines = []
    for line in map(json.loads, path.read_text().splitlines()):
        new = edit(line) if where(line) else line
        lines += new if isinstance(new, list) else [] if new is None else [new]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


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


def test_samples_that_were_never_trained_are_named(recorded):
    for path in recorded:
        change(path, lambda line: {**line, "participants": [0]} if line["rank"] == 0 else None, at(0, 1))
    report = verdict(recorded[0].parent)
    assert not report.exact
    order = audit.dealing.permutation(64, 0, 0)
    assert report.epochs[0].missing == sorted(order[24:32].tolist())
    assert report.epochs[1].exact
    assert f"not trained: 8 samples: {', '.join(map(str, report.epochs[0].missing))}" in audit.to_text(report)


def test_samples_that_were_trained_twice_are_named_with_their_steps(recorded):
    edit = lambda line: {**line, "batch": [[0, 16]], "share": [[0, 8]] if line["rank"] == 0 else [[8, 16]]}  # noqa: E731
    for path in recorded:
        change(path, edit, at(1, 2))
    epoch = verdict(recorded[0].parent).epochs[1]
    order = audit.dealing.permutation(64, 0, 1)
    assert epoch.repeated == {int(i): [0, 2] for i in sorted(order[:16])}
    assert epoch.missing == sorted(order[32:48].tolist())


def test_a_dead_workers_record_of_a_step_that_was_committed_without_it_does_not_count(recorded):
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
    assert report.notes == ["epoch 0, step 3: the record of rank 1, which is not in the step, doesn't count"]


@pytest.mark.parametrize(
    ("edit", "where", "problem"),
    [
        (lambda line: {**line, "seed": 5}, at(0, 2), "epoch 0, step 2: the workers contradict each other"),
        (lambda line: {**line, "batch": [[33, 49]]}, at(0, 2), "the workers contradict each other"),
        (lambda line: {**line, "share": [[40, 47]]}, at(0, 2), r"rank 1 trained \[40,47\), its share is \[40,48\)"),
        (lambda line: None, at(1, 1), "epoch 1, step 1: no record of rank 1, which has later ones"),
        (lambda line: [line, line], at(1, 1), "rank 1 recorded it twice"),
        (lambda line: {**line, "participants": [0]}, at(0, 0), "line 1: not a record of a step"),
        (lambda line: {**line, "batch": [[0, 65]]}, at(0, 0), "line 1: not a record of a step"),
        (lambda line: {"step": 3}, at(0, 0), "line 1: not a record of a step"),
        (lambda line: {**line, "steps": 5}, lambda line: "steps" in line, "epoch 0: 4 steps on record, its end after"),
        (lambda line: [3], at(0, 0), "line 1: not a record of a step"),
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
    assert "line 10: torn, not counted" in report.notes[0]
    recorded[1].write_bytes(text[:-20] + b"\n")
    assert not verdict(recorded[0].parent).exact


def test_an_unfinished_last_epoch_says_how_far_it_came(recorded):
    for path in recorded:
        change(path, lambda line: None, behind(1, 1))
    report = verdict(recorded[0].parent)
    assert report.exact
    assert "epoch 1: 2 steps so far, 32 of 64 samples, each once" in audit.to_text(report)
    assert audit.to_text(report).endswith("exact: each sample was trained once in each of 1 finished epoch")


def test_an_unfinished_epoch_before_the_last_is_not_exact(recorded):
    for path in recorded:
        change(path, lambda line: None, lambda line: line["epoch"] == 0 and line.get("step", 9) > 1)
    assert len(verdict(recorded[0].parent).epochs[0].missing) == 32


def test_a_job_that_resumes_from_a_checkpoint_replaces_what_came_after_it(recorded):
    folder = recorded[0].parent
    # an earlier job came to the end of epoch 1; one that resumed from its second step trained these steps again
    copy = folder / "later.jsonl"
    copy.write_text("".join(path.read_text() for path in recorded[:1]))
    change(copy, lambda line: {**line, "job": "later", "time": line["time"] + 100, "members": [0], "participants": [0]})
    change(copy, lambda line: {**line, "share": line["batch"], "size": 1}, lambda line: "batch" in line)
    change(copy, lambda line: None, lambda line: not behind(1, 1)(line))
    report = verdict(folder)
    assert report.exact
    assert report.jobs == 2
    assert "job later begins with epoch 1, step 2: 6 records of earlier jobs" in report.notes[0]


def test_the_command_prints_a_verdict_and_exits_by_it(recorded):
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
        "exact: each sample was trained once in each of 2 finished epochs",
    ]
    document = json.loads(run(folder, "--json").stdout)
    assert document["exact"] is True
    assert [epoch["trained"] for epoch in document["epochs"]] == [64, 64]
    recorded[1].write_text("".join(recorded[1].read_text().splitlines(True)[1:]))
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
