"""Check whether a sample number refers to the same content in each process.

Samples are assigned to workers by number. If a program shuffles or splits its files without a seed, or doesn't sort the
listing of a folder, a number refers to a different sample in each process. Then some samples are used twice and others
never, although each number is used exactly once. To detect this, each process reads some samples when training begins,
and the workers compare hashes of these samples.

The process reads the source's own dataset, before any `map` operation, because augmentation differs between workers by
design. A source that augments in ``__getitem__`` returns different bytes at each read. Therefore the process reads each
of these samples several times. If reads of a sample differ within one process, the workers don't compare contents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

CHECKS = ("some", "all", "none")
READS = 4
"""How often to read each sample in `chosen`. If 1% of the reads differ, a source looks stable in 1 of 10**8 cases."""
_CHOSEN = 8
# With contents_check="all": the maximum number of hashes in a message or checkpoint. If there are more samples than
# this, each hash covers several samples.
_BLOCKS = 1024
_SHOWN = 20
_HASH_BYTES = 6

Digest = tuple[int, int, str]
"""A hash of the samples ``[first, last)``."""


class UnstableError(ValueError):
    """Raised if contents can't be compared: reads of a sample differ, or a column's values can't be hashed."""


def chosen(total: int) -> list[int]:
    """Return the samples to compare by default: the first, the last, and others that depend only on `total`."""
    between = np.random.default_rng(total).integers(total, size=4 * _CHOSEN).tolist()
    return sorted(list(dict.fromkeys([0, total - 1, *between]))[:_CHOSEN])


def hash_of(row: Iterable[Any]) -> bytes:
    """Return a hash over the bytes, shapes and dtypes of a sample's columns."""
    digest = hashlib.blake2b(digest_size=_HASH_BYTES)
    _add(digest, list(row))
    return digest.digest()


class Columns:
    """Compute one hash per column over the samples in `chosen`, which must be added in ascending order."""

    def __init__(self, names: Sequence[str]) -> None:
        self._digests = {name: hashlib.blake2b(digest_size=_HASH_BYTES) for name in names}

    def add(self, row: Sequence[Any]) -> None:
        for digest, value in zip(self._digests.values(), row):
            _add(digest, value)

    def hashes(self) -> tuple[tuple[str, str], ...]:
        return tuple((name, digest.hexdigest()) for name, digest in self._digests.items())


def _add(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        value = [part for item in sorted(value.items(), key=lambda item: str(item[0])) for part in item]
    if isinstance(value, (list, tuple)):
        digest.update(b"[%d" % len(value))
        for part in value:
            _add(digest, part)
        return
    array = np.asarray(value)
    if array.dtype.hasobject:
        raise UnstableError(f"a column of type {type(value).__name__} has no bytes to compare")
    digest.update(f"{array.dtype.str}{array.shape}".encode())
    digest.update(np.ascontiguousarray(array).tobytes())


@dataclass(frozen=True)
class Contents:
    """The hashes of a source's samples in one process."""

    samples: int
    """The number of hashed samples."""
    some: tuple[Digest, ...]
    """A hash for each sample in `chosen`."""
    all: tuple[Digest, ...] = ()
    """Hashes of all samples, in blocks of consecutive samples; empty unless the program requests them."""
    columns: tuple[tuple[str, str], ...] = ()
    """Each column's name, and its hash over the samples in `chosen`. Messages use it to name a column."""

    def words(self) -> dict[str, Any]:
        """Return hashes for a ledger's header, as JSON. Two files' hashes differ if the hash of any sample differs."""
        found = {"samples": self.samples, "some": _word(self.some)}
        return {**found, "all": _word(self.all)} if self.all else found

    def word(self) -> int:
        """Return a number below 2**48. The numbers of two `Contents` differ if the hash of any sample differs."""
        return int(_word((*self.some, *self.all)), 16)

    def state(self) -> list[Any]:
        """Return these hashes for a checkpoint or a joining worker, as JSON."""
        return [self.samples, *([list(each) for each in part] for part in (self.some, self.all, self.columns))]


def restored(state: Sequence[Any]) -> Contents:
    """Return the `Contents` whose `state()` returned `state`."""
    samples, *parts = state
    some, of_all = (tuple((int(a), int(b), str(text)) for a, b, text in part) for part in parts[:2])
    columns = parts[2] if len(parts) > 2 else ()
    return Contents(samples, some, of_all, tuple((str(name), str(text)) for name, text in columns))


def made_of(total: int, hashes: Mapping[int, bytes], columns: tuple[tuple[str, str], ...] = ()) -> Contents:
    """Return `Contents` made from the hashes of the samples in `chosen`, or of all samples."""
    some = tuple((number, number + 1, hashes[number].hex()) for number in chosen(total))
    if len(hashes) < total:
        return Contents(len(some), some, columns=columns)
    edges = [total * part // min(total, _BLOCKS) for part in range(min(total, _BLOCKS) + 1)]
    blocks = []
    for first, last in zip(edges, edges[1:]):
        one = hashes[first].hex()
        several = b"".join(hashes[number] for number in range(first, last))
        blocks.append((first, last, one if last - first == 1 else _word_of(several)))
    return Contents(total, some, tuple(blocks), columns)


def differing(everyones: Iterable[Contents]) -> list[tuple[int, int]]:
    """Compare ranges of samples that several `Contents` have in common. Return the ranges whose hashes differ."""
    found: dict[tuple[int, int], set[str]] = {}
    for contents in everyones:
        for first, last, text in (*contents.some, *contents.all):
            found.setdefault((first, last), set()).add(text)
    return sorted(each for each, texts in found.items() if len(texts) > 1 and not _is_known(each, found))


def _is_known(which: tuple[int, int], found: Mapping[tuple[int, int], set[str]]) -> bool:
    """Return whether a single sample in this range is known to differ, so that a message need not name the range."""
    if which[1] - which[0] == 1:
        return False
    return any(len(texts) > 1 for (a, b), texts in found.items() if b - a == 1 and which[0] <= a < which[1])


def difference(everyones: Iterable[Contents]) -> str:
    """Return a text such as ``samples 3 and 24-31 (column "path")``; empty if all `Contents` have the same hashes."""
    everyones = list(everyones)
    apart = differing(everyones)
    if not apart:
        return ""
    found: dict[str, set[str | None]] = {}
    for name in dict.fromkeys(name for contents in everyones for name, _ in contents.columns):
        found[name] = {dict(contents.columns).get(name) for contents in everyones if contents.columns}
    names = ", ".join(f'"{name}"' for name, texts in found.items() if len(texts) > 1)
    return f"{text_of(apart)}{f' (column {names})' if names else ''}"


def the_same(own: Contents | None, of_others: Sequence[Any] | None, total: int) -> Contents | None:
    """Return the `Contents` with which this worker continues. Raise ValueError if its samples differ from `of_others`.

    `of_others` is the state of the `Contents` with which training began. Return None if `own` or `of_others` is None.
    """
    if own is None or of_others is None:
        return None
    if apart := difference([own, restored(of_others)]):
        raise ValueError(
            f"ElasticDataset: {apart} of {total} on this worker differ from the samples that training "
            f"began with; {REMEDY}"
        )
    return own


def text_of(ranges: Sequence[tuple[int, int]]) -> str:
    """Return a text such as ``samples 3, 17 and 24-31``."""
    names = [str(first) if last - first == 1 else f"{first}-{last - 1}" for first, last in ranges[:_SHOWN]]
    if len(ranges) > _SHOWN:
        names.append(f"{len(ranges) - _SHOWN} more")
    one = len(ranges) == 1 and ranges[0][1] - ranges[0][0] == 1
    return f"sample{'' if one else 's'} " + " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


REMEDY = (
    "a number must stand for the same sample in each process: sort the listing of a folder, and set a seed for each "
    "shuffle and split (if each worker is meant to have its own samples, contents_check='none' turns this check off)"
)


def _word(digests: Iterable[Digest]) -> str:
    return _word_of(repr([list(each) for each in digests]).encode())


def _word_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).hexdigest()
