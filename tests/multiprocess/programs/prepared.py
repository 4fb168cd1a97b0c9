"""All-reduces that are prepared once and run many times, also across a change of the cluster."""

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm

rank, size = kf.current_rank(), kf.current_cluster_size()
mine = np.arange(5, dtype=np.float32)
total = comm.AllReduce(mine, name="total")
in_place = np.full((2, 3), rank, np.int64)
largest = comm.AllReduce(in_place, in_place, "max", name="largest")
for step in range(50):
    mine[:] = step + rank  # each call reads the current elements
    assert (total() == size * step + sum(range(size))).all()
    assert total() is total.out is not mine
    in_place[:] = rank + step
    assert largest() is in_place and (in_place == size - 1 + step).all()
# Other ranks may use the ordinary call.
values = np.full(5, rank, np.float32)
prepared = comm.AllReduce(values, op="mean", name="either")
mean = prepared() if rank % 2 else comm.all_reduce(values, "mean", name="either")
assert (mean == (size - 1) / 2).all()
del mine  # the prepared operation keeps the memory
assert len(total()) == 5
for wrong, error, text in (
    (lambda: comm.AllReduce([1.0]), TypeError, "must be a C-contiguous NumPy array in native byte order, got list"),
    (lambda: comm.AllReduce(np.ones(6)[::2]), ValueError, "got one that is strided or byte-swapped"),
    (lambda: comm.AllReduce(np.ones(3, ">f4")), ValueError, "got one that is strided or byte-swapped"),
    (lambda: comm.AllReduce(np.ones(3, bool)), TypeError, "can't reduce an array of bool"),
    (lambda: comm.AllReduce(np.ones(3), np.ones(2)), ValueError, "out must be float64(3,)"),
    (lambda: comm.AllReduce(values, values[1:][:4]), ValueError, "out must be float32(5,)"),
    (lambda: comm.AllReduce(values, op="median"), ValueError, "op must be one of"),
):
    try:
        wrong()
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(text)
if size > 1:
    kf.resize(size - 1)
    if kf.detached():
        raise SystemExit
    in_place[:] = kf.current_rank()
    assert (largest() == size - 2).all()
print("fine", flush=True)
