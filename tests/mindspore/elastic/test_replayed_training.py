"""A training with shards that is run again: the same bits, or the step and the parameter that differ."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ms_kungfu.dataset import conditions, ledger
from tests.conftest import long
from tests.mindspore.elastic.conftest import PROGRAMS

PROGRAM = "sharded.py"


@pytest.fixture
def replay(tmp_path):
    """``replay(reports, options, arguments)``: the exit status, the last line printed, and all that went to stderr."""

    def run(reports, options, *arguments, out=None):
        out = out or tmp_path / "again"
        out.mkdir(exist_ok=True)
        words = [sys.executable, "-m", "ms_kungfu.replay", reports.ledger, *options]
        words += ["--", sys.executable, PROGRAMS / PROGRAM, out, *arguments]
        done = subprocess.run(
            list(map(str, words)), cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
        )
        return done.returncode, (done.stdout.splitlines() or [""])[-1], done.stderr

    return run


@pytest.mark.parametrize(
    ("flips", "said"),
    [
        (["4:1:flip"], "step 4: parameter '0.weight' differs at rank 1; rank 0 had the same bits as this run"),
        long(["4:0:flip", "4:1:flip"], "step 4: parameter '0.weight' differs: "),
        # Between two fingerprints: by the first behind it all that is trained has followed.
        long(["3:0:flip", "3:1:flip"], "step 4: parameter '0.weight' differs: "),
    ],
)
def test_a_flipped_bit_is_named_by_step_and_parameter(run_elastic, replay, flips, said):
    # Where it is one worker's alone the end of training finds it, too, and the audit.
    differs = len(flips) == 1
    seen = run_elastic(PROGRAM, "graph", "plain", "8", "none", "2", *flips, np=2, status=int(differs))
    assert ("step 0: after this step '0.weight' differed between workers" in str(seen.audit().problems)) == differs
    status, last, error = replay(seen, ["--until", 6], "graph", "plain", "8", "none", "2")
    assert status == 1, error
    assert last.startswith(said)
    assert last.endswith("; the same up to step 2, in 1 fingerprint")


@pytest.mark.long
def test_every_history_of_the_cluster_is_one_workers(run_elastic, replay):
    arguments = "graph", "dropout", "8", "2:3", "2"
    seen = run_elastic(PROGRAM, *arguments, "4:0:1", np=2)
    assert seen.audit().exact
    # The schedule asks for sizes that the replay, which has no launcher, doesn't want.
    status, last, error = replay(seen, ["--until", 6], *arguments)
    assert (status, last) == (0, "same bits: 3 fingerprints up to step 6"), error
    assert "numeric environment" not in error
    # Another program is none that bits can be compared with.
    status, _, error = replay(seen, [], "graph", "norm", "8", "none", "2")
    assert status == 2
    assert "is in this program only; start the program with the arguments and the data of the recorded run" in error


def files_in(folder):
    return {path.name: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.iterdir()}


@pytest.mark.long
def test_a_replay_goes_on_from_a_checkpoint_and_leaves_those_there_are(run_elastic, run_program, replay, monkeypatch):
    arguments = "graph", "saved", "8", "none", "2"
    seen = run_elastic(PROGRAM, *arguments, np=2)
    checkpoints, models = seen.folder / "checkpoints", seen.folder / "models"
    before = files_in(checkpoints), files_in(models)
    assert {"step-00000004.ckpt", "step-00000006.ckpt"} <= set(before[0])
    begins = [[], ["--from", checkpoints / "step-00000004.ckpt"]]
    for options, count in zip(begins, ("3 fingerprints", "1 fingerprint")):
        status, last, error = replay(seen, options, *arguments, out=seen.folder)
        assert (status, last) == (0, f"same bits: {count} up to step 6"), error
    assert (files_in(checkpoints), files_in(models)) == before
    # A job that goes on under other conditions says so, and a ledger of both can't be run again in one piece.
    (own,) = {header["conditions"]["isa"] for header in ledger.headers(seen.ledger)}
    assert own in conditions.CAPS.values()
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX")
    output = run_program(PROGRAMS / PROGRAM, seen.folder, *arguments[:-1], "3", np=1)
    assert output.count("numeric environment differs: path=") == 1
    assert f'differing="instruction set {own} there and AVX here' in output
    status, _, error = replay(seen, [], *arguments[:-1], "3")
    assert status == 2
    assert f"was recorded in several numeric environments (instruction set {own} in job " in error


def test_a_replay_uses_the_shards_that_the_recorded_run_chose(run_elastic, replay, two_cores):
    arguments = "graph", "auto", "4", "none", "2"
    seen = run_elastic(PROGRAM, *arguments, np=2)
    assert "dataset: shards=2 samples=8" in seen.output
    status, last, error = replay(seen, [], *arguments)
    assert status == 0, error
    assert last.startswith("same bits: ")
