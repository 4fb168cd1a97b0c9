"""Define the virtual world, which has V ranks and never changes. Each worker gets a virtual rank when it starts.

A worker's virtual rank is the index of its slot among all slots of the job, sorted by host. A worker that replaces a
failed worker gets the failed worker's virtual rank. Living workers have different virtual ranks, with one exception: a
worker that joins while another worker is leaving may get the rank V - 1 of a third worker.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ms_kungfu import env, membership, runtime
from ms_kungfu.elastic import program

_begun = False
_passes_by = False


def size() -> int:
    """Return V, the number of virtual ranks."""
    found = env.MSRUN_SIZE.get()
    assert found is not None
    return found


@functools.cache
def rank() -> int:
    """Return this worker's virtual rank, which never changes."""
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
    """Return whether the program has called ``init()``, and hasn't called ``release()`` since."""
    return _begun


def pass_by(passes: bool) -> None:
    """Record whether the program is in a pass of its training loop that the other workers have already finished."""
    global _passes_by
    _passes_by = passes


def passes_by() -> bool:
    return _passes_by


def takes_part() -> bool:
    """Return whether this worker takes part in collectives, that is, has the same position as the other workers.

    A worker doesn't take part:

    - before it begins to train,
    - before it reaches the training call, or the pass of the training loop, in which the other workers are, or
    - after it has left the cluster.
    """
    return program.current().calls > 0 and not (runtime.detached() or program.is_behind() or _passes_by)


def writes() -> bool:
    """Return whether this worker has the lowest virtual rank of the living workers.

    MindSpore's callbacks use the result so that only one worker writes files, regardless of whether all ranks or only
    rank 0 has the callback. In the second case, the worker that does the work of rank 0 writes.
    """
    return membership.current().cluster is None or player_of(0) == membership.current().core.rank()


def player_of(rank: int, living: Sequence[int] | None = None) -> int:
    """Return the cluster rank of the worker that does the work of the virtual rank `rank`.

    The living workers, sorted by virtual rank, each do the work of the same number of virtual ranks.

    `living`: the cluster ranks of the living workers. The default is the workers that this worker knows to be alive.
    The caller must pass `living` if all workers have to get the same result.
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
