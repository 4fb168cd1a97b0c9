"""A small sample of the churn benchmark: workers of ms_kungfu are killed, and no sample is lost or repeated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.churn import table

pytest.importorskip("matplotlib", reason="the benchmark draws a picture")
ROOT = Path(__file__).parents[2]


def test_a_sample_of_the_churn_benchmark_loses_and_repeats_nothing(tmp_path):
    options = "--systems ms_kungfu --workloads lenet --scenarios none,kill --every 3 --seconds 10 --checkpoint-every 40"
    words = [sys.executable, "-m", "benchmarks.churn", "run", *options.split(), "--out", tmp_path / "sample"]
    job = subprocess.Popen(
        [*map(str, words), "--peers", str(tmp_path / "none")],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        output, _ = job.communicate(timeout=240)
    finally:
        job.terminate()  # the benchmark then ends its job
        job.wait(60)
    assert job.returncode == 0, output
    without, killed = table.read(tmp_path / "sample.csv")
    assert without["kills"] == 0
    assert killed["kills"] >= 1
    for row in (without, killed):
        assert (row["lost"], row["twice"], row["equal_weights"], row["hung"]) == (0, 0, True, False)
        assert row["useful"] > 0
    assert (tmp_path / "sample.png").stat().st_size > 0
