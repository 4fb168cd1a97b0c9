"""Wrong calls: each one sentence at every rank that is concerned, and the next operation works."""

import threading

import numpy as np

import ms_kungfu as kf
from ms_kungfu import _core, comm

rank, size = kf.current_rank(), kf.current_cluster_size()


def raises(kind, text, call):
    try:
        call()
    except kind as error:
        assert text in str(error), (text, str(error))
        return error
    raise AssertionError(f"{kind.__name__} was not raised: {text}")


# Refused before anything is sent, at this rank alone.
x = np.ones(3, np.float32)
if rank == 0:
    raises(
        ValueError, "op must be one of sum, mean, min, max, prod, got 'median'", lambda: comm.all_reduce(x, op="median")
    )
    for bad, text in [
        (np.ones(3, bool), "can't reduce an array of bool"),
        ([1j, 2], "can't reduce an array of complex128"),
        ("text", "can't reduce an array of <U4"),
        (None, "can't reduce an array of object"),
        (np.ma.masked_array([1.0, 2.0], [True, False]), "the mask of a masked array would be lost"),
    ]:
        raises(TypeError, text, lambda bad=bad: comm.all_reduce(bad))
        raises(TypeError, text, lambda bad=bad: comm.reduce_scatter(bad if np.ndim(bad) else [bad] * size * 2))
    for move in (comm.broadcast, comm.all_gather, lambda bad: comm.save("bad", bad)):
        raises(TypeError, "an array of object can't be shared", lambda move=move: move([None]))
        raises(TypeError, "the mask of a masked array", lambda move=move: move(np.ma.masked_array([1.0], [True])))
    raises(TypeError, "out must be a NumPy array, got list", lambda: comm.all_reduce(x, out=[1, 2, 3]))
    wide = np.arange(10, dtype=np.float32)
    for part, out in ((wide[:6], wide[2:8]), (wide[2:8], wide[:6])):
        raises(ValueError, "partly overlaps the input", lambda part=part, out=out: comm.all_reduce(part, out=out))
        raises(ValueError, "partly overlaps the input", lambda part=part, out=out: comm.broadcast(part, out=out))
    assert (wide == np.arange(10)).all()
    raises(ValueError, "out must be C-contiguous", lambda: comm.all_reduce(wide[:5], out=wide[::2]))
    raises(TypeError, "no dtype has number 99", lambda: _core.all_reduce("x", x, x, 0, 99))
    raises(
        ValueError,
        "3 bytes aren't a whole number of float32",
        lambda: _core.broadcast("x", b"abc", bytearray(3), 0, 10),
    )
    raises(ValueError, "no reduction has number 9", lambda: _core.all_reduce("x", x, x, 9))
    raises(ValueError, "out has 12 bytes", lambda: _core.all_gather("x", x, x.copy()))
    raises(
        ValueError, "out must be float32(3,), got float32(2,)", lambda: comm.all_reduce(x, out=np.ones(2, np.float32))
    )
    raises(ValueError, f"root {size} is not a rank of a cluster of {size}", lambda: comm.broadcast(x, root=size))
    raises(ValueError, "all_reduce: the name is empty; pass a name", lambda: comm.all_reduce(x, name=""))
    raises(
        ValueError,
        "requires an array with at least one dimension, got int64()",
        lambda: comm.all_gather(1, uneven=True),
    )
    raises(TypeError, "complex can't be sent", lambda: comm.all_gather_object([1j]))
    raises(OverflowError, "2**64", lambda: comm.all_gather_object(1 << 64))
    raises(ValueError, "can't be scattered evenly", lambda: comm.reduce_scatter(np.ones(size + 1, np.float32)))
    locked = np.ones(3, np.float32)
    locked.flags.writeable = False
    raises(ValueError, "not read-only", lambda: comm.all_reduce(x, out=locked))
    assert isinstance(kf.last_error(), ValueError), kf.last_error()

# The ranks differ: each of them gets an error that names all.
different = np.ones((2, 3) if rank == 0 else (3, 2), np.float32)
error = raises(kf.CollectiveMismatchError, 'with the name "w"', lambda: comm.all_reduce(different, name="w"))
others = "rank " + ", ".join(str(r) for r in range(1, size))
assert f"rank 0: all_reduce of 6 float32 (2,3), sum; {others}: all_reduce of 6 float32 (3,2), sum" in str(error), error
assert isinstance(error, ValueError)
assert type(kf.last_error()) is kf.CollectiveMismatchError
assert str(kf.last_error()) == str(error)
assert comm.all_reduce(x, name="w")[0] == size
# What travels as bytes keeps its name.
different = np.ones(8, bool) if rank == 0 else np.ones(1)
error = raises(kf.CollectiveMismatchError, "bool(8,)", lambda: comm.broadcast(different, name="w"))
different = np.ones((1, 2) if rank == 0 else (1, 3))
raises(kf.CollectiveMismatchError, "float64(*, 2)", lambda: comm.all_gather(different, name="w", uneven=True))
error = raises(ValueError, "at most 16777216", lambda: comm.all_gather_object(b"0" * ((rank == 1) << 24), name="w"))
assert '"w": rank 1 sends 16777221 bytes' in str(error), error

raises(
    kf.CollectiveMismatchError, "the ranks ask for different sizes: rank 0: 1, rank 1: 2", lambda: kf.resize(rank + 1)
)
assert kf.resize(size) == (False, False)
raises(ValueError, "at least 1 rank", lambda: kf.resize(0))
raises(ValueError, "at most 65535, got size 262144", lambda: kf.resize(262144))
raises(kf.ResizeError, "needs a config server: start the job with kungfu-run -w", lambda: kf.resize(size + 1))
assert comm.all_reduce(x, name="w")[0] == size


# Two names from two threads, in opposite order at each other rank.
def many(name):
    for i in range(200):
        assert comm.all_reduce(np.full(i * 100, rank, np.float32), name=name).sum() == i * 100 * sum(range(size))


names = ["a", "b"] if rank % 2 else ["b", "a"]
threads = [threading.Thread(target=many, args=(name,)) for name in names]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()

kf.finalize()
print(f"rank {rank} fine")
