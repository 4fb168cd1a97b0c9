"""All-reduces in the background, with others meanwhile."""

import gc

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm, membership

rank, size = kf.current_rank(), kf.current_cluster_size()
for n in (1, 7, 300_000):
    mine = np.arange(n, dtype=np.float32) + rank
    first = comm.all_reduce_async(mine, name="first")
    second = comm.all_reduce_async(mine, "max", name="second")
    expected = size * np.arange(n, dtype=np.float32) + sum(range(size))
    mine[:] = -1  # it was copied
    assert comm.all_reduce(np.array([rank]), name="meanwhile")[0] == sum(range(size))
    assert np.array_equal(second.wait(), np.arange(n, dtype=np.float32) + size - 1)
    assert np.array_equal(first.wait(), expected)
    assert first.wait() is first.wait()
mean = comm.all_reduce_async([[rank, 2 * rank]], "mean", name="mean").wait()
assert mean.shape == (1, 2) and mean[0, 0] == sum(range(size)) // size, mean
# The weight of gradients is none of theirs.
membership.set_weight(1 + 5 * rank)
assert comm.all_reduce_async(np.float64(rank), "mean").wait() == sum(range(size)) / size
several = [comm.all_reduce_async(np.float64(k)) for k in range(4)]  # without names
assert [each.wait() for each in several] == [size * k for k in range(4)]
pending = comm.all_reduce_async(np.ones(3), name="twice")
for wrong, error, text in (
    (lambda: comm.all_reduce_async(np.ones(3), name="twice"), ValueError, '"twice" is still running'),
    (lambda: comm.all_reduce_async(np.ones(3), "most", name="other"), ValueError, "op must be one of"),
    (lambda: comm.all_reduce_async(np.array(["a"]), name="other"), TypeError, "can't reduce an array of <U1"),
):
    try:
        wrong()
    except error as raised:
        assert text in str(raised), raised
    else:
        raise AssertionError(text)
assert pending.wait().tolist() == [size] * 3
# One that no rank waits for takes no memory, and its name is free again.
comm.all_reduce_async(np.ones(1000), name="left")
gc.collect()
assert comm.all_reduce_async(np.ones(2), name="left").wait().tolist() == [size] * 2
# Ranks that ask for different things.
if size > 1:
    try:
        different = comm.all_reduce_async(np.ones(3 + rank), name="shapes")
        different.wait()
    except kf.CollectiveMismatchError as raised:
        assert '"shapes"' in str(raised)
    else:
        raise AssertionError("shapes differ")
    try:
        different.wait()
    except kf.CollectiveMismatchError as raised:
        assert '"shapes"' in str(raised), "the same a second time"
    else:
        raise AssertionError("shapes differ")
print("fine")
