"""The hard trial itself: a short one finds nothing, and one over a program that errs finds it."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.campaigns import driver
from tests.campaigns.jobs import PROGRAMS
from tests.campaigns.kills import Kills, KillsOnHosts, Plan, Trial

pytestmark = pytest.mark.timeout(300)


def test_a_short_trial_breaks_nothing() -> None:
    tally = driver.run(Kills.made(), 6, 1)
    assert tally.broken == []
    assert tally.struck >= 6


@pytest.mark.long
def test_a_short_trial_over_hosts_breaks_nothing() -> None:
    tally = driver.run(KillsOnHosts.made(), 12, 1)
    assert tally.broken == []
    assert tally.struck >= 12


@pytest.mark.long
@pytest.mark.parametrize(
    ("right", "wrong", "found"),
    [
        ("self.weights[0] += trained\n", "self.weights[0] += trained * (self.step != 3)\n", "wrong weights"),
        ("SAMPLES, BATCH = 60, 12", "SAMPLES, BATCH = 48, 12", None),
        ("super().goes_on() or", "super().goes_on() and self.step < 4 or self.step < 4 and", "lost"),
        ("super().train()", "super().train() or 1 / (4 - self.step)", "lost"),
    ],
    ids=["a sample is lost", "nothing is wrong", "it ends too early", "an exception"],
)
def test_wrong_program_of_a_hard_trial_is_found(tmp_path: Path, right: str, wrong: str, found: str | None) -> None:
    # In its first five steps, an epoch: the job may be asked to end in these.
    text = (PROGRAMS / "counting.py").read_text()
    assert text.count(right) == 1
    programs = tmp_path / "programs"
    shutil.copytree(PROGRAMS, programs)  # it imports from its neighbours
    program = programs / "counting.py"
    program.write_text(text.replace(right, wrong))
    plan = Plan(size=2, recover="shrink", standbys=0, step_s=0.002, kills=1, every_s=2.0)
    tally = driver.Tally()
    (at := tmp_path / "job").mkdir()
    trial = Trial(plan, random.Random(1), tally, 60.0, at, program)
    with tally.judging(trial.job, plan):
        trial.run()
    assert tally.struck == 1 or found is not None
    assert not any("before anybody" in text for text in tally.broken)
    assert [text.split(":")[0] for text in tally.broken] == ([] if found is None else [found]), tally.broken
    for each in tally.broken:
        shutil.rmtree(each.rpartition("is in ")[2].rstrip(")"))
