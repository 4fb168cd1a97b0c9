"""Ranks whose operations become ready in different orders, on several threads and streams; and what goes wrong.

device_order.py TARGET
"""

from __future__ import annotations

import sys
import threading

import device_api as api
import numpy as np
from device_api import Array, Stream

import ms_kungfu as kf
from ms_kungfu import _core, errors

target = sys.argv[1]
stream = api.begin(target)
device = kf.current_rank() % api.count_devices()  # as api.begin() has it
rank, size = kf.current_rank(), kf.current_cluster_size()
N = 1000


def brought(by: int, which: int) -> np.ndarray:
    return (np.arange(N, dtype=np.float32) + which) * (by + 1)


def total(which: int) -> np.ndarray:
    return (np.arange(N, dtype=np.float32) + which) * (size * (size + 1) // 2)


def everything_started_in_another_order_at_each_rank() -> None:
    names = [f"group/{i}" for i in range(12)]
    sources = [Array.of(brought(rank, i), "float32", stream) for i in range(len(names))]
    inputs, outputs, results = ([Array(N, "float32") for _ in names] for _ in range(3))
    for step in range(3):
        order = np.random.default_rng(100 * step + rank).permutation(len(names))
        tickets = {}
        for i in order:
            # The gradient is still being made when its reduction is started, and the result is used at once.
            inputs[i].copy_from(sources[i], stream)
            tickets[i] = api.start_all_reduce(names[i], [inputs[i]], [outputs[i]], "sum", stream)
        api.wait([tickets[i] for i in range(len(names))])
        for i in range(len(names)):
            results[i].copy_from(outputs[i], stream)
        for i in range(len(names)):
            assert (results[i].read(stream) == total(i)).all(), (rank, i)
    for array in (*sources, *inputs, *outputs, *results):
        array.free()


def threads_with_streams_of_their_own() -> None:
    failed = []

    def work(which: int) -> None:
        try:
            api.use_device(device)
            own = Stream()
            source = Array(N, "float32")
            data = Array(N, "float32")
            result = Array(N, "float32")
            for step in range(4):
                source.write(api.bits(brought(rank, which + step), "float32"), own)
                data.copy_from(source, own)  # not waited for
                api.all_reduce(f"thread/{which}", [data], [result], "sum", own)
                assert (result.read(own) == total(which + step)).all(), (rank, which)
            for array in (source, data, result):
                array.free()
            own.destroy()
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads[rank:] + threads[:rank]:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def ranks_count_by_their_weights_in_a_mean_of_gradients() -> None:
    _core.set_weight(rank + 1)
    inputs = [Array.of(brought(rank, i), "float32", stream) for i in range(2)]
    outputs = [Array(N, "float32") for _ in range(2)]
    api.all_reduce_gradients(["first", "second"], inputs, outputs, "mean", stream)
    weights = sum(r + 1 for r in range(size))
    for i in range(2):
        want = sum((r + 1) * brought(r, i) for r in range(size)) / weights
        assert np.allclose(outputs[i].read(stream), want, rtol=1e-6), (rank, i)
    _core.set_weight(1)
    for array in (*inputs, *outputs):
        array.free()


def mistakes_are_errors_at_every_rank() -> None:
    data = Array.of(brought(rank, 0), "float32", stream)
    out = Array(N, "float32")
    try:
        api.all_reduce("mistake", [data], [out], "sum" if rank == 0 else "max", stream)
    except errors.CollectiveMismatchError as error:
        assert "rank 0: all_reduce of 1000 float32, sum; rank 1: all_reduce of 1000 float32, max" in str(error), error
    else:
        raise AssertionError("different operations under one name went through")
    for wrong in (lambda: api.broadcast("root", [data], [out], size, stream), lambda: api.wait([12345])):
        try:
            wrong()
        except ValueError:
            pass
        else:
            raise AssertionError("a wrong call went through")
    # And all goes on.
    api.all_reduce("mistake", [data], [out], "sum", stream)
    assert (out.read(stream) == total(0)).all()
    data.free()
    out.free()


everything_started_in_another_order_at_each_rank()
threads_with_streams_of_their_own()
ranks_count_by_their_weights_in_a_mean_of_gradients()
mistakes_are_errors_at_every_rank()
stream.destroy()
kf.finalize()
print(f"rank {rank} fine")
