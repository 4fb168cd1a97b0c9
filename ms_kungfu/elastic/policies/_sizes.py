"""Sizes that a policy may ask for."""

from __future__ import annotations

from collections.abc import Sequence


def candidates(min_size: int, max_size: int, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """`sizes` between the two, or `min_size`, doubled until `max_size`, which is one of them."""
    if not 1 <= min_size <= max_size:
        raise ValueError(f"sizes go from 1 or more up to max_size, got min_size={min_size} and max_size={max_size}")
    if sizes is None:
        sizes = [min_size]
        while sizes[-1] * 2 < max_size:
            sizes.append(sizes[-1] * 2)
        sizes = sorted({*sizes, max_size})
    chosen = tuple(sorted({size for size in sizes if min_size <= size <= max_size}))
    if not chosen:
        raise ValueError(f"none of the sizes {list(sizes)} lies between {min_size} and {max_size}")
    return chosen
