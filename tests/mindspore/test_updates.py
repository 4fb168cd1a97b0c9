"""The optimizers' updates against NumPy, for clusters that stay and one that resizes in mid-training."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore.ops import composite

from ms_kungfu.optimizers import pair, synchronous
from tests.conftest import long
from tests.mindspore.programs import rounding

PROGRAM = Path(__file__).with_name("programs") / "updates.py"
STEPS, SHAPES = 12, ((3, 5), (7,))


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

    def step(self, members, step, sources, peers):
        g = np.mean([gradient(m.w, rank, step) for rank, m in enumerate(members)], axis=0)
        for m in members:
            m.update(g)


class SMA:
    cluster = 0
    """The size of the cluster version in which the next step runs. It counts failed workers until the next version."""

    def __init__(self, alpha, inner_momentum, momentum):
        self.alpha, self.inner_momentum, self.momentum = alpha, inner_momentum, momentum
        self.z = self.velocity = None
        self.sizes = 0, 0

    def worker(self):
        return Worker(self.inner_momentum)

    def step(self, members, step, sources, peers):
        gradients = [gradient(m.w, rank, step) for rank, m in enumerate(members)]
        z = np.mean([m.w for m in members], axis=0)
        # A death begins the momentum anew, and so does the first step in the version without the failed worker.
        sizes = self.cluster, len(members)
        if sizes == self.sizes and len(members) > 1:
            z = z + self.momentum * self.velocity
            self.velocity = z - self.z
        else:
            self.velocity = np.zeros_like(z)
        self.z, self.sizes = z, sizes
        for m, g in zip(members, gradients):
            m.w = m.w - self.alpha * (m.w - z)
            m.update(g)


class Pair:
    """The neighbour from which a worker takes a model is chance; the workers print it, and the version, afterwards."""

    def __init__(self, inner_momentum, in_turn):
        self.inner_momentum, self.in_turn = inner_momentum, in_turn

    def worker(self):
        made = Worker(self.inner_momentum)
        made.saved = []
        return made

    def step(self, members, step, sources, peers):
        saved = [len(m.saved) for m in peers]
        for rank, (source, version) in enumerate(sources):
            assert source != rank
            assert -1 <= source < len(peers)
            # All ranks have met at the end of the last step, so each of them has saved; else no model is taken.
            others = [m for r, m in enumerate(members) if r != rank and m.saved]
            assert version > 0 if others else source == -1 or version > 0
            # What is fetched ahead is from the step before; what isn't, is the latest.
            assert source == -1 or version >= saved[source] - (not self.in_turn), "stale"
            if self.in_turn and len(others) == len(members) - 1 > 1 and rank in self.last_source:
                size = len(members)
                turn = (self.last_source[rank] - rank) % size % (size - 1) + 1
                assert source == (rank + turn) % size, "not in turn"
        # Not beyond a resize, which comes after every fourth step.
        self.last_source = {r: s for r, (s, _) in enumerate(sources) if s >= 0 and step % 4 != 3}
        # A worker may have taken what another one has saved in this same step.
        waiting = dict(enumerate(sources))
        while waiting:
            for rank, (source, version) in list(waiting.items()):
                me = members[rank]
                if source >= 0 and len(peers[source].saved) < version:
                    continue
                del waiting[rank]
                g = gradient(me.w, rank, step)
                if source >= 0:
                    me.w = (me.w + peers[source].saved[version - 1]) / 2
                me.update(g)
                me.saved.append(me.w)
                break
            else:
                raise AssertionError(f"{waiting}: models that nobody has saved")

    last_source: dict = {}


class Adaptive:
    """As SWITCHES of the program, and SMA before step 3."""

    def __init__(self):
        self.sma, self.pair = SMA(0.1, 0.9, 0.0), Pair(0.9, in_turn=False)

    def worker(self):
        return self.pair.worker()

    def match(self, members):
        w, v = (np.mean([getattr(m, name) for m in members], axis=0) for name in "wv")
        for m in members:
            m.w, m.v = w, v

    def step(self, members, step, sources, peers):
        gradients = [gradient(m.w, rank, step) for rank, m in enumerate(members)]
        if step in (3, 11):
            self.match(members)
        if step == 11:  # by switch_to, between the steps; the other one is in the step, when the gradients are there
            gradients = [gradient(m.w, rank, step) for rank, m in enumerate(members)]
        if step in (0, 1, 2, 9, 10):
            self.sma.step(members, step, sources, peers)
        elif step in (6, 7, 8):
            for m in members if step == 6 else ():
                m.saved = [m.w]
            self.pair.step(members, step, sources, peers)
        else:
            for m in members:
                m.update(np.mean(gradients, axis=0))


def rules():
    return {
        "adaptive": Adaptive(),
        "ssgd": SSGD(),
        "sma": SMA(0.1, 0.9, 0.0),
        "sma momentum": SMA(0.5, 0.0, 0.7),
        "pair": Pair(0.9, in_turn=False),
        "pair in turn": Pair(0.0, in_turn=True),
    }


def steps_of(folder):
    """What the workers reported: for each step the rows in the order of the ranks."""
    rows = [json.loads(line) for path in folder.glob("*.jsonl") for line in path.read_text().splitlines()]
    steps = [sorted((r for r in rows if r["step"] == s), key=lambda r: r["rank"]) for s in range(STEPS)]
    for at in steps:
        assert [r["rank"] for r in at] == list(range(len(at))), "a rank is missing"
    return steps


def tolerance(step, weights):
    """NumPy computes in float64, the workers in float32: element by element, so that nothing but roundings differs. A
    step has up to 16 (3 of the gradient, 4 of a mean, 4 of the averaging, 4 of moments and update, 1 of the store),
    each of numbers no larger than weights and gradients (of 0.3 x weight and noise of at most 4); what differs after a
    step is carried over at most once by the weights (0.1 x 0.3 is taken off) and by the velocity 1 / (1 - 0.9) times
    0.1."""
    return 16 * (step + 1) * (np.abs(weights).max() + 4) * 2.0 ** -rounding.BITS["float32"]


def agree(folder, sizes, death=None):
    steps = steps_of(folder)
    assert [len(at) for at in steps] == sizes
    clusters = [at[0]["size"] for at in steps]
    if death is None:
        assert clusters == sizes
    else:  # a rank that dies is counted until the step is over, and the launcher has seen it
        assert clusters[: death + 1] == [sizes[0]] * (death + 1)
        assert clusters[death:] == sorted(clusters[death:], reverse=True)
        assert clusters[-1] == sizes[-1]
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
            members = [now[u] for u in uids]
            peers = list(workers.values()) if step == death else members
            workers = now
            rule.cluster = at[0]["size"]
            rule.step(members, step, [row["sources"].get(name) for row in at], peers)
            for row in at:
                got, want = row["models"][name], workers[row["uid"]].w
                np.testing.assert_allclose(
                    got, want, rtol=0, atol=tolerance(step, want), err_msg=f"{name}, step {step}, rank {row['rank']}"
                )
        last = [row["models"][name] for row in steps[-1]]
        assert (np.ptp(last, axis=0).max() == 0) == (name in ("ssgd", "adaptive") or len(last) == 1), (
            f"{name}: who differs from whom?"
        )


@pytest.mark.parametrize("mode", ["graph", long("pynative")])
@pytest.mark.parametrize("n", [long(1), long(2), long(3), long(4)])
def test_updates_agree_with_numpy(run_program, tmp_path, mode, n):
    (tmp_path / "out").mkdir()
    run_program(PROGRAM, tmp_path / "out", "none", mode, np=n)
    agree(tmp_path / "out", [n] * STEPS)


@pytest.mark.long  # a death changes the size in the quick suite
@pytest.mark.parametrize("mode", ["graph", "pynative"])
def test_updates_agree_with_numpy_across_resizes(run_program, tmp_path, mode):
    (tmp_path / "out").mkdir()
    run_program(PROGRAM, tmp_path / "out", "4:4,8:1", mode, np=2, watch=True)
    agree(tmp_path / "out", [2] * 4 + [4] * 4 + [1] * 4)


def test_updates_agree_with_numpy_when_a_worker_dies(run_program, tmp_path):
    (tmp_path / "out").mkdir()
    run_program(PROGRAM, tmp_path / "out", "none", "graph", "5", np=3, watch=True)
    agree(tmp_path / "out", [3] * 5 + [2] * 7, death=5)


def test_pair_averaging_takes_half_of_each_model():
    own = ms.Parameter(ms.Tensor([1.0, 3.0]), name="w")
    cell = SimpleNamespace(
        request=lambda parameters: (ms.Tensor([3.0, 5.0]), ms.Tensor([1, 7], ms.int64)),
        count=1,
        map=composite.HyperMap(),
        exchanged=ms.Parameter(ms.Tensor([-1, 0], ms.int64), name="exchanged"),
    )
    pair.PairExchange.construct(cell, (own,))
    assert own.asnumpy().tolist() == [2.0, 4.0]
    assert cell.exchanged.asnumpy().tolist() == [1, 7]


@pytest.mark.parametrize(("steady", "lead"), [(True, 2.0), (False, 1.0)])
def test_central_model_is_carried_on_by_its_momentum_when_steady(steady, lead):
    found = synchronous._lead(0.5, ms.Tensor(steady), ms.Tensor([2.0]), ms.Tensor([1.0]))
    assert found.asnumpy().tolist() == [lead]
