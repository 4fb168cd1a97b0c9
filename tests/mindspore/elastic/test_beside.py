"""State beside the network that nothing carries is warned of."""

from __future__ import annotations

import copy
import logging

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from ms_kungfu.elastic import beside
from ms_kungfu.elastic.beside import Beside, copies_of


class Ema(nn.Cell):
    """A moving average whose parameters have a prefix."""

    def __init__(self, net):
        super().__init__()
        self.mean = ms.ParameterTuple(net.trainable_params()).clone("ema.")


class Wrapped(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.net = net


@pytest.fixture
def net():
    return nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 1))


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.setattr(beside, "_in_a_job", lambda: True)
    monkeypatch.setattr(Beside, "_told", False)
    monkeypatch.setattr(beside.membership, "speaks_for_all", lambda: True)


def found(net, *carried):
    network = net.trainable_params()
    return copies_of([network], [net], [*network, *(p for cell in carried for p in cell.get_parameters())])


def test_copies_of_the_network_are_found_by_names_and_shapes(net):
    beginning = found(net)
    ema, target, held = Ema(net), copy.deepcopy(net), Wrapped(copy.deepcopy(net))
    wrapper, other = nn.WithLossCell(net, nn.MSELoss()), nn.SequentialCell(nn.Dense(3, 2), nn.Dense(2, 2))
    new = [cell for cell in found(net) if not any(cell is known for known in beginning)]
    assert {id(cell) for cell in new} == {id(ema), id(target), id(held)}, (wrapper, other)
    assert not any(cell is ema for cell in found(net, ema))


def begin(net):
    training = Beside()
    training.look([net], [nn.SGD(net.trainable_params())], net.trainable_params())
    return training


def change(cell):
    for parameter in cell.get_parameters():
        parameter.set_data(ms.Tensor(parameter.asnumpy() + 1))


def test_copy_that_training_changes_is_warned_of_once(net, worker, caplog):
    ema = copy.deepcopy(net)
    with caplog.at_level(logging.WARNING):
        training = begin(net)
        training.step_end()
        assert not caplog.records, "a teacher doesn't change"
        change(ema)
        for _ in range(20):
            training.step_end()
        change(ema)
        training.warn_of_changed()
    (told,) = [record.getMessage() for record in caplog.records]
    assert "a SequentialCell (0.weight, 0.bias, 1.weight, and 1 more)" in told
    assert "components=" in told


def test_copy_is_warned_of_when_the_cluster_changes(net, worker, caplog):
    ema = copy.deepcopy(net)
    training = begin(net)
    training.step_end()
    change(ema)
    with caplog.at_level(logging.WARNING):
        training.warn_of_changed()
    assert len(caplog.records) == 1


def test_copy_is_not_warned_of_outside_of_a_job(net, monkeypatch, caplog):
    monkeypatch.delenv("KUNGFU_BROKER", raising=False)
    ema = copy.deepcopy(net)
    training = begin(net)
    change(ema)
    with caplog.at_level(logging.WARNING):
        training.warn_of_changed()
    assert not caplog.records


@pytest.mark.parametrize("has_components", [False, True])
def test_training_looks_unless_the_program_names_its_state(net, worker, caplog, has_components):
    from ms_kungfu.elastic import Component, ElasticTraining

    ema = copy.deepcopy(net)
    components = [Component("ema", lambda: None, lambda state: None)] if has_components else []
    elastic = ElasticTraining(net, nn.SGD(net.trainable_params()), components=components)
    with caplog.at_level(logging.WARNING):
        elastic.begin()
        change(ema)
        elastic.step_end()
    assert any("beside the network" in each.getMessage() for each in caplog.records) == (not has_components)
    assert np.isfinite(ema[0].weight.asnumpy()).all()
