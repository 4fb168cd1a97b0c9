"""The data of a baseline: tensors whose values depend on rank and index, and the expected results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

_PERIOD = 1021  # of the values; prime, so that it isn't a multiple of any protocol's chunk size
_POISON = 0x5A


@dataclass(frozen=True)
class Dtype:
    """An element type. `number` is the runtime's kf_dtype. In NumPy a bfloat16 is a uint16 with its bits."""

    name: str
    storage: str
    number: int
    tolerance: float = 0.0

    @property
    def unit(self) -> int:
        return int(np.dtype(self.storage).itemsize)

    def encode(self, values: Array) -> Array:
        if self.name == "bfloat16":  # all values here are small integers, for which truncation is exact
            return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(self.storage)

    def decode(self, stored: Array) -> Array:
        if self.name == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
        return stored.astype(np.float64)


_NAMES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float16", "bfloat16", "float32")
_TOLERANCES = {"float16": 2e-3, "bfloat16": 1.6e-2, "float32": 3e-7, "float64": 1e-15}
DTYPES = {
    name: Dtype(name, "uint16" if name == "bfloat16" else name, number, _TOLERANCES.get(name, 0.0))
    for number, name in enumerate((*_NAMES, "float64"))
}


@dataclass(frozen=True)
class Task:
    """One measurement of one baseline, the same on all its ranks.

    `counts` are the tensors' numbers of elements. `groups` are the tensors [begin, end) that one call handles together.
    A measurement is `samples` times `batch` calls, which use `sets` sets of buffers in turn.
    """

    kind: str
    counts: tuple[int, ...]
    groups: tuple[tuple[int, int], ...]
    dtype: str
    op: str = "sum"
    root: int = 0
    sets: int = 1
    samples: int = 3
    batch: int = 1

    @property
    def nbytes(self) -> int:
        return sum(self.counts) * DTYPES[self.dtype].unit


class Workload:
    """The buffers of one rank. A baseline reads ``sets[i][0]`` and leaves its results in ``sets[i][1]``.

    A broadcast is in place: its outputs are its inputs.
    """

    def __init__(self, task: Task, rank: int, size: int) -> None:
        self.task, self.rank, self.size = task, rank, size
        self.dtype = DTYPES[task.dtype]
        self.sets: list[tuple[list[Array], list[Array]]] = []
        for _ in range(task.sets):
            inputs = [np.resize(self._pattern(rank, t), count) for t, count in enumerate(task.counts)]
            outputs = inputs if task.kind == "broadcast" else [np.empty_like(x) for x in inputs]
            self.sets.append((inputs, outputs))

    def _values(self, rank: int, tensor: int) -> Array:
        # Sums over a few ranks stay exact in every dtype, and fit an int8.
        high = 3 if self.task.op == "prod" else 17
        return np.random.default_rng((rank, tensor)).integers(1, high, _PERIOD)

    def _pattern(self, rank: int, tensor: int) -> Array:
        return self.dtype.encode(self._values(rank, tensor))

    def _expected(self, tensor: int) -> Array:
        if self.task.kind == "broadcast":
            return self._pattern(self.task.root, tensor)
        values = np.stack([self._values(r, tensor) for r in range(self.size)])
        if self.task.op == "mean":
            total = values.sum(0)
            return self.dtype.encode(total / self.size if self.dtype.tolerance else total // self.size)
        return self.dtype.encode(getattr(values, self.task.op)(0))

    def poison(self) -> None:
        """Overwrite all outputs, so that right values can only be results of a call."""
        if self.task.kind == "broadcast" and self.rank == self.task.root:
            return
        for _, outputs in self.sets:
            for output in outputs:
                output.view(np.uint8).fill(_POISON)

    def verify(self, used: int) -> str | None:
        """Return an error if an output of the first `used` sets is wrong, else None."""
        for i, (_, outputs) in enumerate(self.sets[:used]):
            for t, output in enumerate(outputs):
                wrong = self._difference(output.reshape(-1), self._expected(t))
                if wrong is not None:
                    return f"rank {self.rank}, buffer set {i}, tensor {t}{wrong}"
        return None

    def _difference(self, output: Array, pattern: Array) -> str | None:
        step = _PERIOD * 1024  # in pieces, so that a check of 256 MiB needs no second buffer of that size
        expected = np.resize(pattern, min(step, output.size))
        for begin in range(0, output.size, step):
            got = output[begin : begin + step]
            want = expected[: got.size]
            if np.array_equal(got, want):
                continue
            error = np.abs(self.dtype.decode(got) - self.dtype.decode(want))
            bad = np.flatnonzero(~(error <= self.dtype.tolerance * np.abs(self.dtype.decode(want))))
            if bad.size:
                at = int(bad[0])
                values = self.dtype.decode(got[at : at + 1])[0], self.dtype.decode(want[at : at + 1])[0]
                return f", element {begin + at}: {values[0]:g} instead of {values[1]:g}"
        return None
