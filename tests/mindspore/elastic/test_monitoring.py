"""Monitors and policies in trainings of several workers."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.conftest import long


@pytest.mark.parametrize("mode", ["graph", long("pynative")])
def test_monitored_training_reports_noise_scale_and_callback_metrics(run_elastic, tmp_path, mode):
    reports = run_elastic("monitored.py", mode, "noise_scale,callback", np=2)
    check_noise_scale(reports.by_step("noise")[150])
    check_callback(reports.by_step("callback")[5], tmp_path / "reports1")


def check_noise_scale(rows):
    """Of a quadratic with known noise, as each rank saw it."""
    assert len(rows) == 2
    assert len({row["found"] for row in rows}) == 1, "all workers see the same"
    row = rows[0]
    assert row["truth"] == pytest.approx(25.0)
    assert row["found"] == pytest.approx(row["truth"], rel=0.1)
    assert row["squared"] == pytest.approx(20.0, rel=0.1)
    # mean over 16 samples; the workers' variance around it
    assert row["norm"] ** 2 == pytest.approx(20.0 + 500 / 16, rel=0.2)
    assert row["variance"] == pytest.approx(500 / 8 - 500 / 16, rel=0.2)
    assert row["loss"] == pytest.approx((20.0 + 500) / 2, rel=0.1)
    assert row["samples"] == 150 * 2 * 8
    for rank, received in enumerate(row["received"] for row in rows):
        assert received[rank] == 0
        # the gradients and a line for the monitor
        assert row["brought"] <= received[1 - rank] <= row["brought"] + 200


def check_callback(rows, folder):
    """A monitor under Model.train, of which all workers have the same samples and weights."""
    records = rows[0]["records"]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5]
    assert [r["learning_rate"] for r in records] == pytest.approx([0.1, 0.05, 0.05, 0.05, 0.05])
    assert all(r["batch_size"] == 16 and r["cluster_size"] == 2 for r in records)
    assert records[-1]["trained_samples"] == 80
    assert [r["loss"] for r in records] == pytest.approx(np.mean([row["losses"] for row in rows], axis=0))
    assert records[0]["gradient_variance"] == pytest.approx(0.0, abs=1e-6)
    # plain SGD: the update is the rate times the gradient
    expected = 0.1 * records[0]["gradient_norm"] / rows[0]["initial"]
    assert rows[0]["first_update"] == pytest.approx(expected, rel=1e-4)
    shared = {k: v for k, v in records[2].items() if k not in ("received_from", "bandwidth_from")}
    assert shared == {k: v for k, v in rows[1]["records"][2].items() if k in shared}
    lines = [json.loads(line) for line in (folder / "training.json").read_text().splitlines()]
    assert lines == records
    for rank in (0, 1):
        written = b"".join(path.read_bytes() for path in (folder / f"summary{rank}").rglob("*MS"))
        assert written.count(b"kungfu/loss") == 5
        assert written.count(b"kungfu/cluster_size") == 5
    metrics = dict(line.rsplit(" ", 1) for line in rows[1]["page"].splitlines() if not line.startswith("#"))
    assert metrics["kungfu_step"] == "3.0"
    assert metrics["kungfu_rank"] == "1.0"
    assert float(metrics["kungfu_loss"]) == pytest.approx(records[2]["loss"], rel=1e-5)
    assert float(metrics['kungfu_compute_seconds{rank="0"}']) > 0


def test_policies_change_size_batch_and_rate_at_all_workers(run_elastic, tmp_path):
    reports = run_elastic("monitored.py", "graph", "policies", np=1)
    steps = reports.by_step("step")
    trained_by = {step: rows[0]["trained_by"] for step, rows in steps.items()}
    assert [trained_by[s] for s in (1, 3, 4, 9, 10, 16, 17)] == [1, 1, 2, 2, 1, 1, 2]
    batches = {step: rows[0]["batch"] for step, rows in steps.items()}
    # a worker's batch of 4, from 6 steps on of 2; from 12 on 8 samples together, and as many for each with 2 workers;
    # the last 18 of the epoch are two steps alike
    looked_at = (1, 3, 4, 6, 7, 9, 10, 12, 13, 16, 17, 18, 19)
    assert [batches[s] for s in looked_at] == [4, 4, 8, 8, 4, 4, 2, 2, 8, 8, 16, 9, 9]
    rates = {step: {row["rate"] for row in rows if not row["detached"]} for step, rows in steps.items()}
    # at step 4 two policies want a rate: the first one's, and the lowest rank's of it
    assert rates[3] == {np.float32(0.05)}
    assert rates[5] == {np.float32(0.01)}
    assert rates[13] == {np.float32(0.01)}
    assert rates[15] == {np.float32(0.002)}
    for step, rows in steps.items():
        assert len({row["parameters"] for row in rows if not row["detached"]}) == 1, f"step {step}"
        assert len({row["trained"] for row in rows}) == 1
    assert {row["total"] for row in reports.of("step")} == {240}
    assert max(row["trained"] for row in reports.of("step")) == 240, "each sample twice in two epochs"
    told = [row["lines"] for row in reports.of("told") if row["lines"]]
    first = max(told, key=len)
    assert first[0] == 'policy: size=2 step=3 reason="SchedulePolicy: the schedule\'s entry for step 3"'
    assert first[1] == 'policy: learning_rate=0.01 step=4 reason="Own: rank 0 wants it"'
    lines = [json.loads(line) for line in (tmp_path / "reports1" / "training.json").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(steps)


@pytest.mark.long
def test_a_straggler_is_sent_away(run_elastic):
    reports = run_elastic("monitored.py", "graph", "straggler", np=3)
    steps = reports.by_step("step")
    assert max(steps) == 30
    sizes = [steps[step][0]["size_after"] for step in sorted(steps)]
    assert sizes[0] == 3
    assert sizes[-1] == 2
    slow = [row for row in reports.of("step") if row["slow"]]
    assert slow[-1]["detached"]
    assert max(row["step"] for row in slow) < 25
    told = [row["lines"] for row in reports.of("told") if row["lines"]]
    assert len(told) == 1
    assert "rank 1 has computed more than 2 times as long" in told[0][0]
