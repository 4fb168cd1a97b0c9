"""Which tensors have been made the same on all workers, and what an optimizer says of those that haven't."""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from ms_kungfu import membership
from ms_kungfu.comm import Array

# Short: what differs otherwise comes behind it, in a message with an end.
_REMEDY = "all begin alike by KungFuElasticCallback, ElasticTraining or sync_net_parameters"

_alike: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_claims: list[tuple[Sequence[Any], int]] = []  # of this process: parameters, and what they were when it began


def content(tensors: Iterable[Any]) -> int:
    """A number below 2**63 that differs, in all likelihood, where one bit of one of the tensors does."""
    sums = []
    for tensor in tensors:
        if getattr(tensor, "has_init", False):
            tensor.init_data()
        sums.append(_sum(tensor.asnumpy()).to_bytes(8, "little"))
    return content_of(b"".join(sums))


def content_of(data: bytes) -> int:
    """The same of these bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _sum(values: Array) -> int:
    """The bits as 64-bit words, added up: at the memory's speed, which no hash has."""
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    words = content[: content.size // 8 * 8].view(np.uint64)
    rest = int.from_bytes(content[words.size * 8 :].tobytes(), "little")
    return (int(words.sum(dtype=np.uint64)) + rest) & (1 << 64) - 1


def mark(tensors: Iterable[Any]) -> None:
    """These have been made the same on all workers, at all of them."""
    _alike.update((id(tensor), tensor) for tensor in tensors)
    _claims[:] = [claim for claim in _claims if not all(map(is_marked, claim[0]))]
    _tell()


def is_marked(tensor: Any) -> bool:
    return _alike.get(id(tensor)) is tensor


def claim(parameters: Iterable[Any]) -> None:
    """An optimizer that keeps these equal is about to train them for the first time.

    Where nothing has made them the same on all workers, their content becomes a part of what the gradient reductions
    say of themselves. So the first of them fails at every rank, with this as its reason, where the ranks have begun
    with different parameters; otherwise it costs nothing, and no rank waits for another that doesn't come here.
    """
    mine = [p for p in parameters if not is_marked(p)]
    # Whoever joins later begins in the midst: with those who were there before it has nothing to compare.
    if mine and membership.size() > 1 and membership.is_first_cluster():
        _claims.append((mine, content(mine)))
        _tell()


def _tell() -> None:
    whole = hashlib.blake2b(repr([value for _, value in _claims]).encode(), digest_size=4).hexdigest()
    membership.current().core.set_claim(f"on parameters {whole} ({_REMEDY}), " if _claims else "")
