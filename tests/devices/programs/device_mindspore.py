"""The primitives in MindSpore itself with device_target="GPU", whose own plugin runs on the simulated device.

device_mindspore.py GPU ENGINE: what the collectives have to go through. With "staging" all ranks take the same device.
No kernel of MindSpore's may run, as the device computes nothing: tensors go in, through the primitives, and come out.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import ms_kungfu as kf

target, engine = sys.argv[1:]
# Before MindSpore has loaded its plugin, and with it the CUDA runtime: the same one is taken.
kf.init(device=target)

import mindspore as ms  # noqa: E402
import numpy as np  # noqa: E402
from mindspore import Parameter, ParameterTuple, Tensor, nn  # noqa: E402

from ms_kungfu import _device  # noqa: E402
from ms_kungfu.ops import KungFuAllGather, KungFuAllReduce, KungFuBroadcast, KungFuReduceScatter  # noqa: E402
from ms_kungfu.ops._cluster import Cluster  # noqa: E402
from ms_kungfu.ops._store import RequestModel, SaveModel  # noqa: E402
from ms_kungfu.ops._sync import broadcast_parameters  # noqa: E402
from ms_kungfu.optimizers import KungFuGradReducer  # noqa: E402

RANK, SIZE = kf.current_rank(), kf.current_cluster_size()
ms.set_device(target, 0 if engine == "staging" else RANK)
DTYPES = ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
COUNT = 6 * SIZE


def numbers(rank: int, salt: int = 0) -> np.ndarray:
    return (np.arange(COUNT) * 3 + rank * 5 + salt) % 11 + 1


EVERYONES = np.array([numbers(r) for r in range(SIZE)])


def same(results: tuple[Tensor, ...], expected: np.ndarray, what: str) -> None:
    for result in results:
        assert np.array_equal(result.asnumpy(), expected.astype(result.asnumpy().dtype)), (
            f"rank {RANK}: {what}: {result}, expected {expected}"
        )


class Calls(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.sum, self.largest = KungFuAllReduce(name="sum"), KungFuAllReduce("max", name="largest")
        self.broadcast = KungFuBroadcast(SIZE - 1, name="broadcast")
        self.gather, self.scatter = KungFuAllGather(), KungFuReduceScatter()
        self.cluster = Cluster()

    def construct(self, *xs):
        return self.sum(xs), self.largest(xs), self.broadcast(xs), self.gather(xs), self.scatter(xs), self.cluster()


def collectives() -> None:
    xs = tuple(Tensor(numbers(RANK).astype(dtype)) for dtype in DTYPES)
    cell = Calls()
    for _ in range(3):
        total, largest, last, gathered, part, (version, size) = cell(*xs)
        same(total, EVERYONES.sum(0), "sum")
        same(largest, EVERYONES.max(0), "max")
        same(last, EVERYONES[-1], "broadcast")
        same(gathered, EVERYONES.reshape(-1), "all-gather")
        same(part, np.split(EVERYONES.sum(0), SIZE)[RANK], "reduce-scatter")
        assert (int(version.asnumpy()), int(size.asnumpy())) == (kf.cluster_version(), SIZE)
        same(xs, EVERYONES[RANK], "the inputs afterwards")


def parameters() -> None:
    both = [Parameter(Tensor(numbers(RANK, i).astype(np.float32)), name=f"p{i}") for i in range(2)]
    broadcast_parameters(both, root=SIZE - 1)
    for i, parameter in enumerate(both):
        same((parameter,), numbers(SIZE - 1, i), "a parameter that was broadcast in place")


class Reduce(nn.Cell):
    def __init__(self, both: list[Parameter], overlap: bool) -> None:
        super().__init__()
        self.reduce = KungFuGradReducer(ParameterTuple(both), name=f"gradients/{overlap}", overlap=overlap)

    def construct(self, *gradients):
        return self.reduce(gradients)


def gradients() -> None:
    both = [Parameter(Tensor(numbers(0).astype(np.float32)), name=f"g{i}") for i in range(3)]
    for overlap in (False, True):
        cell = Reduce(both, overlap)
        for step in range(3):
            means = cell(*(Tensor(numbers(RANK, step).astype(np.float32)) for _ in both))
            wide = np.array([numbers(r, step) for r in range(SIZE)], np.float32)
            for mean in means:
                assert np.allclose(mean.asnumpy(), wide.mean(0)), f"rank {RANK}: mean: {mean}, overlap {overlap}"


class Exchange(nn.Cell):
    def __init__(self, record: str) -> None:
        super().__init__()
        self.store = SaveModel(record)
        self.request = RequestModel(record, "round-robin", 0, False)

    def construct(self, *xs):
        return self.request(xs)


def models(record: str) -> None:
    cell = Exchange(record)
    mine = tuple(Tensor(numbers(RANK).astype(dtype)) for dtype in DTYPES)
    *model, source = cell(*mine)
    assert source.asnumpy().tolist() == [-1, 0]
    same(model, EVERYONES[RANK], "one's own model, as nobody has saved any")
    kf.run_barrier()
    assert [cell.store(mine).asnumpy().tolist() for _ in range(2)] == [[1], [2]]
    kf.run_barrier()
    *model, source = cell(*mine)
    theirs = (RANK + 1) % SIZE
    assert source.asnumpy().tolist() == [theirs, 2]
    same(model, EVERYONES[theirs], "the neighbour's model")


def failures() -> None:
    try:
        print(KungFuBroadcast(SIZE, name="nobody")(Tensor(np.ones(3, np.float32))))
    except RuntimeError as error:
        assert "broadcast" in str(error) and "root" in str(error), error
    else:
        raise AssertionError("a root outside the cluster was not refused")


for mode in (ms.GRAPH_MODE, ms.PYNATIVE_MODE):
    ms.set_context(mode=mode)
    collectives()
    parameters()
    gradients()
    models(f"model/{mode}")
failures()
assert _device.engine_in_use().startswith(engine), _device.engine_in_use()
loaded = set(re.findall(r"libcudart\S*", Path("/proc/self/maps").read_text()))
assert loaded == {"libcudart.so.11.0"}, f"the process has {loaded}"
kf.finalize()
print(f"rank {RANK} fine")
