"""Training begins from one worker's parameters, or with a sentence."""

from __future__ import annotations

import re

import pytest

from tests.mindspore.elastic.conftest import check_each

PROGRAM = "unseeded.py"


def check_one_workers_state(reports, case):
    """Training without a seed begins from one worker's state."""
    assert len({row["weights"] for row in reports.of("before", case=case)}) == 3
    # Later the moving statistics are each worker's own.
    begins = reports.by_step("begin", case=case).get(0, [])
    assert len({row["all"] for row in begins}) == case.startswith("loop")
    ends = reports.of("end", case=case)
    assert len({row["weights"] for row in ends}) == 1
    assert len({row["random"] for row in ends}) == 3, "a worker's random numbers stay its own"


def check_refused(reports, case, sentence, said=None):
    """Before the first step, on all workers. `said`: what they said instead of what they have reported."""
    assert not reports.of("end", case=case)
    assert not reports.of("begin", case=case)
    said = said or [row["said"] for row in reports.of("error", case=case)]
    assert len(said) >= len(reports.workers)
    assert all(re.search(sentence, text) for text in said), said


def data_differ(told):
    return f"the workers' data differ: {told}; start all workers with the same data"


SAMPLES = data_differ("samples 60 at rank 0, 2 and 48 at rank 1")
CONTENTS = r'samples 0, [\d, ]+ and 59 \(column "\w+"[^)]*\) at rank 0(?:, 2)? differ from those at rank 1;'
FIRST_STEP = (
    "CollectiveMismatchError: did you forget KungFuElasticCallback .*The workers begin with different parameters: "
    "the ranks called .*rank 0.*: all_reduce of .*on parameters"
)


def test_training_begins_from_one_workers_state_or_is_refused(run_elastic):
    """Four trainings, one after the other, on three workers."""
    cases = ["loop:graph:samples", "loop:pynative:contents", "callback:graph", "nothing:graph"]
    reports = run_elastic(PROGRAM, *cases, np=3, status=1)
    check_each(
        samples=lambda: check_refused(reports, cases[0], SAMPLES),
        contents=lambda: check_refused(reports, cases[1], CONTENTS),
        callback=lambda: check_one_workers_state(reports, cases[2]),
        nothing=lambda: check_refused(reports, cases[3], re.compile(FIRST_STEP, re.DOTALL), [reports.output] * 3),
    )


@pytest.mark.long
@pytest.mark.parametrize("case", ["loop:pynative", "loop:graph", "sync:graph"])
def test_training_without_a_seed_begins_from_one_workers_state(run_elastic, case):
    check_one_workers_state(run_elastic(PROGRAM, case, np=3), case)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        ("callback:graph:seed", data_differ("seed 0 at rank 0, 2 and 1 at rank 1")),
        ("callback:pynative:contents", CONTENTS),
        ("nothing:pynative", re.compile(FIRST_STEP, re.DOTALL)),
    ],
)
def test_setting_that_differs_at_one_worker_is_refused(run_elastic, case, sentence):
    reports = run_elastic(PROGRAM, case, np=3, status=1)
    check_refused(reports, case, sentence, [reports.output] * 3)
