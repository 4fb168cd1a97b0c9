"""comm.save and comm.request between workers."""

import numpy as np

import ms_kungfu as kf
from ms_kungfu import comm


def values(rank, version):
    return np.arange(5, dtype=np.float64).reshape(1, 5) + 100 * rank + 1000 * version


def check_everyone(version):
    """Each rank's latest is what that rank has saved, and no rank has saved under another name."""
    for rank in range(kf.current_cluster_size()):
        found = comm.request(rank, "values")
        assert found is not None, rank
        assert found.version == version
        assert found.value.dtype == np.float64
        np.testing.assert_array_equal(found.value, values(rank, version))
        assert comm.request(rank, "nothing") is None
    kf.run_barrier()


kf.init()
rank = kf.current_rank()
assert comm.request(rank, "values") is None
kf.run_barrier()
for version in (1, 2, 3):
    assert comm.save("values", values(rank, version)) == version
    kf.run_barrier()
    check_everyone(version)

# Shapes and dtypes travel along.
odd = {"scalar": np.float32(7), "empty": np.zeros((0, 3), np.int8), "text": np.array("héllo"), "flag": np.array([True])}
for name, value in odd.items():
    comm.save(name, np.asarray(value))
kf.run_barrier()
for name, value in odd.items():
    found = comm.request((rank + 1) % kf.current_cluster_size(), name)
    assert found.value.dtype == np.asarray(value).dtype
    assert found.value.shape == np.shape(value)
    np.testing.assert_array_equal(found.value, value)

for error, said, call in [
    (ValueError, "no rank 99", lambda: comm.request(99, "values")),
    (ValueError, "at least 0", lambda: comm.request(-1, "values")),
    (ValueError, "another name for another layout", lambda: comm.save("values", np.zeros(3))),
    (ValueError, "has 200 bytes; it must have 1 to 127", lambda: comm.save("x" * 200, np.zeros(3))),
    (TypeError, "can't be shared", lambda: comm.save("objects", np.array([object()]))),
]:
    try:
        call()
    except error as raised:
        assert said in str(raised), raised
    else:
        raise AssertionError(f"not refused: {said}")
kf.run_barrier()
print(f"rank {rank} fine")
