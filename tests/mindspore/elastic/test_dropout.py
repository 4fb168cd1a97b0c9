"""ms_kungfu.nn.Dropout: masks are a function of the shard, and one mask is used forward and backward."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from ms_kungfu import _core, runtime
from ms_kungfu.nn import Dropout
from ms_kungfu.ops import wait_for_queue

SEED, SHAPE, MODES = 2**40 + 3, (5, 7, 3), (ms.GRAPH_MODE, ms.PYNATIVE_MODE)


def philox(counter, key):
    """Philox4x32-10 as its paper has it, written anew."""
    x, (low, high) = list(counter), key
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ low, b & 0xFFFFFFFF, (a >> 32) ^ x[3] ^ high, a & 0xFFFFFFFF]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return x


def expected(p, step, shard, place, count):
    words = (SEED & 0xFFFFFFFF, SEED >> 32)
    drawn = philox((step & 0xFFFFFFFF, step >> 32, shard, place), words)
    numbers = [n for i in range(-(-count // 4)) for n in philox((i, 0, *drawn[2:]), drawn[:2])]
    return np.array(numbers[:count]).reshape(SHAPE) >= round(p * 2**32)


class Twice(nn.Cell):
    """Two equal dropouts of one input."""

    def __init__(self, p):
        super().__init__()
        self.a, self.b = Dropout(p=p), Dropout(p=p)

    def construct(self, x):
        return self.a(x), self.b(x)


@pytest.fixture(params=MODES, ids=["graph", "pynative"])
def mode(request):
    ms.set_context(mode=request.param)
    yield request.param
    ms.set_context(mode=ms.GRAPH_MODE)


@pytest.fixture
def shard():
    def take(step, number):
        wait_for_queue()
        _core.begin_sharded_step(4, 1.0, True, [], SEED, step, [])
        _core.take_shard(number)

    yield take
    wait_for_queue()
    _core.end_sharded_step()


def test_the_numbers_are_philox():
    # The known answers of Random123, the paper's own code.
    assert philox((0,) * 4, (0, 0)) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert philox((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


def test_masks_are_a_function_of_step_shard_and_place(mode, shard):
    net = Twice(0.3).set_train()
    x = ms.Tensor(np.ones(SHAPE, np.float32))
    seen = []
    for step, number in ((7, 0), (7, 3), (8, 0), (8 | 1 << 40, 0), (7, 0)):
        shard(step, number)
        for place, y in enumerate(net(x)):
            mask = y.asnumpy() != 0
            assert (mask == expected(0.3, step, number, place, x.size)).all()
            seen.append(mask.tobytes())
    assert seen[:2] == seen[-2:]  # the same shard again
    assert len(set(seen)) == 8  # but for it no two masks are alike


@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16, ms.float32, ms.float64])
def test_gradients_have_the_mask_of_the_forward_pass(mode, shard, dtype):
    net = Dropout(p=0.3).set_train()
    x = ms.Tensor(np.linspace(1, 2, 105).reshape(SHAPE), dtype)

    shard(1, 2)
    dx = ops.GradOperation(sens_param=True)(net)(x, ms.Tensor(np.ones(SHAPE), dtype))
    y = net(x)  # the second draw, as the pass before has made one for both of its directions
    first, second = (expected(0.3, 1, 2, place, x.size) for place in (0, 1))
    unit = {ms.float16: 2**-11, ms.bfloat16: 2**-8, ms.float32: 2**-24, ms.float64: 2**-53}[dtype]
    wide = [ops.cast(t, ms.float64).asnumpy() for t in (x, y, dx)]
    scale = 2**32 / (2**32 - round(0.3 * 2**32))
    assert y.dtype == dx.dtype == dtype
    # The scale is rounded, to float32 where that is wider, and so is the product.
    assert np.allclose(wide[1], np.where(second, wide[0] * scale, 0), rtol=3 * unit, atol=0)
    assert np.allclose(wide[2], np.where(first, scale, 0), rtol=3 * unit, atol=0)


def test_outside_of_a_step_masks_follow_the_seed_and_their_rate_is_p(mode):
    ms.set_seed(11)
    net = Twice(0.2).set_train()
    x = ms.Tensor(np.ones(200_000, np.float32))
    masks = [y.asnumpy() != 0 for _ in range(2) for y in net(x)]
    deviation = np.sqrt(0.2 * 0.8 / x.size)
    for i, mask in enumerate(masks):
        assert abs(mask.mean() - 0.8) < 6 * deviation  # one in 5e8
        for other in masks[:i]:
            both = (mask & other).mean()  # independent: 0.64
            assert abs(both - 0.64) < 6 * np.sqrt(0.64 * 0.36 / x.size)


def test_evaluation_changes_nothing_and_draws_nothing(mode, shard):
    net = Dropout(p=0.3)
    x = ms.Tensor(np.ones(SHAPE, np.float32))
    shard(7, 1)
    assert (net.set_train(False)(x).asnumpy() == 1).all()
    assert ((net.set_train()(x).asnumpy() != 0) == expected(0.3, 7, 1, 0, x.size)).all()


def test_dropout_with_wrong_probability_is_refused(monkeypatch):
    for p in (-0.1, 1, 1.5):
        with pytest.raises(ValueError, match="less than 1"):
            Dropout(p=p)
    with pytest.raises(TypeError, match="a number"):
        Dropout(p="0.5")
    with pytest.raises(TypeError, match="float16"):
        Dropout(p=0.5).set_train()(ms.Tensor([1, 2], ms.int32))
    for target in ("GPU", "Ascend"):
        monkeypatch.setattr(ms, "get_context", {"device_target": target}.get)
        with pytest.raises(ValueError, match=f"no kernel for {target}"):
            Dropout(p=0.5)


def test_construction_of_dropout_does_not_join_the_cluster(monkeypatch):
    """Workers build their networks while others have yet to start."""
    monkeypatch.setattr(runtime, "init", lambda *_: pytest.fail("it joins"))
    monkeypatch.setenv("KUNGFU_BROKER", "unix:nowhere")
    monkeypatch.setenv("RANK_ID", "3")
    assert Dropout(p=0.3).dropout.rank == 3
