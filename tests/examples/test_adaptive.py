"""The adaptive example: a short run of its training, and what compare.py makes of runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "adaptive"
pytest.importorskip("mindspore", reason="MindSpore is not installed")


@pytest.mark.long
def test_the_policy_grows_the_cluster(run_program, tmp_path):
    out = tmp_path / "run.jsonl"
    output = run_program(
        EXAMPLE / "train.py", "--policy", "noise-scale", "--sizes", "2,4", "--compute-ms", 120, "--network-ms", 1,
        "--target-noise-scale", 1500, "--budget", 100_000, "--wait", "--out", out,
        watch=True, flags=["-affinity", "none"],
    )  # fmt: skip
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    sizes = [row["cluster_size"] for row in rows]
    assert sizes[0] == 2
    assert sizes[-1] == 4
    assert rows[-1]["true_noise_scale"] >= 1500
    assert "4 workers instead of 2 cost" in output
    assert "reached: " in output
    # what the workers that joined saw is what the others saw: the estimate goes on across the change
    # (a moving average, which lags behind where the loss falls quickly)
    assert 0.1 < rows[-1]["noise_scale"] / rows[-1]["true_noise_scale"] < 10


@pytest.mark.long
def test_all_runs_of_the_comparison_come_to_their_target(tmp_path):
    """compare.py as a user starts it, to a smaller target."""
    pytest.importorskip("matplotlib")
    quick = ["--sizes", "1,2", "--target-noise-scale", "300", "--compute-ms", "20", "--network-ms", "1"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [sys.executable, str(EXAMPLE / "compare.py"), *quick, "--out", str(tmp_path)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    table = (tmp_path / "table.txt").read_text()
    for name in ("fixed 1", "fixed 2", "noise-scale", "random"):
        rows = [json.loads(line) for line in (tmp_path / f"{name.replace(' ', '-')}.jsonl").read_text().splitlines()]
        assert rows[-1]["true_noise_scale"] >= 300 > rows[-2]["true_noise_scale"], name
        assert f"\n{name} " in table
    assert {row["cluster_size"] for row in map(json.loads, (tmp_path / "fixed-2.jsonl").read_text().splitlines())} == {
        2
    }
    assert table in done.stdout
    assert (tmp_path / "adaptive.png").stat().st_size > 20_000


def test_the_table_and_the_picture(monkeypatch, tmp_path):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "compare", raising=False)
    import compare

    def rows(size, steps, scale=1.0):
        return [
            {
                "step": i,
                "cluster_size": size,
                "seconds": i * scale,
                "worker_seconds": i * scale * size,
                "loss": 1 / i,
                "noise_scale": 10.0 * i if i > 1 else None,
                "true_noise_scale": 11.0 * i,
            }  # fmt: skip
            for i in range(1, steps + 1)
        ]

    runs = {"fixed 2": rows(2, 40), "fixed 4": rows(4, 24), "noise-scale": rows(4, 22, 1.1), "random": rows(3, 15)}
    text = compare.table(runs, 200)
    lines = text.splitlines()
    assert lines[1].split() == ["fixed", "2", "40", "40.0", "s", "80.0", "2"]
    assert lines[4].endswith("(target not reached)")
    # 2: 40 * 80, 4: 24 * 96
    assert "least time x worker-seconds (4): 1.01 of its time, 1.01 of its worker-seconds" in lines[5]
    compare.draw(runs, 200, tmp_path / "adaptive.png")
    assert (tmp_path / "adaptive.png").stat().st_size > 20_000
