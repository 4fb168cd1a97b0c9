"""Record which Parameters each optimizer trains, and whether they are known to be equal on all workers.

If no function has made an optimizer's Parameters equal on all workers, the optimizer's first
reduction compares their content (`claim`).
"""

from __future__ import annotations

import contextlib
import hashlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from ms_kungfu import membership
from ms_kungfu.comm import Array

_ROW_BYTES = 2048

reducers: weakref.WeakSet[Any] = weakref.WeakSet()  # this process's reducers
_differing: weakref.WeakSet[Any] = weakref.WeakSet()
_alike: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_claims: list[tuple[Sequence[Any], int]] = []  # parameters, and a hash of their initial content


def content(tensors: Iterable[Any]) -> int:
    """Hash the bytes of the tensors to a number below 2**63."""
    sums = []
    for tensor in tensors:
        if getattr(tensor, "has_init", False):
            tensor.init_data()
        sums.append(_sums(tensor.asnumpy()))
    return content_of(b"".join(sums))


def content_of(data: bytes) -> int:
    """Hash bytes to a number below 2**63."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _sums(values: Array) -> bytes:
    """Arrange the bytes as a table of 64-bit words, and hash the sums of the table's rows and columns.

    Summing is about as fast as reading memory; hashing all bytes is slower. Two changes that cancel each other in the
    sum of a row still change the sums of their columns, and vice versa.
    """
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    table = content[: content.size // _ROW_BYTES * _ROW_BYTES].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
    digest = hashlib.blake2b(digest_size=8)
    for part in (table.sum(axis=0), table.sum(axis=1), content[table.nbytes :]):
        digest.update(part.tobytes())
    return digest.digest()


def mark(tensors: Iterable[Any]) -> None:
    """Record that these tensors have been made equal on all workers. Call this on every worker."""
    _alike.update((id(tensor), tensor) for tensor in tensors)
    _claims[:] = [claim for claim in _claims if not all(map(is_marked, claim[0]))]
    _tell()


def is_marked(tensor: Any) -> bool:
    return _alike.get(id(tensor)) is tensor


def claim(parameters: Iterable[Any]) -> None:
    """Record that an optimizer is about to train these Parameters, which must be equal, for the first time.

    If no function has made the Parameters equal on all workers, their hash is added to the description of each gradient
    reduction. If the ranks start with different Parameters, the first reduction fails on every rank, with an error
    message that names this reason. If the Parameters are equal, the comparison costs nothing. The call isn't a
    collective, so it doesn't wait for other ranks.
    """
    mine = [p for p in parameters if not is_marked(p)]
    # A worker that joins later receives its Parameters, so it has nothing to compare.
    if mine and membership.size() > 1 and membership.is_first_cluster():
        _claims.append((mine, content(mine)))
        _tell()


@contextlib.contextmanager
def claiming(claim: str) -> Iterator[None]:
    """Add `claim` to each reduction's description in the context. If ranks' descriptions differ, a reduction fails."""
    core = membership.current().core
    core.set_claim(claim + _claim())
    try:
        yield
    finally:
        core.set_claim(_claim())


def _tell() -> None:
    membership.current().core.set_claim(_claim())


def _claim() -> str:
    whole = hashlib.blake2b(repr([value for _, value in _claims]).encode(), digest_size=4).hexdigest()
    return f"on parameters {whole}, " if _claims else ""  # operation.cc searches for this text


def serves(reducer: Any) -> None:
    """Record that the cell `reducer` reduces gradients over the workers."""
    reducers.add(reducer)


def let_differ(owner: Any) -> None:
    """Allow the Parameters of the cell `owner` to differ between workers while ``owner.replicas_differ`` is true."""
    _differing.add(owner)


def replicas() -> set[int]:
    """Return the IDs of the Parameters that may currently differ between workers."""
    return {id(p) for owner in _differing if owner.replicas_differ for p in owner.get_parameters()}
