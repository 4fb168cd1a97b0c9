"""KIND MODE: trains an epoch of shards by MindSpore alone, without ms_kungfu, as docs/shards.md says they are computed,
and prints the SHA-256 of everything that was trained."""

import os

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # the number of cores decides bits

import sys  # noqa: E402

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import nn  # noqa: E402
from trained import KINDS, SEED, SHARDS, Training, digest  # noqa: E402


def steps(total, unit):
    """The samples of each step: a list of arrays, one a shard."""
    order = np.random.default_rng((SEED, 0)).permutation(total)
    left = [order[first : first + unit] for first in range(0, total, unit)]
    while left:
        # Less than one and a half steps are shared by two.
        count = (len(left) + 1) // 2 if SHARDS < len(left) < 1.5 * SHARDS else SHARDS
        yield left[:count]
        left = left[count:]


def sum_by_the_tree(values):
    """Left plus right, level by level; a sum without a right neighbour goes up as it is."""
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return values[0]


def mean(values, last):
    """Of arrays of float32, one a shard, of which the last counts `last`."""
    assert all(value.dtype == np.float32 for value in values)
    if last != 1:
        values = [*values[:-1], values[-1] * np.float32(last)]
    return np.asarray(sum_by_the_tree(values) / np.float32(len(values) - 1 + last), np.float32)


def put(parameters, values):
    """In their own memory: a graph that is compiled goes on with that, whatever `set_data` gives them."""
    for parameter, value in zip(parameters, values):
        np.copyto(parameter.asnumpy(), value)


def train(training):
    statistics = [p for p in training.net.get_parameters() if "moving" in p.name]
    x, labels = training.samples.x, training.samples.labels
    for shards in steps(training.kind.total, training.kind.unit):
        before = [p.asnumpy().copy() for p in statistics]
        brought, after = [], []
        for samples in shards:
            put(statistics, before)
            _, gradients = training.compute(ms.Tensor(x[samples]), ms.Tensor(labels[samples]))
            brought.append([g.asnumpy().copy() for g in gradients])
            after.append([p.asnumpy().copy() for p in statistics])
        last = len(shards[-1]) / training.kind.unit
        means = tuple(ms.Tensor(mean(list(each), last)) for each in zip(*brought))
        training.update(ms.mutable(means))  # else they are constants of a graph of their own
        put(statistics, [mean(list(each), last) for each in zip(*after)])


ms.set_context(mode=ms.GRAPH_MODE if sys.argv[2] == "graph" else ms.PYNATIVE_MODE)
ms.set_context(inter_op_parallel_num=1, runtime_num_threads=0)  # a pool of one thread: where work is divided does, too
ms.set_seed(1)
training = Training(KINDS[sys.argv[1]], nn, "", None)
train(training)
assert not any(name.split(".")[0] == "ms_kungfu" for name in sys.modules)
print(digest(training.parameters))
