"""This process's identity: its name in the job, and its slot in the present cluster."""

from __future__ import annotations

import ipaddress
import zlib

from ms_kungfu import env
from ms_kungfu.cluster import PeerID
from ms_kungfu.errors import KungFuError
from ms_kungfu.membership.member import Member, current


def identity() -> tuple[PeerID, int]:
    """Return this process's name in the job, and the cluster version that it was started for."""
    member = current()
    if member.self_id is None:
        raise KungFuError(
            "this process was not started by kungfu-run, so it has no name in a job; start it with kungfu-run"
        )
    return member.self_id, member.incarnation


def peer_of(rank: int) -> PeerID | None:
    """Return the peer of this rank in the present cluster."""
    cluster = current().cluster
    workers = () if cluster is None else cluster.workers
    return workers[rank] if rank < len(workers) else None


def lost_ranks() -> list[int]:
    """Return the ranks of the present cluster that have failed; they count until the next version."""
    core = current().core
    living, ranks = core.living(), int(core.size())
    return sorted(set(range(ranks)).difference(living))


def speaks_for_all() -> bool:
    """Return whether this process is the lowest living rank, which logs what all would log alike."""
    member = current()
    return not member.detached and not member.deferred and member.speaks_first()


def is_detached() -> bool:
    return current().detached


def was_evicted() -> bool:
    """Return whether this process is detached because it was named, and not for a size."""
    return current().evicted


def is_deferred() -> bool:
    """Return whether this process was started for a running job and hasn't joined it yet.

    Rank and size are provisional.
    """
    return current().deferred


def is_joining() -> bool:
    """Return whether this process joined a running job and hasn't received the training state yet."""
    return not current().received


def is_catching_up() -> bool:
    """Return whether this process joined, and the others wait until it comes to their call of training."""
    return current().catching_up


def set_catching_up(catching_up: bool) -> None:
    """Set `is_catching_up` of this process."""
    current().catching_up = catching_up


def check_caught_up(what: str) -> None:
    """Raise KungFuError if this process is catching up: the other workers don't come to this collective."""
    if current().catching_up:
        raise KungFuError(
            f"{what} at a joining worker: the other workers are in a later call of training and wait for this one "
            "there; between calls of training call no collective but kf.run_barrier() and sync_net_parameters, or "
            "keep the result of each call in a file"
        )


def state_received() -> None:
    """Note that this process now has the training state."""
    current().received = True


def sync_root() -> int:
    """Return the lowest rank that has the training state; 0 in a cluster in which all start alike."""
    core = current().core
    root, size = int(core.state_root()), int(core.size())
    return root if root < size else 0


def is_first_cluster() -> bool:
    """Return whether this is the job's first cluster, in which all processes run their programs from the start."""
    member = current()
    return not member.get(env.PARKED) and not member.detached and cluster_version() == member.incarnation


def rank() -> int:
    """Return the rank; until this process has joined the one it was started for."""
    member = current()
    joins_later = member.deferred or (member.cluster is None and member.get(env.BROKER) is not None)
    return member.get(env.RANK_ID) if joins_later else int(member.core.rank())


def size() -> int:
    """Return the number of ranks; until a deferred join that of the cluster it was started for."""
    member = current()
    return member.get(env.WORLD_SIZE) if member.deferred else int(member.core.size())


def cluster_version() -> int:
    member = current()
    return member.incarnation if member.deferred else int(member.core.cluster_version())


def local_rank() -> int:
    """Return the rank among the workers of this host; until a deferred join the one it was started for."""
    member = current()
    if member.deferred:
        return member.get(env.LOCAL_RANK)
    here = _workers_here(member)
    return here.index(member.self_id) if member.self_id in here else 0


def local_size() -> int:
    """Return the number of workers on this host; until a deferred join that of the cluster it was started for."""
    member = current()
    return member.get(env.LOCAL_SIZE) if member.deferred else len(_workers_here(member))


def host_of_rank() -> list[int]:
    """Return for each rank a number that is the same for the ranks on its host."""
    member = current()
    return [0] if member.cluster is None else member.cluster.host_of_rank


def _workers_here(member: Member) -> list[PeerID | None]:
    """Return the workers of this host; without a cluster this process itself."""
    if member.cluster is None or member.self_id is None:
        return [member.self_id]
    return [worker for worker in member.cluster.workers if worker.host == member.self_id.host]


def uid() -> int:
    """See :func:`ms_kungfu.uid`."""
    member = current()
    if member.self_id is not None:
        return _uid(member.incarnation, member.self_id)
    own = member.get(env.SELF)
    if own is not None:
        return _uid(member.get(env.INCARNATION), PeerID.parse(own))
    return (member.get(env.STANDBY) or 0) << 48


def _uid(version: int, peer: PeerID) -> int:
    try:
        host = int(ipaddress.IPv4Address(peer.host))
    except ValueError:  # a name
        host = zlib.crc32(peer.host.encode())
    return version << 48 | host << 16 | peer.port
