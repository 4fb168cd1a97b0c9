"""What the living workers tell each other: each one's row at every worker, and what one of them tells all.

An all-gather has zeros in the place of a rank that has died. Here a row says by itself whether its rank took part, so
that zeros are never taken for what somebody has told; and what one rank tells is told by another where it dies
meanwhile. All survivors see the same rows and go through the same attempts (docs/recovery.md), so they choose alike.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any, Callable, TypeVar

import numpy as np

from ms_kungfu import comm, runtime
from ms_kungfu.comm import Array
from ms_kungfu.errors import PeerLostError

_log = logging.getLogger(__name__)
Received = TypeVar("Received")


def gather_living(row: Array, name: str, nonzero: int | None = None) -> dict[int, Array]:
    """Collective: each rank's `row` by its rank, in their order; the same at every rank that is in it.

    The rows have one shape and dtype. A rank that has died isn't in it, whatever the row means; this rank always is.

    Args:
        nonzero: the place of an entry that is zero at no rank and so says by itself that it took part. By default a
            byte is added that does.
    """
    row = np.asarray(row)
    if nonzero is not None:
        return {rank: each for rank, each in enumerate(comm.all_gather(row, name=name)) if each[nonzero]}
    content = np.frombuffer(b"\1" + row.tobytes(), dtype=np.uint8)
    rows = comm.all_gather(content, name=name)
    return {
        rank: np.frombuffer(each[1:].tobytes(), dtype=row.dtype).reshape(row.shape)
        for rank, each in enumerate(rows)
        if each[0]
    }


def gather_json(value: Any, name: str) -> dict[int, Any]:
    """Collective: each living rank's value, as JSON carries it, by its rank, in their order; the same at every rank
    that is in it."""
    content = json.dumps(value).encode()
    lengths = gather_living(np.array([len(content)]), f"{name}/lengths")
    row = np.frombuffer(content.ljust(max(int(length[0]) for length in lengths.values()), b"\0"), dtype=np.uint8)
    # Who has died since told a length and brings no text.
    rows = gather_living(row, name)
    return {rank: json.loads(each.tobytes()[: int(lengths[rank][0])]) for rank, each in rows.items()}


def broadcast_text(text: str, root: int, name: str = "kungfu/text") -> str:
    """Collective: the root's text at every worker; `text` counts there only. PeerLostError where the root dies."""
    at_root = runtime.current_rank() == root
    content = np.frombuffer(text.encode(), dtype=np.uint8)
    length = comm.broadcast(np.array([content.size], dtype=np.int64), root=root, name=f"{name}/length")
    buffer = content if at_root else np.zeros(int(length[0]), dtype=np.uint8)
    return bytes(comm.broadcast(buffer, root=root, name=name)).decode()


def broadcast_json(value: Callable[[], Any], root: int) -> Any:
    """Collective: what `value`, called at the root alone, returns there, as JSON carries it. Raises likewise."""
    return json.loads(broadcast_text(json.dumps(value()) if runtime.current_rank() == root else "", root))


def told_by_one(
    row: Array,
    name: str,
    choose: Callable[[Mapping[int, Array]], int],
    receive: Callable[[int, Mapping[int, Array]], Received],
    telling: str = "",
) -> Received:
    """Collective: `receive(root, rows)`, where `choose(rows)` names the root by the living ranks' rows; where the root
    dies meanwhile, the same again among those who are left.

    Args:
        choose: a pure function, the same at every rank. What it raises is raised at every rank.
        receive: collective; raises PeerLostError where its root dies, or what MindSpore makes of that.
        telling: what the root does, for the warning that it died in it; without it there is none.
    """
    while True:
        rows = gather_living(row, name)
        root = choose(rows)
        try:
            return receive(root, rows)
        except (PeerLostError, RuntimeError) as error:
            # MindSpore turns what its kernels raise into a RuntimeError that begins with the error's name.
            if not isinstance(error, PeerLostError) and PeerLostError.__name__ not in str(error):
                raise
            # Where it wasn't the root but the communicator that is lost, the next gathering says so.
            if telling:
                _log.warning('rank failed: rank=%d during="%s"', root, telling)


def told_by_lowest(text: str, name: str) -> tuple[str, int]:
    """Collective: the text of the lowest living rank at every worker, and which rank that is. Nothing is sent beyond
    its length where it is empty."""

    def receive(root: int, lengths: Mapping[int, Array]) -> tuple[str, int]:
        return broadcast_text(text, root, f"{name}/told") if lengths[root].any() else "", root

    return told_by_one(np.array([len(text)]), name, min, receive)
