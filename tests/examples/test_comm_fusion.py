"""The comm-fusion example: as a user starts it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.mindspore.programs import rounding

EXAMPLE = Path(__file__).parents[2] / "examples" / "comm-fusion"
pytest.importorskip("mindspore", reason="MindSpore is not installed")


def losses(output):
    return [float(loss) for loss in re.findall(r"^epoch \d of 2  loss (\S+)$", output, re.MULTILINE)]


@pytest.mark.long
def test_example_prints_fusion_ids_and_groups_and_trains_alike_in_all(run_program):
    output = run_program(EXAMPLE / "train.py", "--epochs", 2)
    ids = re.findall(r"^The parameter (\w+)\S*'s fusion id is (\d)$", output, re.MULTILINE)
    assert ids == [("head", "0")] * 2 + [(f"layer{i}", str(i)) for i in (1, 2, 3) for _ in range(4)]
    assert re.findall(r"^gradients/\d: (\d) gradient", output, re.MULTILINE) == ["1", "1", "4", "4", "4"]
    fused = losses(run_program(EXAMPLE / "train.py", "--epochs", 2, "--no-ids", "--mode", "index"))
    assert len(fused) == 2
    assert fused[1] < fused[0]
    # Two epochs of 16 steps away from ln 10, where ten classes are guessed; four digits are printed.
    tolerance = 1e-4 + rounding.relative(32, 28 * 28 + 3 * (10 + 32) + 2 * 32) * np.abs(np.log(10) - fused).max()
    assert losses(output) == pytest.approx(fused, abs=tolerance)
    alone = run_program(EXAMPLE / "train.py", "--epochs", 2, "--mode", "off")
    assert "14 gradients, 38.7 KB, in 14 groups (none: nothing is fused)" in alone
    assert losses(alone) == pytest.approx(fused, abs=tolerance)


def write_mnist(folder, count=640):
    """Digits that can be told apart: each class lights a row of its own."""
    labels = (np.arange(count) % 10).astype(np.uint8)
    images = np.zeros((count, 28, 28), np.uint8)
    images[np.arange(count), 2 * labels] = 255
    folder.mkdir(parents=True)
    for name, array in (("train-images-idx3-ubyte", images), ("train-labels-idx1-ubyte", labels)):
        header = np.array([0x800 + array.ndim, *array.shape], dtype=">u4").tobytes()
        (folder / name).write_bytes(header + array.tobytes())


@pytest.mark.long
def test_mnist_of_data_path_and_the_tutorials_lines_beside_the_plan(run_program, tmp_path, monkeypatch):
    write_mnist(tmp_path / "mnist" / "train")
    monkeypatch.setenv("DATA_PATH", str(tmp_path / "mnist"))
    output = run_program(EXAMPLE / "train.py", "--epochs", 2, "--batch-size", 16)
    assert re.findall(r"^gradients/\d: (\d) gradient", output, re.MULTILINE) == ["1", "1", "4", "4", "4"]
    told = re.findall(r"^epoch: (\d), step: (\d+), loss is (\d\.\d+)$", output, re.MULTILINE)
    assert [(int(epoch), int(step)) for epoch, step, _ in told] == [(0, 0), (0, 10), (1, 0), (1, 10)]  # 320 each
    assert float(told[-1][2]) < float(told[0][2])
    first, second = losses(output)
    assert second < first
    monkeypatch.setenv("DATA_PATH", str(tmp_path))
    done = subprocess.run([sys.executable, str(EXAMPLE / "train.py")], timeout=120, text=True, capture_output=True)
    assert done.returncode == 1
    assert "has no file train-images-idx3-ubyte; give the folder with MNIST's unpacked IDX files" in done.stderr


@pytest.mark.long
def test_the_picture(run_program, tmp_path):
    pytest.importorskip("matplotlib")
    small = ["--blocks", 2, "--width", 64, "--hidden", 64, "--rounds", 2, "--repeats", 1, "--sizes", 1]
    output = run_program(EXAMPLE / "sweep.py", *small, "--out", tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "step-time.jsonl").read_text().splitlines()]
    assert [(row["size_mb"], row["groups"], len(row["step"])) for row in rows] == [("none", 10, 2), (1, 1, 2)]
    assert re.search(r"^ none +10 groups +step ", output, re.MULTILINE)
    assert (tmp_path / "step-time.png").stat().st_size > 10_000


def test_the_groups_without_workers(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "ms_kungfu.fusion", str(EXAMPLE / "train.py"), "--no-ids"],
        cwd=tmp_path,
        timeout=120,
        text=True,
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr
    assert "14 gradients, 38.7 KB, in 1 group (auto: up to 64 MB per group)" in done.stdout
    assert "epoch" not in done.stdout
