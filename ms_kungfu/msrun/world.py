"""The virtual world: V ranks that never change; each worker was one of them when it began.

A worker's virtual rank is the number of its slot among all slots of the job, the hosts' slots in their order. No two
living workers have the same, and the replacement of a failed worker has its number.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ms_kungfu import env, membership, runtime
from ms_kungfu.elastic import program

_begun = False
_passes_by = False


def size() -> int:
    """Return V."""
    found = env.MSRUN_SIZE.get()
    assert found is not None
    return found


@functools.cache
def rank() -> int:
    """Return the rank of this worker, for ever."""
    return min(env.MSRUN_RANK.get(), size() - 1)


def begin() -> None:
    """Note that the program has called ``init()``."""
    global _begun
    _begun = True


def end() -> None:
    """Note that it has called ``release()``."""
    global _begun
    _begun = False


def begun() -> bool:
    """Return whether the program asked for more than one process."""
    return _begun


def pass_by(passes: bool) -> None:
    """Note whether the program is in a part of its loops that the others have finished."""
    global _passes_by
    _passes_by = passes


def passes_by() -> bool:
    return _passes_by


def takes_part() -> bool:
    """Return whether this worker is at the others' position, and takes part in collectives.

    One that has yet to begin to train, or to come to the others' call of training or pass of a loop, doesn't, nor one
    that has left.
    """
    return program.current().calls > 0 and not (runtime.detached() or program.is_behind() or _passes_by)


def writes() -> bool:
    """Return whether this worker has the lowest virtual rank of the living ones.

    So MindSpore's callbacks write once if all ranks have them, and, if the program gives them to rank 0 alone, at the
    worker that plays it.
    """
    return membership.current().cluster is None or player_of(0) == membership.current().core.rank()


def player_of(rank: int, living: Sequence[int] | None = None) -> int:
    """Return the rank in the cluster of the worker that stands for one of the V.

    Each of the living workers, in the order of their virtual ranks, stands for as many. `living`: if others have to
    come to the same result; None: as this one knows.
    """
    member = membership.current()
    if member.cluster is None:
        return 0
    workers, hosts = member.cluster.workers, list(env.HOSTS.get() or ())

    def place(rank: int) -> tuple[int, int]:
        peer = workers[rank]
        return hosts.index(peer.host) if peer.host in hosts else 0, peer.port

    players = sorted(member.core.living() if living is None else living, key=place)
    return int(players[rank * len(players) // size()])
