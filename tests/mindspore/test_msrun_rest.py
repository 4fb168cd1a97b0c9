"""Cells that not all workers of a virtual world have, as one process plays the workers."""

from __future__ import annotations

import contextlib
import logging

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

from ms_kungfu.elastic import state_transfer
from ms_kungfu.elastic.state_transfer import StateLostError, first_difference
from ms_kungfu.errors import KungFuError
from ms_kungfu.msrun import rest
from ms_kungfu.msrun.rest import Rest, apart


class Average(nn.Cell):
    def __init__(self, net):
        super().__init__()
        self.new = ms.ParameterTuple(net.trainable_params())
        self.mean = self.new.clone("average.")


class Worker:
    """Its program: a network, an optimizer, and an average where it has one."""

    def __init__(self, has_average, value=0.0, size=2, joins=False):
        self.net = nn.Dense(3, size, weight_init="ones")
        self.optimizer = nn.Momentum(self.net.trainable_params(), 0.1, 0.9)
        self.average = [Average(self.net)] if has_average else []
        for cell in self.average:
            cell.mean[0].set_data(ms.Tensor(np.full((size, 3), value, np.float32)))
        self.joins = joins
        self.rest = Rest([self.net, self.optimizer, *self.average])

    @property
    def mean(self):
        return float(self.average[0].mean[0].asnumpy()[0, 0])


@pytest.fixture
def together(monkeypatch):
    """A function in which each of the workers agrees, one after the other, as if at once."""

    def agree(*workers):
        rows = {
            rank: {"cells": list(w.rest._cells), "copies": list(w.rest._copies), "joins": w.joins}
            for rank, w in enumerate(workers)
        }
        told = {}

        def gather(value, name):
            if name.endswith("cells"):
                return rows
            told[now[0]] = value
            return {rank: told.get(rank, []) for rank in rows}

        def from_lowest_rank(receive, able, preferred):
            roots = [rank for rank, w in enumerate(workers) if not w.joins and (w.average or w.rest._copies)]
            if not roots:
                raise StateLostError("none")
            root = preferred if preferred in roots else roots[0]
            source = workers[root].rest
            (name,) = [name for name in ({**source._cells, **source._copies}) if name.startswith("Average")]
            if name in source._cells:
                return rest.pack([p.asnumpy() for p in source._cells[name].get_parameters()])
            return source._copies[name]

        monkeypatch.setattr(rest, "gather_json", gather)
        monkeypatch.setattr(state_transfer, "from_lowest_rank", from_lowest_rank)
        monkeypatch.setattr(rest.membership, "speaks_for_all", lambda: now[0] == 0)
        common, now = [], [0]
        for now[0], worker in reversed(list(enumerate(workers))):
            with contextlib.nullcontext() if now[0] == 0 else contextlib.suppress(KungFuError):
                common.insert(0, worker.rest.agree(worker.joins))  # the first one knows what all have told
        for worker in workers:
            worker.joins = False
        return common

    return agree


def test_apart_names_what_not_all_have_and_its_ranks():
    assert apart({0: ["a", "b", "c"], 2: ["a", "c"], 5: ["d", "a"]}) == {"b": [0], "c": [0, 2], "d": [5]}
    assert apart({3: ["a"]}) == {}


def test_cell_of_one_rank_stays_out_of_what_all_keep_alike(together, caplog):
    workers = [Worker(True), Worker(False)]
    with caplog.at_level(logging.INFO):
        assert together(*workers) == [[w.net, w.optimizer] for w in workers]
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == 'msrun: cells="Average (rank 0)". Only some workers have these cells; all other cells are kept equal'
    (alone,) = together(workers[0])
    assert alone == [workers[0].net, workers[0].optimizer, *workers[0].average]


def test_joining_worker_gets_the_values_of_a_worker_that_has_the_cell(together):
    workers = [Worker(True, 3.0), Worker(False), Worker(True, joins=True)]
    weight = workers[2].net.weight.asnumpy() + 5
    workers[2].net.weight.set_data(ms.Tensor(weight))
    together(*workers)
    assert workers[2].mean == 3.0
    np.testing.assert_array_equal(workers[2].net.weight.asnumpy(), weight, "what all have comes with the state")


def test_copy_of_the_rest_survives_its_only_owner(together, caplog):
    first, second = Worker(True, 3.0), Worker(False)
    together(first, second)
    second.rest.copy()
    replaced = Worker(True, joins=True)
    together(second, replaced)
    assert replaced.mean == 3.0
    assert 'msrun: cell=Average action="goes on from the end of the last pass"' in caplog.text


def test_rest_begins_anew_with_a_warning_if_no_worker_has_it(together, caplog):
    replaced = Worker(True, joins=True)
    together(Worker(False), replaced)
    assert replaced.mean == 0.0
    assert 'msrun: cell=Average action="begins anew"' in caplog.text


def test_workers_that_train_other_parameters_are_refused_by_name(together):
    with pytest.raises(
        KungFuError, match=r"'weight \(4, 3\) Float32' at rank 1 and 'weight \(2, 3\) Float32' at rank 0"
    ):
        together(Worker(False), Worker(False, size=4))


def test_first_difference_names_the_first_parameters_that_differ():
    told = first_difference({0: ["a", "b", "c"], 1: ["a", "b", "c"], 3: ["a", "c"]})
    assert (
        "rank 3 trains other parameters than rank 0: the first that differ are 'c' at rank 3 and 'b' at rank 0" in told
    )
    assert "'none' at rank 2" in first_difference({1: ["a", "b"], 2: ["a"]})
