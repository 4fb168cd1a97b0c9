"""Fingerprints in a ledger, and what a replay makes of them: what it compares, what it says, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ms_kungfu.dataset import audit, ledger
from ms_kungfu.dataset.replaying import Orders, Outcome, Recorded, difference
from ms_kungfu.dataset.sharding import EpochCursor, count, part
from ms_kungfu.errors import KungFuError
from ms_kungfu.tools import replay
from tests.unit.test_ledger import at, change, fake_runtime, verdict  # noqa: F401  # fake_runtime: a fixture

TOTAL, SHARDS, UNIT = 96, 8, 3  # four steps an epoch
COMMON = {"global_batch": SHARDS * UNIT, "drop_remainder": False, "total": TOTAL, "seed": 3, "shuffle": True}
COMMON.update(version=0, size=2, participants=[0, 1], shards=SHARDS, sums=1, weights=[])
HERE = {"mindspore": "2.10.0", "isa": "AVX2", "cores": 1, "shards": SHARDS}


def bits(step, rank=0):
    return {"fc.weight": f"{step:08x}", "moments.fc.weight": f"{step + 1:08x}"}


@pytest.fixture
def train(tmp_path, monkeypatch):
    """``train(first, last)``: two workers record the steps from `first` to `last`, counted from 1 over all epochs."""
    made, numbers = iter(range(1, 1000)), iter(range(1, 1000))

    def run(first, last, job="a", had=bits, found=HERE, every=2, shards=True):
        monkeypatch.setenv("KUNGFU_JOB", job)
        training = ("folder", next(numbers))
        for rank in (0, 1):
            uid = next(made)
            monkeypatch.setattr(ledger.runtime, "uid", lambda uid=uid: uid)
            own = ledger.Ledger(tmp_path, 0, sharded=shards, conditions=lambda: found, fingerprints=every)
            walk = EpochCursor(TOTAL)
            for step in range(1, last + 1):
                dealt = walk.take(SHARDS * UNIT, [0, 1])
                if dealt is None:
                    if step > first:
                        own.end(walk, rank, COMMON)
                    walk.end_epoch()
                    dealt = walk.take(SHARDS * UNIT, [0, 1])
                if step >= first:
                    told = {**COMMON, "training": training}
                    if not shards:
                        told = {key: value for key, value in told.items() if key not in ("shards", "sums", "weights")}
                    elif own.wants_fingerprint(walk.epoch, dealt.number, step):
                        told["fingerprint"] = {"step": step, "tensors": had(step, rank)}
                    half = count(dealt.batch) // 2
                    share = part(dealt.batch, rank * half, (rank + 1) * half)
                    own.step(walk.epoch, dealt, rank, share, told)
                walk.commit()
        return tmp_path

    return run


def planned(*arguments, **options):
    return [each.step for each in replay.plan(*arguments, **options).recorded]


def test_a_fingerprint_is_an_entry_that_an_earlier_reader_leaves_unread(train):
    folder = train(1, 9)
    report = verdict(folder)
    assert report.exact, audit.to_text(report)
    files, problems, _ = ledger.read(folder)
    assert not problems
    for records in files.values():
        found = {record.fingerprint.step: record.fingerprint.tensors for record in records if record.fingerprint}
        assert found == {step: bits(step) for step in (2, 4, 6, 8)}
    assert [header["conditions"] for header in ledger.headers(folder)] == [HERE, HERE]
    assert {header["ledger"] for header in ledger.headers(folder)} == {3}


def test_an_audit_names_the_first_step_after_which_workers_had_other_bits(train):
    folder = train(1, 9, had=lambda step, rank: bits(step + 7 * (rank == 1 and step >= 6)))
    report = verdict(folder)
    assert not report.exact
    assert report.problems == [
        "epoch 1, step 1: after this step 'fc.weight' differed between workers: 00000006 at rank 0; 0000000d at rank 1 "
        "(and 1 more tensor)"
    ]


@pytest.mark.parametrize(
    "entry",
    [{"step": 0, "tensors": {}}, {"step": 2}, {"step": 2, "tensors": {"w": 1}}, {"step": "2", "tensors": {}}, 7],
)
def test_malformed_fingerprint_is_damage(train, entry):
    folder = train(1, 4)
    change(min(folder.glob("*.jsonl")), lambda line: {**line, "fingerprint": entry}, at(0, 1))
    assert "not a record of a step" in "".join(verdict(folder).problems)


def test_replay_compares_the_steps_that_count_in_the_ledger(train, tmp_path):
    folder = train(1, 9, "a")
    assert planned(folder) == [2, 4, 6, 8]
    assert planned(folder, until=7) == [2, 4, 6]
    found = replay.plan(folder, until=2)
    assert found.conditions == {"0": {"mindspore": "2.10.0", "isa": "AVX2", "cores": 1}}
    assert found.recorded == [
        Recorded(0, 0, 1, 2, (TOTAL, 3, True), ((24, 48),), UNIT, (((0, 1), bits(2)),)),
    ]  # fmt: skip
    # A second job that goes on after step 6: what the first did from there on doesn't count.
    train(7, 12, "b", lambda step, rank: {"fc.weight": f"b{step:07x}"})
    assert planned(folder) == [2, 4, 6, 8, 10, 12]
    last = replay.plan(folder).recorded[3]
    assert last.tensors == (((0, 1), {"fc.weight": "b0000008"}),)
    checkpoint = tmp_path / "step-00000006.ckpt"
    checkpoint.touch()
    assert planned(folder, until=10, checkpoint=checkpoint) == [8, 10]


def test_orders_and_outcomes_are_what_was_saved(train, tmp_path):
    orders = replay.plan(train(1, 5))
    orders.save(tmp_path / "orders.json")
    assert Orders.load(tmp_path / "orders.json") == orders
    assert Outcome.load(tmp_path / "orders.json") == Outcome()
    Outcome(2, 4, "differs").save(tmp_path / "orders.json")
    assert Outcome.load(tmp_path / "orders.json") == Outcome(2, 4, "differs")


def refused(*arguments, **options):
    with pytest.raises(KungFuError) as refusal:
        replay.plan(*arguments, **options)
    return str(refusal.value)


def test_each_ledger_that_cant_be_compared_is_refused_by_a_sentence(train, tmp_path):
    assert "no file *.jsonl" in refused(tmp_path / "nowhere")
    folder = train(3, 9)
    assert "begins in epoch 0 with step 2: give --from CHECKPOINT" in refused(folder)
    checkpoint = tmp_path / "step-00000008.ckpt"
    assert "is not a checkpoint; give a file step-N.ckpt" in refused(folder, checkpoint=checkpoint)
    checkpoint.touch()
    assert "no fingerprint later than step 8; it has fingerprints for steps 4 to 8" in refused(
        folder, checkpoint=checkpoint
    )
    assert "later than step 0 and up to step 1" in refused(train(1, 4, "b"), until=1)
    assert "was recorded in several numeric environments (cores a worker 1 in job b and 2 in job c)" in refused(
        train(5, 8, "c", found={**HERE, "cores": 2})
    )
    assert planned(folder, until=4) == [2, 4]
    assert "has no fingerprints: ElasticTraining" in refused(train(1, 4, "d", every=0))


def test_a_training_without_shards_is_refused(train):
    assert "without shards, and the exact result of such a run depends on its cluster changes" in refused(
        train(1, 4, shards=False)
    )


def recorded(*had):
    return Recorded(0, 0, 1, 2, (TOTAL, 3, True), ((24, 48),), UNIT, had)


@pytest.mark.parametrize(
    ("had", "said"),
    [
        ([((0, 1), bits(2))], ""),
        (
            [((0, 1), {**bits(2), "fc.weight": "deadbeef"})],
            "step 2: parameter 'fc.weight' differs: deadbeef at ranks 0, 1, 00000002 here (and 0 more of 2 tensors)",
        ),
        (
            [((2, 0), bits(2)), ((1,), {**bits(2), "moments.fc.weight": "deadbeef"})],
            "step 2: parameter 'moments.fc.weight' differs at rank 1; ranks 0, 2 had the same bits as this run "
            "(and 0 more of 2 tensors)",
        ),
        (
            [((0,), bits(7)), ((1,), bits(8))],
            "step 2: parameter 'fc.weight' differs: 00000007 at rank 0 and 00000008 at rank 1, 00000002 here (and 1 "
            "more of 2 tensors)",
        ),
    ],
)
def test_differing_tensor_is_named(had, said):
    assert difference(recorded(*had), bits(2)) == said


def test_tensors_of_another_program_are_no_difference_in_bits():
    with pytest.raises(ValueError, match="'bias' is on record only; start the program with the arguments"):
        difference(recorded(((0,), {**bits(2), "bias": "0"})), bits(2))
    with pytest.raises(ValueError, match="'fc.weight' is in this program only"):
        difference(recorded(((0,), {"moments.fc.weight": "3"})), bits(2))


# A program that trains numbers: what ElasticDataset and ElasticTraining do, without MindSpore.
PROGRAM = textwrap.dedent(
    """
    import json, os, sys
    from pathlib import Path
    from ms_kungfu.dataset import replaying
    from ms_kungfu.dataset.sharding import EpochCursor

    common, steps, flipped, isa = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    found = {"isa": isa, "cores": len(os.sched_getaffinity(0))}
    own = replaying.current().begin(0, lambda: found)
    walk = EpochCursor(common["total"])
    for step in range(1, steps + 1):
        dealt = walk.take(24, [0])
        if dealt is None:
            own.end(walk, 0, common)
            walk.end_epoch()
            dealt = walk.take(24, [0])
        told = dict(common)
        if own.wants_fingerprint(walk.epoch, dealt.number, step):
            tensors = {"fc.weight": f"{step:08x}", "moments.fc.weight": f"{step + 1:08x}"}
            if step >= flipped:
                tensors["moments.fc.weight"] = "deadbeef"
            told["fingerprint"] = {"step": step, "tensors": tensors}
        own.step(walk.epoch, dealt, 0, (), told)
        walk.commit()
        print(step, os.environ["ONEDNN_MAX_CPU_ISA"], os.environ["KUNGFU_CORES_PER_WORKER"], flush=True)
    sys.exit(7)
    """
)


@pytest.fixture
def again(tmp_path):
    """``again(folder, *options)`` runs the replay's command line; returns its exit status, the last line that was
    printed, and what went to stderr."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def run(folder, *options, steps=9, flipped=99, isa="AVX2", **changed):
        common = json.dumps({**COMMON, "size": 1, "participants": [0], **changed})
        command = [sys.executable, program, common, steps, flipped, isa]
        words = [sys.executable, "-m", "ms_kungfu.replay", folder, *options, "--", *command]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60, check=False)
        return done.returncode, (done.stdout.splitlines() or [""])[-1], done.stderr

    return run


def test_the_same_bits_end_the_program_behind_the_last_that_is_compared(train, again):
    folder = train(1, 12)
    status, said, error = again(folder, "--until", 7)
    assert (status, said) == (0, "same bits: 3 fingerprints up to step 6")
    assert "comparing 3 fingerprints up to step 6, on 1 core with ONEDNN_MAX_CPU_ISA=AVX2" in error
    assert "numeric environment" not in error


def test_the_first_difference_is_named_and_ends_the_program(train, again):
    status, said, _ = again(train(1, 12), flipped=5)
    assert status == 1
    assert said == (
        "step 6: parameter 'moments.fc.weight' differs: 00000007 at ranks 0, 1, deadbeef here (and 0 more of 2 "
        "tensors); the same up to step 4, in 2 fingerprints"
    )


def test_replay_on_another_machine_is_reported_before_training_begins(train, again):
    status, _, error = again(train(1, 4), isa="AVX")
    assert status == 0
    assert 'differing="instruction set AVX2 there and AVX here"' in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"seed": 4},
            "step 2: the number of samples, seed and shuffle were (96, 3, True) in the recorded run and are (96, 4",
        ),
        ({"global_batch": 48}, "step 2: the samples per shard were 3 in the recorded run and are 6"),
        ({"size": 2}, "a replay runs the program as one worker; leave kungfu-run out"),
        ({"steps": 5}, "ended with exit status 7 when 2 fingerprints of 4, up to step 4, had been compared"),
    ],
)
def test_program_that_cannot_be_compared_is_refused_with_the_reason(train, again, options, said):
    status, _, error = again(train(1, 9), **options)
    assert status == 2
    assert said in error.splitlines()[-1]


def test_a_command_line_that_makes_no_sense_is_one_sentence(train, capsys):
    folder = str(train(1, 4))
    for words, said in (
        ([folder], "pass the program to run again: -- python train.py"),
        ([folder, "--until", "x", "--", "true"], "argument --until: invalid int value: 'x'; -h shows the arguments"),
        ([], "the following arguments are required: LEDGER"),
        ([folder, "--", "/nowhere/program"], "No such file or directory: '/nowhere/program'"),
        (["/nowhere", "--", "true"], "/nowhere has no ledger"),
    ):
        try:
            status = replay.main(words)
        except SystemExit as end:
            status = end.code
        assert status == 2
        *_, last = capsys.readouterr().err.strip().splitlines()
        assert last.startswith("python -m ms_kungfu.replay: ")
        assert said in last


def test_terminated_replay_ends_the_program(train):
    words = [sys.executable, "-m", "ms_kungfu.replay", train(1, 4), "--"]
    words += [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    with subprocess.Popen(list(map(str, words)), stdout=subprocess.PIPE, text=True) as process:
        program = int(process.stdout.readline())
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(program, 0)


def test_more_cores_than_there_are_are_refused(train, capsys):
    folder = train(1, 4, found={**HERE, "cores": len(os.sched_getaffinity(0)) + 1})
    assert replay.main([str(folder), "--", "true"]) == 2
    assert "cores, and this number affects the bits, but this process may use" in capsys.readouterr().err
    assert Path(folder).exists()
