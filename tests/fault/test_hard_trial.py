"""The hard trial itself: a short one finds nothing, and one over a program that errs finds it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.fault import trial

pytestmark = pytest.mark.timeout(300)


def test_a_short_trial_breaks_nothing() -> None:
    counts = trial.run(kills=6, seed=1)
    assert counts.broken == []
    assert counts.killed >= 6


@pytest.mark.long
def test_a_short_trial_over_hosts_breaks_nothing() -> None:
    counts = trial.run(kills=12, seed=1, hosts=3)
    assert counts.broken == []
    assert counts.killed >= 12


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        ("self.weights += trained\n", "self.weights += trained * (self.step != 7)\n", "wrong weights"),
        ("SAMPLES, BATCH = 60, 12", "SAMPLES, BATCH = 48, 12", None),
        ("self.step += 1\n        return True", "self.step += 1\n        return self.step < 9", "lost"),
        ("self.step += 1\n        return True", "self.step += 1\n        return bool(1 / (9 - self.step))", "lost"),
    ],
    ids=["a sample is lost", "nothing is wrong", "it ends too early", "an exception"],
)
def test_what_a_program_does_wrong_is_found(tmp_path: Path, right: str, wrong: str, found: str | None) -> None:
    text = trial.PROGRAM.read_text()
    assert text.count(right) == 1
    programs = tmp_path / "programs"
    shutil.copytree(trial.PROGRAM.parent, programs)  # it imports from its neighbours
    program = programs / trial.PROGRAM.name
    program.write_text(text.replace(right, wrong))
    plan = trial.Plan(size=2, recover="shrink", standbys=0, step_s=0.002, kills=1, every_s=2.0)
    counts = trial.Counts()
    folder = tmp_path / "job"
    folder.mkdir()
    trial.Job(plan, random.Random(1), folder, counts, patience_s=60.0, program=program, logs=tmp_path).run()
    assert counts.killed == 1 or found is not None
    assert not any("before anybody" in text for text in counts.broken)
    assert [text.split(":")[0] for text in counts.broken[:1]] == ([] if found is None else [found]), counts.broken
