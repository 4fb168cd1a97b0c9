"""The ResNet example: as a user starts it, on generated images and with a small network, and its parts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import launcher
from tests.ports import free_port

EXAMPLE = Path(__file__).parents[2] / "examples" / "resnet-cifar10"
pytest.importorskip("mindspore", reason="MindSpore is not installed")
SMALL = ["--depth", "14", "--width", "8", "--image-size", "32", "--batch-size", "16", "--test-samples", "100"]


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    """A copy of the example, in which the images are generated once."""
    folder = tmp_path_factory.mktemp("resnet") / "example"
    shutil.copytree(EXAMPLE, folder, ignore=shutil.ignore_patterns("data", "out", "__pycache__"))
    return folder


def run(example, *arguments, np=2):
    port = free_port()
    command = [launcher(), "-q", "-np", np, "-w", "-builtin-config-port", port]
    command += ["-config-server", f"http://127.0.0.1:{port}/config", sys.executable, "train.py", *SMALL, *arguments]
    done = subprocess.run(
        list(map(str, command)), cwd=example, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-6000:]
    rows = [json.loads(line) for line in (example / "out" / "training.jsonl").read_text().splitlines()]
    return done.stdout, rows


@pytest.mark.long
def test_sharded_by_rank_and_size(example):
    output, rows = run(example, "--steps", 12, "--fusion-mb", 1, "--gradients", "sum", "--learning-rate", 0.02)
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all(row["cluster_size"] == 2 and row["batch_size"] == 32 for row in rows)
    losses = [row["loss"] for row in rows]
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert re.search(r"^12 steps, 384 samples, .* test accuracy \d\.\d{3}$", output, re.MULTILINE)


def test_the_tutorials_loss_is_the_cross_entropy(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "loss", raising=False)
    import mindspore as ms
    from loss import SoftmaxCrossEntropyExpand
    from mindspore import nn

    random = np.random.default_rng(1)
    scores = ms.Tensor(20 * random.standard_normal((6, 10)), ms.float32)  # some of their softmax are 0 in float32
    labels = ms.Tensor(random.integers(0, 10, 6), ms.int32)
    one_hot = ms.Tensor(np.eye(10)[labels.asnumpy()], ms.float32)
    expected, gradient = ms.value_and_grad(nn.CrossEntropyLoss())(scores, labels)
    assert expected > 1
    for loss, target in ((SoftmaxCrossEntropyExpand(sparse=True), labels), (SoftmaxCrossEntropyExpand(), one_hot)):
        value, found = ms.value_and_grad(loss)(scores, target)
        # Of ten terms each, in float32.
        np.testing.assert_allclose(value.asnumpy(), expected.asnumpy(), rtol=20 * 2**-23)
        np.testing.assert_allclose(found.asnumpy(), gradient.asnumpy(), rtol=40 * 2**-23, atol=20 * 2**-23 / 6)


@pytest.mark.long
def test_elastic_by_one_flag(example):
    _, rows = run(example, "--steps", 9, "--elastic", "3:2,6:1", "--loss", "expanded", np=1)
    assert [row["cluster_size"] for row in rows] == [1] * 3 + [2] * 3 + [1] * 3
    assert [row["trained_samples"] for row in rows] == [16, 32, 48, 80, 112, 144, 160, 176, 192]
    assert all(np.isfinite(row["loss"]) for row in rows)


def test_the_generated_files_are_cifar10s_format(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "data", raising=False)
    import data
    from mindspore.dataset import Cifar10Dataset

    monkeypatch.setattr(data, "generate", lambda samples, seed: generated(samples))

    def generated(samples):
        labels = (np.arange(samples) % 10).astype(np.uint8)
        images = np.zeros((samples, 3, 32, 32), np.uint8)
        images[:, 0] = labels[:, None, None]  # red
        images[:, 1, 0] = np.arange(32)  # the first line of green
        return images, labels

    folder = data.find_or_make(None, tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["data_batch_1.bin", "test_batch.bin"]
    assert (folder / "test_batch.bin").stat().st_size == 10_000 * 3073
    rows = list(Cifar10Dataset(str(folder), "test", shuffle=False).take(3).create_dict_iterator(output_numpy=True))
    for i, row in enumerate(rows):
        assert row["label"] == i
        assert row["image"].shape == (32, 32, 3)
        assert (row["image"][:, :, 0] == i).all()
        np.testing.assert_array_equal(row["image"][0, :, 1], np.arange(32))
    with pytest.raises(SystemExit, match="has no file data_batch_2.bin"):
        data.find_or_make(str(folder), tmp_path)


def test_a_resnet_50_has_its_parameters(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.delitem(sys.modules, "resnet", raising=False)
    from resnet import ResNet

    parameters = ResNet(50, num_classes=1000).trainable_params()
    # As published: 25.6 million, in 161 tensors.
    assert sum(p.size for p in parameters) == 25_557_032
    assert len(parameters) == 161
