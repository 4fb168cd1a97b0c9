"""Which random generators the workers share, and what a joining worker's are."""

from __future__ import annotations

import json
import random

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from ms_kungfu import runtime
from ms_kungfu.elastic import program, randomness, state


class Noisy(nn.Cell):
    def __init__(self, seed):
        super().__init__()
        self.noise = ms.Generator()
        self.noise.manual_seed(seed)


def draws(net):
    """Of each generator two numbers, or the state that decides them: MindSpore's kernels keep more than that."""
    ms.ops.randn(2).asnumpy()
    return {
        "random_python": [random.random() for _ in range(2)],
        "random_numpy": np.random.rand(2).tolist(),
        "mindspore_generator": ms.get_rng_state().asnumpy().tolist(),
        "mindspore_seed": (ms.get_seed(), ms.dataset.config.get_seed()),
        "random_generators": [int(part) for part in net.noise._step(ms.Tensor(2, ms.int64))],
    }


class Worker:
    """A worker's program, run until its first `begin`."""

    def __init__(self, seed):
        self.program = program.Program()
        program.use(self.program)
        ms.set_seed(seed)
        ms.manual_seed(seed)
        random.seed(seed)
        self.net = Noisy(seed)
        self.components = [
            state.Component("progress", self.progress, self.resume),
            *randomness.components([self.net]),
        ]
        randomness.note_origins(self.components)

    def progress(self):
        return {"call": 1, "step": 7, "generators": self.program.generators.state()}

    def resume(self, progress):
        self.program.resume = progress
        self.program.generators.receive(progress["generators"])

    def capture(self):
        return json.loads(json.dumps({c.name: c.capture() for c in self.components}))


@pytest.fixture(autouse=True)
def pynative():
    ms.set_context(mode=ms.PYNATIVE_MODE)
    yield
    program.use(program.Program())


@pytest.fixture
def join(monkeypatch):
    """``join(source, seed, rank)``: what a worker draws that joins with the source's state."""

    def join(captured, seed, rank=1, of_a_checkpoint=False):
        joining = Worker(seed)
        monkeypatch.setattr(runtime, "current_rank", lambda: rank)
        if of_a_checkpoint:
            assert state.resume_components(joining.components, captured, of_another=True) == []
        else:
            state.restore_components(joining.components, captured)
        return draws(joining.net)

    return join


def began(seed):
    """(what a worker captures after it has drawn, what it draws next)"""
    source = Worker(seed)
    draws(source.net)
    return source.capture(), draws(source.net)


@pytest.mark.parametrize("of_a_checkpoint", [False, True])
def test_joining_worker_with_another_seed_draws_its_own_numbers(join, of_a_checkpoint):
    captured, next_there = began(100)
    first = join(captured, 101, 1, of_a_checkpoint)
    again = join(captured, 101, 1, of_a_checkpoint)
    other = join(captured, 102, 2, of_a_checkpoint)
    assert first == again
    for name in randomness.NAMES:
        assert first[name] != next_there[name], name
        assert first[name] != other[name], name


def test_joining_worker_with_the_same_seed_continues_the_shared_stream(join):
    captured, next_there = began(100)
    assert join(captured, 100, 1) == next_there


def test_one_generator_is_shared_and_another_is_own(join):
    captured, next_there = began(100)
    captured["progress"]["generators"]["shared"] = {"random_numpy": False}
    drawn = join(captured, 100, 1)
    assert {name for name in randomness.NAMES if drawn[name] != next_there[name]} == {"random_numpy"}


def test_decision_of_the_first_cluster_holds_for_later_workers(join):
    """Rank 0 has failed, and rank 1's seed is that of the worker that joins as rank 1."""
    source = Worker(101)
    of_rank_0 = [1, 2, 3, 4, 5]
    randomness.decide({0: of_rank_0, 1: randomness.row()})
    captured, next_there = source.capture(), draws(source.net)
    assert source.program.generators.shared == dict.fromkeys(randomness.NAMES, False)
    drawn = join(captured, 101, 1)
    assert all(drawn[name] != next_there[name] for name in randomness.NAMES)
    assert program.current().generators.shared == dict.fromkeys(randomness.NAMES, False)


def test_workers_that_began_with_one_seed_share_with_any_later_worker(join):
    source = Worker(100)
    randomness.decide({0: randomness.row(), 1: randomness.row()})
    captured, next_there = source.capture(), draws(source.net)
    assert join(captured, 55, 1) == next_there


def test_shared_seed_of_datasets_stays_where_the_generator_is_own(join):
    """Without mindspore.manual_seed each process begins with another generator, and datasets shuffle by the seed."""
    captured, next_there = began(100)
    captured["progress"]["generators"]["shared"] = {"mindspore_generator": False}
    drawn = join(captured, 100, 1)
    assert {name for name in randomness.NAMES if drawn[name] != next_there[name]} == {"mindspore_generator"}


def test_checkpoint_of_an_older_version_is_continued_as_before(join):
    captured, next_there = began(100)
    captured["progress"]["generators"] = None
    assert join(captured, 101, 1, of_a_checkpoint=True) == next_there
