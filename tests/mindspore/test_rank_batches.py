"""Which arguments of a gradient function are a rank's batch, and which updates were made rank by rank; one process."""

from __future__ import annotations

import logging

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.experimental import optim

from ms_kungfu.msrun import cells, rank_batches, world

SIZES = [2, 2]


@pytest.fixture
def step(monkeypatch):
    """A function that begins a step of two ranks' batches at this worker, and returns these."""
    monkeypatch.setattr(world, "size", lambda: 4)
    monkeypatch.setattr(rank_batches, "_step", rank_batches._Step())
    ms.set_context(mode=ms.PYNATIVE_MODE)

    def begin():
        rank_batches.begin(SIZES, (0, 1))
        batch = ms.Tensor(np.arange(12).reshape(4, 3), ms.float32), ms.Tensor([0, 1, 2, 3], ms.int32)
        rank_batches.hand_out(batch)
        return batch

    return begin


def test_columns_of_the_batch_are_cut_and_older_tensors_stay_whole(step, caplog):
    weights = ms.Tensor([1.0, 2.0, 3.0, 4.0])  # of classes, of which there are as many as samples
    for _ in range(2):
        x, y = step()
        first, second = rank_batches._cut((x, {"y": y}, weights), SIZES)
        assert first[0].asnumpy().tolist() == x.asnumpy()[:2].tolist()
        assert second[1]["y"].asnumpy().tolist() == [2, 3]
        assert first[2] is weights
        assert second[2] is weights
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert ['shapes="[(4,)]"' in line and "existed before the step" in line for line in said] == [True]


def test_tensors_derived_from_the_batch_are_cut_and_logged_once(step, caplog):
    step()
    for _ in range(2):
        x, y = step()
        first, _ = rank_batches._cut((ops.cast(x, ms.float16), ops.one_hot(y, 5), x.T), SIZES)
        assert [each.shape for each in first] == [(2, 3), (2, 5), (3, 4)]
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    expected = ['shapes="[(4, 3), (4, 5)]"', 'shapes="[(3, 4)]"']
    assert [shapes in line for shapes, line in zip(expected, said, strict=True)] == [True, True]
    assert "have as many rows" in said[0]
    assert "in a dimension other than the first" in said[1]


def test_tensor_of_an_earlier_step_stays_whole_for_each_rank(step):
    x, y = step()
    made = ms.Tensor([1.0, 2.0, 3.0, 4.0])
    for _ in range(2):  # two gradient functions of one step
        assert rank_batches._cut((x, made), SIZES)[0][1].shape == (2,)
    again, _ = step()
    assert [each.shape for each in rank_batches._cut((again, made, x, y), SIZES)[0]] == [(2, 3), (4,), (4, 3), (4,)]


def test_a_call_with_nothing_of_the_step_is_refused(step):
    weights = ms.Tensor([1.0, 2.0, 3.0, 4.0])
    step()
    with pytest.raises(RuntimeError, match="no tensor of this step in the call has as many rows"):
        rank_batches._cut((weights,), SIZES)


@pytest.mark.parametrize("kind", [nn.SGD, optim.SGD, optim.Adam], ids=lambda kind: kind.__module__)
def test_only_an_update_of_another_gradient_is_refused(kind, step, monkeypatch):
    weight = ms.Parameter(ms.Tensor([1.0, 2.0]), name="weight")
    optimizer = kind([weight], 0.1)
    monkeypatch.setattr(cells, "living", lambda: [optimizer])
    step()
    rank_batches.end()  # without an update
    step()
    optimizer((ms.Tensor([1.0, 1.0]),))
    with pytest.raises(RuntimeError, match="training with gradients that aren't computed separately for each rank"):
        rank_batches.end()


def test_an_update_that_no_known_optimizer_makes_is_refused(step, monkeypatch):
    monkeypatch.setattr(cells, "living", list)
    step()
    with pytest.raises(RuntimeError, match="training with gradients that aren't computed separately for each rank"):
        rank_batches.end()
