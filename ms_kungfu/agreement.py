"""Exchange data among the living workers: gather a row from each worker, or send one worker's data to all workers.

An all-gather returns zeros for a failed rank. So each row in this module contains a nonzero mark, which shows that the
row's rank took part. If the sending rank fails, another rank sends instead. All survivors receive the same rows and
make the same attempts (docs/recovery.md), so they choose the same sender. All functions are collectives.
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
    """Gather each rank's `row`, and return a dict from rank to row, sorted by rank.

    All ranks in the result get the same result. The result always contains the calling rank, and never a failed rank.
    All ranks must pass rows of the same shape and dtype.

    Args:
        nonzero: the index of an entry that no rank sets to zero, so that a nonzero entry shows that the rank took part.
            By default, the function adds a byte for this purpose.
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
    """Gather a value from each living rank as JSON, and return a dict from rank to value."""
    content = json.dumps(value).encode()
    lengths = gather_living(np.array([len(content)]), f"{name}/lengths")
    row = np.frombuffer(content.ljust(max(int(length[0]) for length in lengths.values()), b"\0"), dtype=np.uint8)
    # A rank that failed after the first gathering has sent a length but no text.
    rows = gather_living(row, name)
    return {rank: json.loads(each.tobytes()[: int(lengths[rank][0])]) for rank, each in rows.items()}


def broadcast_text(text: str, root: int, name: str = "kungfu/text") -> str:
    """Return the root's `text` at every worker. The `text` of other workers is ignored.

    Raise PeerLostError if the root fails.
    """
    at_root = runtime.current_rank() == root
    content = np.frombuffer(text.encode(), dtype=np.uint8)
    length = comm.broadcast(np.array([content.size], dtype=np.int64), root=root, name=f"{name}/length")
    buffer = content if at_root else np.zeros(int(length[0]), dtype=np.uint8)
    return bytes(comm.broadcast(buffer, root=root, name=name)).decode()


def broadcast_json(value: Callable[[], Any], root: int) -> Any:
    """Call `value` at the root, send its result as JSON, and return the result at each worker."""
    return json.loads(broadcast_text(json.dumps(value()) if runtime.current_rank() == root else "", root))


def told_by_one(
    row: Array,
    name: str,
    choose: Callable[[Mapping[int, Array]], int],
    receive: Callable[[int, Mapping[int, Array]], Received],
    telling: str = "",
) -> Received:
    """Gather a `row` from each living rank, choose a root from the rows, and receive the root's data.

    If the root fails, the remaining ranks repeat this with a new root.

    Args:
        choose: returns the root for the given rows. It must be a pure function, the same at every rank. The function's
            exceptions are raised at every rank.
        receive: a collective function that is called with the root and the rows. If the root fails, the function raises
            PeerLostError, or a MindSpore error that contains this name.
        telling: the root's activity, for the warning that is logged if the root fails. If empty, there is no warning.

    Returns:
        The result of `receive`.
    """
    while True:
        rows = gather_living(row, name)
        root = choose(rows)
        try:
            return receive(root, rows)
        except (PeerLostError, RuntimeError) as error:
            # If a kernel raises an exception, MindSpore raises a RuntimeError whose text begins with that class's name.
            if not isinstance(error, PeerLostError) and PeerLostError.__name__ not in str(error):
                raise
            # If the whole communicator has failed rather than only the root, the next gathering raises PeerLostError.
            if telling:
                _log.warning('rank failed: rank=%d during="%s"', root, telling)


def told_by_lowest(text: str, name: str) -> tuple[str, int]:
    """Return the text of the lowest living rank, and that rank.

    For an empty text, only the length is sent.
    """

    def receive(root: int, lengths: Mapping[int, Array]) -> tuple[str, int]:
        return broadcast_text(text, root, f"{name}/told") if lengths[root].any() else "", root

    return told_by_one(np.array([len(text)]), name, min, receive)
