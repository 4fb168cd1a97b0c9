"""An optimizer's or a training's claims on the Parameters that it trains: which ones, and whether they are equal.

If nothing has made an optimizer's Parameters equal, their content is a part of its first reduction (`claim`).
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

# Short: other differences follow it, in a message of limited length.
_REMEDY = "all begin alike by KungFuElasticCallback, ElasticTraining or sync_net_parameters"

reducers: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process
_differing: weakref.WeakSet[Any] = weakref.WeakSet()
_alike: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_claims: list[tuple[Sequence[Any], int]] = []  # of this process: parameters, and what they were when it began


def content(tensors: Iterable[Any]) -> int:
    """Return a number below 2**63 that differs, in all likelihood, if one bit of one of the tensors does."""
    sums = []
    for tensor in tensors:
        if getattr(tensor, "has_init", False):
            tensor.init_data()
        sums.append(_sums(tensor.asnumpy()))
    return content_of(b"".join(sums))


def content_of(data: bytes) -> int:
    """Return the same for these bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _sums(values: Array) -> bytes:
    """Return the bits as a table of 64-bit words, added up by its rows and by its columns, and hashed.

    That runs at about the memory's speed, which no hash does. Two words that differ by opposite numbers are in another
    row, or another column.
    """
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    table = content[: content.size // _ROW_BYTES * _ROW_BYTES].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
    digest = hashlib.blake2b(digest_size=8)
    for part in (table.sum(axis=0), table.sum(axis=1), content[table.nbytes :]):
        digest.update(part.tobytes())
    return digest.digest()


def mark(tensors: Iterable[Any]) -> None:
    """Note that these have been made the same on all workers, at all of them."""
    _alike.update((id(tensor), tensor) for tensor in tensors)
    _claims[:] = [claim for claim in _claims if not all(map(is_marked, claim[0]))]
    _tell()


def is_marked(tensor: Any) -> bool:
    return _alike.get(id(tensor)) is tensor


def claim(parameters: Iterable[Any]) -> None:
    """Note that an optimizer that keeps these equal is about to train them for the first time.

    If nothing has made them the same on all workers, their content becomes a part of the gradient reductions'
    descriptions. So if the ranks have begun with different parameters, the first reduction fails at every rank, with
    this as its reason. Otherwise it costs nothing, and no rank waits for another that doesn't come here.
    """
    mine = [p for p in parameters if not is_marked(p)]
    # A worker that joins later begins in the middle: it has nothing to compare with those before it.
    if mine and membership.size() > 1 and membership.is_first_cluster():
        _claims.append((mine, content(mine)))
        _tell()


@contextlib.contextmanager
def claiming(claim: str) -> Iterator[None]:
    """Add this to the descriptions of the reductions in it: if ranks' descriptions differ, all of them fail."""
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
    return f"on parameters {whole} ({_REMEDY}), " if _claims else ""


def serves(reducer: Any) -> None:
    """Note that this cell reduces gradients over the workers; its `planned_parameters`, if any, are the Parameters."""
    reducers.add(reducer)


def let_differ(owner: Any) -> None:
    """Let the Parameters of this cell differ between workers, while its `replicas_differ` is true."""
    _differing.add(owner)


def replicas() -> set[int]:
    """Return the IDs of the Parameters that may differ at present."""
    return {id(p) for owner in _differing if owner.replicas_differ for p in owner.get_parameters()}
