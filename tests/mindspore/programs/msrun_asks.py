"""A program for msrun, started by a shell script as ``python -m``: asks MindSpore all that is answered under --msrun,
and prints what is refused."""

import copy
import functools
import os

import mindspore as ms
import mindspore.communication.management as management
import mindspore.dataset as ds
import numpy as np
from mindspore import Model, Tensor, context, mint, nn, ops
from mindspore.communication import comm_func, create_group, get_group_size, get_local_rank, get_rank, init, release
from mindspore.ops import ReduceOp, communication
from mindspore.parallel.auto_parallel import AutoParallel

from ms_kungfu import runtime

assert (get_rank(), get_group_size()) == (0, 1), "before init() it is a process alone"
init()
size = 3
assert (get_rank(), get_group_size(), get_local_rank()) == (0, size, 0)
assert management.get_group_size() == size and runtime.current_cluster_size() == 1
for module in (mint.distributed, communication):
    assert (module.get_rank(), module.get_world_size(), module.is_initialized()) == (0, size, True), module
assert ops.gather(Tensor([1, 2, 3]), Tensor([2]), 0).asnumpy().tolist() == [3], "another one than communication's"
create_group("all", list(range(size)))
assert get_group_size("all") == size

ms.set_auto_parallel_context(parallel_mode="data_parallel", gradients_mean=True, device_num=size, full_batch=False)
assert context.get_auto_parallel_context("parallel_mode") == "data_parallel"
assert ms.get_auto_parallel_context("device_num") == size
assert ms.get_auto_parallel_context("pipeline_stages") == 1
ms.reset_auto_parallel_context()
assert ms.get_auto_parallel_context("parallel_mode") == "stand_alone"


def samples(**sharding):
    return ds.NumpySlicesDataset(np.arange(12, dtype=np.float32), **sharding)


sharded = {"shuffle": False, "num_shards": size, "shard_id": 0}
batches = samples(**sharded).batch(2).create_tuple_iterator()
assert next(batches)[0].shape == (2,), "a first look is none"
try:
    next(batches)
except RuntimeError as error:
    print(f"loop: {error}", flush=True)


class Reduced(nn.Cell):
    def __init__(self, op):
        super().__init__()
        self.reduce = ops.AllReduce(op)

    def construct(self, x):
        return self.reduce(x)


class Sent(nn.Cell):
    def __init__(self, root):
        super().__init__()
        self.send = ops.Broadcast(root)

    def construct(self, *x):
        return self.send(x)


# A worker that hasn't begun to train stands for all.
for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
    ms.set_context(mode=mode)
    for dtype in (np.int32, np.int64, np.float16, np.float32, np.float64, np.uint8):
        x = np.arange(6).reshape(2, 3).astype(dtype)
        np.testing.assert_array_equal(Reduced(ReduceOp.SUM)(Tensor(x)).asnumpy(), size * x)
        np.testing.assert_array_equal(Reduced(ReduceOp.MAX)(Tensor(x)).asnumpy(), x)
    half = Reduced(ReduceOp.SUM)(Tensor([1.5], ms.bfloat16))
    assert half.dtype == ms.bfloat16 and float(half.astype(ms.float32).asnumpy()[0]) == 4.5
    gradient = ms.grad(Reduced(ReduceOp.SUM))(Tensor([2.0, 3.0]))
    np.testing.assert_array_equal(gradient.asnumpy(), [size, size])
    sent = Sent(2)(Tensor([[1.5, 2.5]]), Tensor([True, False]))
    assert [each.asnumpy().tolist() for each in sent] == [[[1.5, 2.5]], [True, False]]
    np.testing.assert_array_equal(ms.grad(Sent(0))(Tensor([2.0, 3.0])).asnumpy(), [1, 1])
    weights = ms.ParameterTuple([ms.Parameter(Tensor([1.0]), name=f"w{mode}")])
    for mean, expected in ((True, 2.0), (False, 6.0)):
        reduced = nn.DistributedGradReducer(weights, mean, size)((Tensor([2.0]),))
        np.testing.assert_array_equal(reduced[0].asnumpy(), [expected])
np.testing.assert_array_equal(comm_func.all_reduce(Tensor([1.0]))[0].asnumpy(), [3.0])
np.testing.assert_array_equal(comm_func.broadcast(Tensor([1.0]), 1).asnumpy(), [1.0])
comm_func.barrier()


def train(data):
    net = nn.Dense(1, 1)
    Model(net, nn.MSELoss(), nn.SGD(net.trainable_params())).train(1, data)


def evaluate(data):
    Model(nn.Dense(1, 1), nn.MSELoss(), metrics={"rows": Rows()}).eval(data)


class Rows(nn.Metric):
    def clear(self):
        pass

    def update(self, *columns):
        pass

    def eval(self):
        return 0


def marked(x, info, rank):
    return (x,)


class EveryThird(ds.Sampler):
    def __iter__(self):
        yield from range(get_rank(), 12, size)


refused = {
    "semi_auto": lambda: ms.set_auto_parallel_context(parallel_mode="semi_auto_parallel"),
    "optimizer_parallel": lambda: ms.set_auto_parallel_context(enable_parallel_optimizer=True),
    "pipeline": lambda: ms.set_auto_parallel_context(pipeline_stages=2),
    "device_num": lambda: ms.set_auto_parallel_context(device_num=2),
    "group": lambda: create_group("some", [0, 1]),
    "unknown_group": lambda: get_rank("nobody"),
    "prod": lambda: ops.AllReduce(ReduceOp.PROD),
    "gather": lambda: ops.AllGather(),
    "root": lambda: ops.Broadcast(3),
    "barrier": lambda: ops.Barrier(),
    "scatter": lambda: comm_func.reduce_scatter_tensor(Tensor([1.0])),
    "send": lambda: ops.Send(0, 1),
    "auto_parallel": lambda: AutoParallel(nn.Dense(1, 1)),
    "mint": lambda: mint.distributed.all_reduce(Tensor([1.0])),
    "mint_init": lambda: mint.distributed.init_process_group(),
    "ops_communication": lambda: communication.all_reduce(Tensor([1.0])),
    "ops_all_reduce": lambda: ops.all_reduce(Tensor([1.0])),
    "evaluation": lambda: evaluate(samples(num_shards=2, shard_id=0).batch(2)),
    "stand_alone": lambda: train(samples(**sharded).batch(2)),
}
ms.set_auto_parallel_context(parallel_mode="stand_alone")
for name, call in refused.items():
    try:
        call()
    except (RuntimeError, ValueError) as error:
        print(f"{name}: {error}", flush=True)
    else:
        print(f"{name}: was not refused", flush=True)
ms.set_auto_parallel_context(parallel_mode="data_parallel")
unsuited = {
    "two_sizes": samples(num_shards=2, shard_id=0).batch(2),
    "unsharded": samples(shuffle=False).batch(2),
    "one_shard": samples(num_shards=1, shard_id=0).batch(2),
    "unbatched": samples(**sharded),
    "per_batch_map": samples(**sharded).batch(2, per_batch_map=lambda x, info: (x + get_rank(),)),
    "partial_map": samples(**sharded).batch(2, per_batch_map=functools.partial(marked, rank=get_rank())),
    "python_sampler": samples(sampler=EveryThird()).batch(2),
    "filter": samples(**sharded).filter(lambda x: True).batch(2),
}
for name, data in unsuited.items():
    try:
        train(data)
    except RuntimeError as error:
        print(f"{name}: {error}", flush=True)
    else:
        print(f"{name}: was not refused", flush=True)
# A loop of one's own: the first dataset trains, as it is; another one is an evaluation, of all samples.
net = nn.Dense(1, 1)
optimizer = nn.SGD(net.trainable_params(), 0.1)
reducer = nn.DistributedGradReducer(optimizer.parameters)
gradient = ms.value_and_grad(lambda x: (net(x.reshape(-1, 1)) ** 2).mean(), None, optimizer.parameters)


def step(x):
    optimizer(reducer(gradient(x)[1]))


def whole_batch(x, info):
    return (np.stack(x) + 100,)


first = samples(**sharded).batch(2, per_batch_map=whole_batch, input_columns=["column_0"]).map(lambda x: x - 100)
first, seen = first.repeat(2), []
copied = copy.deepcopy(net)
try:
    next(iter(first))
except RuntimeError as error:
    print(f"copied: {error}", flush=True)
del copied
for (x,) in first:
    step(x)
    seen += x.asnumpy().tolist()
assert seen == [*range(12)] * 2 and int(optimizer.global_step.asnumpy()[0]) == 4, (seen, optimizer.global_step)


def numbers(data):
    return [number for (x,) in data.create_tuple_iterator(num_epochs=1, output_numpy=True) for number in x.ravel()]


assert numbers(samples(**sharded).batch(2)) == [*range(12)]
assert numbers(samples(**sharded, num_samples=2).batch(4)) == [*range(6)]
alone = numbers(samples(shuffle=False, num_shards=1, shard_id=0))
assert alone == [*range(12)], "in one shard: each worker's own"
try:
    for (x,) in samples(**sharded).batch(2):
        step(x)
except RuntimeError as error:
    print(f"second: {error}", flush=True)

release()
assert get_group_size() == 1 and "MS_ROLE" not in os.environ
print("all asked")
