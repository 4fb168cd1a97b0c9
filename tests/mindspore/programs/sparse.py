"""Sparse gradients over workers, against one worker on all samples: the rows that no rank has read stay as they are."""

import mindspore as ms
import numpy as np
from ending import end
from mindspore import Tensor, nn, ops
from mindspore.nn.optim.optimizer import _indices_deduplicate
from mindspore.ops import composite

import ms_kungfu as kf
from ms_kungfu.optimizers import KungFuAdam, KungFuGradReducer, SynchronousSGDOptimizer

ms.set_context(mode=ms.GRAPH_MODE)
RANK, SIZE = kf.current_rank(), kf.current_cluster_size()
ROWS, WIDTH, STEPS = 12, 3, 2
# Of other lengths at each rank, with rows that come twice and rows that both ranks read. Rows 8 to 11 are in none.
READ = [[[0, 1, 1], [2, 0, 3]], [[3, 1, 5, 3, 0], [6, 7, 7, 2, 2]]]


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        random = np.random.RandomState(1)
        self.rows = nn.EmbeddingLookup(ROWS, WIDTH, param_init=Tensor(random.randn(ROWS, WIDTH).astype(np.float32)))
        self.head = nn.Dense(WIDTH, 1, weight_init=Tensor(random.randn(1, WIDTH).astype(np.float32)), bias_init="zeros")

    def construct(self, read, weights):
        return ops.reduce_sum(weights * ops.square(self.head(self.rows(read))))


class Step(nn.Cell):
    def __init__(self, loss, parameters, optimizer, reducer=None):
        super().__init__(auto_prefix=False)
        self.loss, self.optimizer, self.reducer = loss, optimizer, reducer
        self.parameters = ms.ParameterTuple(parameters)
        self.gradient = ops.GradOperation(get_by_list=True)

    def construct(self, read, weights):
        gradients = self.gradient(self.loss, self.parameters)(read, weights)
        if self.reducer is not None:
            gradients = self.reducer(gradients)
        return self.optimizer(gradients)


class Deduplicate(nn.Cell):
    """What MindSpore's optimizers do with sparse gradients on other devices than CPUs."""

    def __init__(self):
        super().__init__(auto_prefix=False)
        self.map = composite.HyperMap()

    def construct(self, gradients):
        return self.map(_indices_deduplicate, gradients)


def trained(make, of_all, reduces=False):
    """Yields the parameters after each step."""
    net = Net()
    parameters = net.trainable_params()
    reducer = Deduplicate() if of_all else KungFuGradReducer(parameters) if reduces else None
    step = Step(net, parameters, make(parameters), reducer)
    ranks = range(SIZE) if of_all else [RANK]
    for number in range(STEPS):
        reads = [READ[rank][number] for rank in ranks]
        weights = [[1 / len(read) / len(reads)] for read in reads for _ in read]
        step(Tensor(sum(reads, []), ms.int32), Tensor(weights, ms.float32))
        yield [parameter.asnumpy().copy() for parameter in parameters]


def lazy(parameters):
    return nn.LazyAdam(parameters, 0.1)


def check(what, plain, make, reduces=False, lazily=True):
    initial = Net().rows.embedding_table.asnumpy()
    read = set()
    for number, (ours, expected) in enumerate(zip(trained(make, False, reduces), trained(plain, True))):
        for one, other in zip(ours, expected):
            # Of sums of at most 8 products, in another order, through a root and a division.
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6, err_msg=f"{what} step {number}")
        read.update(row for rank in range(SIZE) for row in READ[rank][number])
        if lazily:
            unread = sorted(set(range(ROWS)) - read)
            assert unread, number
            assert np.array_equal(ours[0][unread], initial[unread]), (what, number)
        rows = kf.comm.all_gather(ours[0], name=f"{what} {number}")
        assert all(row.tobytes() == rows[0].tobytes() for row in rows), (what, number)


check("around", lazy, lambda p: SynchronousSGDOptimizer(lazy(p)))
check("overlap", nn.FTRL, lambda p: SynchronousSGDOptimizer(nn.FTRL(p), overlap=True, fusion="none"))
check("reducer", lazy, lazy, reduces=True)
check("inherited", lambda p: nn.Adam(p, 0.1), lambda p: KungFuAdam(p, 0.1), lazily=False)
try:
    next(trained(lambda p: kf.ops.KungFuAllReduce(name="bare"), False))
except TypeError as error:
    assert "KungFuAllReduce doesn't support a sparse gradient (RowTensor); use KungFuGradReducer" in str(error), error
else:
    raise AssertionError("a bare all-reduce took a sparse gradient")
print(f"rank {RANK} fine", flush=True)
end()
