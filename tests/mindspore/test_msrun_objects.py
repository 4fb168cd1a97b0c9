"""What a loop's own objects hold that are no cells, on its way to a worker that joins."""

from __future__ import annotations

import json

import mindspore as ms
import numpy as np
from mindspore import nn

from ms_kungfu.msrun import objects


@ms.jit_class
class Accumulator:
    def __init__(self, net, name="acc."):
        self.sums = ms.ParameterTuple(net.trainable_params()).clone(name, "zeros")
        self.weights = net.trainable_params()
        self.counter = ms.Parameter(ms.Tensor(1, ms.int32), f"{name}counter")


def assign(parameter, value):
    parameter.set_data(ms.Tensor(value, parameter.dtype))


def test_a_joining_worker_gets_what_an_object_holds_and_no_cell():
    """Both workers are this process: what one captures, before it changes, it gets back."""
    net = nn.Dense(2, 1)
    made = Accumulator(net)
    component = objects.component([net])
    assign(made.counter, 7)
    assign(made.sums[0], [[2.0, 3.0]])
    told = json.loads(json.dumps(component.capture()))
    weights = net.weight.asnumpy().copy() + 1
    assign(made.counter, 1)
    assign(made.sums[0], [[0.0, 0.0]])
    assign(net.weight, weights)
    component.restore(told)
    assert int(made.counter.asnumpy()) == 7
    assert made.sums[0].asnumpy().tolist() == [[2.0, 3.0]]
    assert np.array_equal(net.weight.asnumpy(), weights), "it comes with the rest of the state"
    assert component.own


def test_objects_that_cannot_be_distinguished_are_left_alone():
    net = nn.Dense(2, 1)
    both = [Accumulator(net, "twice."), Accumulator(net, "twice.")]
    component = objects.component([net])
    told = component.capture()
    for made in both:
        assign(made.counter, 9)
    component.restore(told)
    assert [int(made.counter.asnumpy()) for made in both] == [9, 9]


def test_object_of_another_shape_at_another_worker_keeps_its_values():
    net = nn.Dense(2, 1)
    made = Accumulator(net, "shape.")
    component = objects.component([net])
    told = json.loads(json.dumps(component.capture()))
    ((_, pairs),) = told.items()
    for pair in pairs:
        if "counter" not in pair[0]:
            pair[1] = objects.pack(ms.Tensor(np.ones((5, 5), np.float32)))
    component.restore(told)
    assert made.sums[0].shape == (1, 2)
