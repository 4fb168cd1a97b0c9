"""The optimizers' updates against NumPy, for clusters that stay and one that resizes in mid-training."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

PROGRAM = Path(__file__).with_name("programs") / "updates.py"
STEPS, SHAPES = 12, ((3, 5), (7,))
MODES = pytest.mark.parametrize("mode", ["graph", "pynative"])


def flat(arrays):
    return np.concatenate([np.ravel(a) for a in arrays])


def start():
    random = np.random.RandomState(1)
    return flat([random.randn(*shape).astype(np.float32) for shape in SHAPES]).astype(float)


def gradient(w, rank, step):
    noise = [np.random.RandomState(1000 * step + 10 * rank + i).randn(*s) for i, s in enumerate(SHAPES)]
    return 0.3 * w + flat(noise)


class Worker:
    """A model and its moments, updated as nn.Momentum(learning_rate, momentum) does, or nn.SGD without momentum."""

    def __init__(self, momentum):
        self.w, self.v, self.momentum = start(), np.zeros_like(start()), momentum

    def update(self, g):
        self.v = self.momentum * self.v + g
        self.w = self.w - 0.1 * self.v

    def copy_from(self, other):
        self.w, self.v = other.w, other.v


class SSGD:
    def __init__(self):
        self.members = []

    def worker(self):
        return Worker(0.9)

    def step(self, members, step):
        g = np.mean([gradient(m.w, rank, step) for rank, m in enumerate(members)], axis=0)
        for m in members:
            m.update(g)


class SMA:
    def __init__(self, alpha, inner_momentum, momentum):
        self.alpha, self.inner_momentum, self.momentum = alpha, inner_momentum, momentum
        self.z = self.velocity = None
        self.size = 0

    def worker(self):
        return Worker(self.inner_momentum)

    def step(self, members, step):
        gradients = [gradient(m.w, rank, step) for rank, m in enumerate(members)]
        z = np.mean([m.w for m in members], axis=0)
        if len(members) == self.size > 1:
            z = z + self.momentum * self.velocity
            self.velocity = z - self.z
        else:
            self.velocity = np.zeros_like(z)
        self.z, self.size = z, len(members)
        for m, g in zip(members, gradients):
            m.w = m.w - self.alpha * (m.w - z)
            m.update(g)


def rules():
    return {"ssgd": SSGD(), "sma": SMA(0.1, 0.9, 0.0), "sma momentum": SMA(0.5, 0.0, 0.7)}


def steps_of(folder):
    """What the workers reported: for each step the rows in the order of the ranks."""
    rows = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    steps = [sorted((r for r in rows if r["step"] == s), key=lambda r: r["rank"]) for s in range(STEPS)]
    for at in steps:
        assert [r["rank"] for r in at] == list(range(len(at))), "a rank is missing"
        assert {r["size"] for r in at} == {len(at)}
    return steps


def agree(folder, sizes):
    steps = steps_of(folder)
    assert [len(at) for at in steps] == sizes
    for name, rule in rules().items():
        workers = {}
        for step, at in enumerate(steps):
            uids = [row["uid"] for row in at]
            stayed = [u for u in uids if u in workers]
            now = {}
            for uid in uids:
                now[uid] = workers.get(uid) or rule.worker()
                if step and uid not in workers:
                    now[uid].copy_from(workers[stayed[0]])
            workers = now
            rule.step([workers[u] for u in uids], step)
            for row in at:
                got, want = row["models"][name], workers[row["uid"]].w
                np.testing.assert_allclose(
                    got, want, rtol=1e-4, atol=1e-5, err_msg=f"{name}, step {step}, rank {row['rank']}"
                )
        last = [row["models"][name] for row in steps[-1]]
        assert (np.ptp(last, axis=0).max() == 0) == (name == "ssgd" or len(last) == 1), (
            f"{name}: who differs from whom?"
        )


@MODES
@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_updates_agree_with_numpy(run_program, tmp_path, mode, n):
    (tmp_path / "out").mkdir()
    run_program(PROGRAM, tmp_path / "out", "none", mode, np=n)
    agree(tmp_path / "out", [n] * STEPS)


@MODES
def test_updates_agree_with_numpy_across_resizes(run_program, tmp_path, mode):
    (tmp_path / "out").mkdir()
    run_program(PROGRAM, tmp_path / "out", "4:4,8:1", mode, np=2, watch=True)
    agree(tmp_path / "out", [2] * 4 + [4] * 4 + [1] * 4)
