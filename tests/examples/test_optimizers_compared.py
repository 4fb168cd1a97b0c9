"""The optimizers example, small: as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "optimizers"
for needed in ("mindspore", "sklearn", "matplotlib"):
    pytest.importorskip(needed, reason=f"{needed} is not installed")


@pytest.mark.long
def test_every_optimizer_learns_and_the_table_and_the_picture_are_made(tmp_path):
    command = [sys.executable, str(EXAMPLE / "compare.py"), "--out", str(tmp_path), "--workers", "1", "2"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [*command, "--seeds", "1", "--epochs", "2"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "trainings.jsonl").read_text().splitlines()]
    assert [row["workers"] for row in rows] == [1] * 4 + [2] * 4
    for row in rows:
        (_, first), (samples, last) = row["curve"]
        assert samples == 2400
        assert last > max(first - 0.05, 0.8), row
    # Alone, each of them is the plain optimizer.
    assert len({str(row["curve"]) for row in rows[:4]}) == 1
    table = (tmp_path / "accuracy.md").read_text().splitlines()
    assert table[0] == "| accuracy, % | 1 | 2 |"
    assert len(table) == 6
    assert (tmp_path / "accuracy.png").stat().st_size > 10000
