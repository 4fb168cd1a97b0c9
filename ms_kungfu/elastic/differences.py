"""Whether all workers have the same bits, and which of them have others."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from ms_kungfu.agreement import gather_json
from ms_kungfu.comm import Array
from ms_kungfu.trained import inventory

Value = TypeVar("Value")


def checksum(values: Array) -> str:
    """Return the CRC-32 of the bits.

    It differs if up to 32 bits in a row do, and in all but one of 2**32 cases otherwise. (1.5 GB/s on
    one core; a cryptographic hash has 0.3 to 0.5.)
    """
    return f"{zlib.crc32(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data):08x}"


def differing(everyones: Mapping[int, Mapping[str, Value]]) -> dict[str, dict[Value | None, list[int]]]:
    """Return what differs between the ranks, by its name in the lowest one's order. Pure.

    The value of a name says which ranks have which value, None if they have none.
    """
    names = {name: None for values in everyones.values() for name in values}
    groups: dict[str, dict[Value | None, list[int]]] = {}
    for name in names:
        by_value: dict[Value | None, list[int]] = {}
        for rank, values in everyones.items():
            by_value.setdefault(values.get(name), []).append(rank)
        if len(by_value) > 1:
            groups[name] = by_value
    return groups


@dataclass(frozen=True)
class Consensus:
    """The result of `consensus`; true if all workers have the same."""

    differing: Mapping[str, Mapping[str | None, list[int]]]
    """Of each tensor that differs: its checksums, and which ranks have them."""

    def __bool__(self) -> bool:
        return not self.differing

    def __str__(self) -> str:
        if self:
            return "the same at all workers"
        name, groups = next(iter(self.differing.items()))
        told = "; ".join(f"{value or 'nothing'} at {', '.join(map(str, ranks))}" for value, ranks in groups.items())
        more = f" (and {len(self.differing) - 1} more)" if len(self.differing) > 1 else ""
        return f"{name!r} differs: {told}{more}"


def consensus(*tensors: Any) -> Consensus:
    """Compare the bits of tensors over all living workers.

    Collective. It sends a few bytes for each tensor, whatever its size. ``if not consensus(net): ...``

    Args:
        tensors: what to compare, the same at every worker. Cells with all their parameters (a network,
            an optimizer), parameters, tensors, NumPy arrays or numbers, and lists of these.

    Returns:
        An object that is true if all have the same bits. Its `differing` has the checksums of each
        tensor that isn't the same, and which ranks have them.
    """
    from ms_kungfu.ops import wait_for_queue  # loads MindSpore, which importing this module doesn't

    wait_for_queue()
    own: dict[str, str] = {}
    for name, values in _named(tensors):
        taken = sum(other == name or other.startswith(f"{name} (") for other in own)
        own[f"{name} ({taken + 1})" if taken else name] = f"{values.dtype}{list(values.shape)} {checksum(values)}"
    return Consensus(differing(gather_json(own, "kungfu/consensus")))


def _named(items: Iterable[Any]) -> Iterable[tuple[str, Array]]:
    import mindspore as ms

    for item in items:
        if isinstance(item, ms.nn.Cell):
            yield from _named(inventory.collect_parameters([item]))
        elif isinstance(item, ms.Parameter):
            if item.has_init:
                item.init_data()
            yield item.name, item.asnumpy()
        elif isinstance(item, (list, tuple)):
            yield from _named(item)
        else:
            yield "tensor", item.asnumpy() if isinstance(item, ms.Tensor) else np.asarray(item)
