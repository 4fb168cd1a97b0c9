"""What each worker brings, at every worker; of those who live."""

from __future__ import annotations

import numpy as np

from ms_kungfu import comm
from ms_kungfu.comm import Array


def gather_living(row: Array, name: str) -> dict[int, Array]:
    """Collective: each rank's `row` by its rank, in their order; the same at every rank that is in it.

    The rows have one shape and dtype. A rank that has died isn't in it, whatever the row means: an all-gather has zeros
    in its place, and a row begins with a byte that isn't zero. This rank is always in it.
    """
    row = np.asarray(row)
    content = np.frombuffer(b"\1" + row.tobytes(), dtype=np.uint8)
    rows = comm.all_gather(content, name=name)
    return {
        rank: np.frombuffer(each[1:].tobytes(), dtype=row.dtype).reshape(row.shape)
        for rank, each in enumerate(rows)
        if each[0]
    }


def gather_texts(text: str, name: str = "kungfu/texts") -> dict[int, str]:
    """Collective: each living rank's text by its rank, in their order; the same at every rank that is in it."""
    content = text.encode()
    lengths = gather_living(np.array([len(content)]), f"{name}/lengths")
    row = np.frombuffer(content.ljust(max(int(length[0]) for length in lengths.values()), b"\0"), dtype=np.uint8)
    # Who has died since told a length and brings no text.
    rows = gather_living(row, name)
    return {rank: each.tobytes()[: int(lengths[rank][0])].decode() for rank, each in rows.items()}
