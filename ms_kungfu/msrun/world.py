"""The virtual world: V ranks, of which each worker was one when it began, and which never change.

A worker's virtual rank is the number of its place among those that the job may have, the hosts' slots in their order.
No two that live have the same, and who replaces a dead worker has its number.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ms_kungfu import env, membership, runtime
from ms_kungfu.elastic import program

_begun = False
_passes_by = False


def size() -> int:
    """V."""
    found = env.MSRUN_SIZE.get()
    assert found is not None
    return found


@functools.cache
def rank() -> int:
    """Of this worker, for ever."""
    return min(env.MSRUN_RANK.get(), size() - 1)


def begin() -> None:
    """The program has called ``init()``."""
    global _begun
    _begun = True


def end() -> None:
    """It has called ``release()``."""
    global _begun
    _begun = False


def begun() -> bool:
    """Whether the program asked for more than one process."""
    return _begun


def pass_by(passes: bool) -> None:
    """Whether the program is in a part of its loops that the others have behind them."""
    global _passes_by
    _passes_by = passes


def passes_by() -> bool:
    return _passes_by


def takes_part() -> bool:
    """Whether this worker is where the others are. One that has yet to begin to train, or to come to the call of
    training, or the pass of a loop, that the others are in, or that has left, calls nobody."""
    return program.current().calls > 0 and not (runtime.detached() or program.is_behind() or _passes_by)


def writes() -> bool:
    """Whether this worker has the lowest virtual rank of those that live: so what MindSpore's callbacks write is
    written once where all ranks have them, and where the program gives them to rank 0 alone by whoever plays it."""
    return membership.current().cluster is None or player_of(0) == membership.current().core.rank()


def player_of(rank: int, living: Sequence[int] | None = None) -> int:
    """The rank in the cluster of the worker that stands for one of the V: of those that live, in the order of their
    virtual ranks, each stands for as many. `living`: where others have to come to the same; None: as this one knows."""
    member = membership.current()
    if member.cluster is None:
        return 0
    workers, hosts = member.cluster.workers, list(env.HOSTS.get() or ())

    def place(rank: int) -> tuple[int, int]:
        peer = workers[rank]
        return hosts.index(peer.host) if peer.host in hosts else 0, peer.port

    players = sorted(member.core.living() if living is None else living, key=place)
    return int(players[rank * len(players) // size()])
