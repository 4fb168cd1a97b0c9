"""Training begins from one worker's parameters, or with a sentence."""

from __future__ import annotations

import re

import pytest

from tests.conftest import long


@pytest.mark.parametrize(
    ("how", "mode"), [("callback", "graph"), long("loop", "pynative"), long("loop", "graph"), long("sync", "graph")]
)
def test_training_without_a_seed_begins_from_one_workers_state(run_elastic, how, mode):
    reports = run_elastic("unseeded.py", how, mode, np=3)
    assert len({row["weights"] for row in reports.of("before")}) == 3
    # Later the moving statistics are each worker's own.
    assert len({row["all"] for row in reports.by_step("begin").get(0, [])}) == (1 if how == "loop" else 0)
    assert len({row["weights"] for row in reports.of("end")}) == 1
    assert len({row["random"] for row in reports.of("end")}) == 3, "a worker's random numbers stay its own"


@pytest.mark.parametrize(
    ("how", "what", "told"),
    [
        ("loop", "samples", "samples 60 at rank 0, 2 and 48 at rank 1"),
        long("callback", "seed", "seed 0 at rank 0, 2 and 1 at rank 1"),
    ],
)
def test_data_that_are_not_everybodys_are_refused_before_the_first_step(run_elastic, how, what, told):
    reports = run_elastic("unseeded.py", how, "graph", what, np=3, status=1)
    assert not reports.of("end")
    assert not reports.by_step("begin")
    assert reports.output.count(f"the workers' data differ: {told}; start all workers with the same data") >= 3


@pytest.mark.parametrize("how", ["loop", long("callback")])
def test_samples_with_other_contents_at_one_worker_are_refused(run_elastic, how):
    reports = run_elastic("unseeded.py", how, "pynative", "contents", np=2, status=1)
    assert not reports.of("end")
    assert not reports.by_step("begin")
    told = r'samples 0, [\d, ]+ and 59 \(column "\w+"[^)]*\) at rank 0 differ from those at rank 1;'
    assert len(re.findall(told, reports.output)) >= 2


@pytest.mark.parametrize("mode", ["graph", long("pynative")])
def test_an_optimizer_refuses_its_first_step_where_nothing_made_the_parameters_the_same(run_elastic, mode):
    reports = run_elastic("unseeded.py", "nothing", mode, np=2, status=1)
    assert not reports.of("end")
    assert "rank 0: all_reduce of" in reports.output
    assert "on parameters" in reports.output
    assert "all begin alike by KungFuElasticCallback, ElasticTraining or sync_net_parameters" in reports.output
