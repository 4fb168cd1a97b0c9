"""`python -m benchmarks shards` on real processes, in small: that it measures, not how fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]


def measured(folder: Path, *words: str) -> list[dict]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "shards", *words, "--json", str(folder / "out.jsonl")],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=590,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_survivors_of_a_kill_compile_nothing(tmp_path: Path) -> None:
    (record,) = measured(tmp_path, "--part", "kill", "--count", "1")
    assert record["verified"]
    assert record["compiled"] == 0
    assert record["compiled_before"] >= 2  # two shapes of shards
    assert 0 < record["median_step_ms"] < record["worst_ms"]


@pytest.mark.long
@pytest.mark.parametrize("network", ["lenet", "resnet", "transformer"])
def test_cost_compares_both_ways(tmp_path: Path, network: str) -> None:
    words = ["--part", "cost", "--networks", network, "-np", "2", "--rounds", "1", "--samples", "3"]
    (record,) = measured(tmp_path, *words)
    assert record["verified"]
    assert record["samples"] == 3 * 8  # turns
    assert record["ratio"] == pytest.approx(record["p50_us"] / record["without_p50_us"], rel=0.5)


@pytest.mark.long
def test_slow_worker_gets_fewer_shards(tmp_path: Path) -> None:
    (record,) = measured(tmp_path, "--part", "straggler")
    assert record["verified"]
    assert sum(record["dealt"]) == 16
    assert record["dealt"][1] < min(record["dealt"][rank] for rank in (0, 2, 3))
    assert record["share_of_speeds"] > 0.4  # of equal shares
