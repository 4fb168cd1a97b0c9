"""The virtual world: V ranks that never change. Each worker gets one of them when it starts.

A worker's virtual rank is the index of its slot among all slots of the job, ordered by host. No two living workers
have the same virtual rank. The replacement of a failed worker has the failed worker's rank.
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
    """Return the virtual rank of this worker, which never changes."""
    return min(env.MSRUN_RANK.get(), size() - 1)


def begin() -> None:
    """Record that the program has called ``init()``."""
    global _begun
    _begun = True


def end() -> None:
    """Record that the program has called ``release()``."""
    global _begun
    _begun = False


def begun() -> bool:
    """Return whether the program uses more than one process."""
    return _begun


def pass_by(passes: bool) -> None:
    """Record whether the program is in a part of its loops that the other workers have finished."""
    global _passes_by
    _passes_by = passes


def passes_by() -> bool:
    return _passes_by


def takes_part() -> bool:
    """Return whether this worker is at the same position as the others, and so takes part in collectives.

    A worker doesn't take part before it begins to train, before it reaches the other workers' present call of training
    or pass of a loop, or after it has left.
    """
    return program.current().calls > 0 and not (runtime.detached() or program.is_behind() or _passes_by)


def writes() -> bool:
    """Return whether this worker has the lowest virtual rank of the living workers.

    MindSpore's callbacks use it to write once. This works if all ranks have a callback. It also works if the program
    passes the callback only at rank 0: then the worker that plays rank 0 writes.
    """
    return membership.current().cluster is None or player_of(0) == membership.current().core.rank()


def player_of(rank: int, living: Sequence[int] | None = None) -> int:
    """Return the cluster rank of the worker that represents a virtual rank. The living workers, ordered by virtual
    rank, each represent the same number of virtual ranks. `living`: the living workers, if other workers must get the
    same result; None: the workers that this worker knows to be alive.
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
