"""This process's name in the job, and its slot in the current cluster."""

from __future__ import annotations

import ipaddress
import zlib

from ms_kungfu import env
from ms_kungfu.cluster import PeerID
from ms_kungfu.errors import KungFuError
from ms_kungfu.membership.children import Answers
from ms_kungfu.membership.member import Member, current


def identity() -> tuple[PeerID, int]:
    """Return this process's name in the job, and the cluster version for which it was started."""
    member = current()
    if member.self_id is None:
        raise KungFuError(
            "this process was not started by kungfu-run, so it has no name in a job; start it with kungfu-run"
        )
    return member.self_id, member.incarnation


def peer_of(rank: int) -> PeerID | None:
    """Return the address of this rank's worker in the current cluster; None if there is no such rank."""
    cluster = current().cluster
    workers = () if cluster is None else cluster.workers
    return workers[rank] if rank < len(workers) else None


def lost_ranks() -> list[int]:
    """Return the failed ranks of the current cluster version; the next version excludes them."""
    core = current().core
    living, ranks = core.living(), int(core.size())
    return [] if len(living) == ranks else sorted(set(range(ranks)).difference(living))


def speaks_for_all() -> bool:
    """Return whether this process is the lowest living rank.

    Only that rank logs messages that are the same on all ranks.
    """
    member = current()
    return not member.detached and not member.deferred and member.speaks_first()


def is_detached() -> bool:
    return current().detached


def was_evicted() -> bool:
    """Return whether this process was evicted by a worker or a user, rather than removed because the cluster shrank."""
    return current().evicted


def was_terminated() -> bool:
    """Return whether this process leaves the cluster after its step because it got a SIGTERM."""
    return current().terminated


def is_deferred() -> bool:
    """Return whether this process was started for a running job and hasn't joined it yet.

    Its rank and size are provisional until it joins.
    """
    return current().deferred


def is_joining() -> bool:
    """Return whether this process joined a running job and hasn't received the training state yet."""
    return not current().received


def is_catching_up() -> bool:
    """Return whether this process has joined, but hasn't reached the training call of the other, waiting workers."""
    return current().catching_up


def set_catching_up(catching_up: bool) -> None:
    """Set the value that `is_catching_up` returns."""
    current().catching_up = catching_up


def check_caught_up(what: str) -> None:
    """Raise KungFuError if this process is catching up: until it has, the others don't call the collective `what`."""
    if current().catching_up:
        raise KungFuError(
            f"{what} can't run on a joining worker now: the other workers wait for this worker in a later training "
            "call; between training calls, use only the collectives kf.run_barrier() and sync_net_parameters, and "
            "save the results of training calls in files"
        )


def state_received() -> None:
    """Record that this process now has the training state."""
    current().received = True


def sync_root() -> int:
    """Return the lowest rank that has the training state; 0 if all workers of the cluster have just started."""
    core = current().core
    root, size = int(core.state_root()), int(core.size())
    return root if root < size else 0


def is_first_cluster() -> bool:
    """Return whether this is the job's first cluster, in which all processes run their programs from the beginning."""
    member = current()
    return not member.get(env.PARKED) and not member.detached and cluster_version() == member.incarnation


def answers_without_slot() -> Answers | None:
    """Return the rank and sizes of a process without a slot: its worker's, or those that the launcher planned.

    Return None if this process is in a cluster, or if `kungfu-run` hasn't started it.
    """
    member = current()
    if member.parents_answers is not None:
        return member.parents_answers
    if not member.deferred and (member.cluster is not None or member.get(env.BROKER) is None):
        return None
    started_for = (env.RANK_ID, env.WORLD_SIZE, env.LOCAL_RANK, env.LOCAL_SIZE, env.INCARNATION)
    return Answers(*map(member.get, started_for))


def answers() -> Answers:
    """Return rank, size, local rank, local size and version of this process."""
    return Answers(rank(), size(), local_rank(), local_size(), cluster_version())


def rank() -> int:
    """Return this process's rank; before this process joins, the planned rank."""
    without_slot = answers_without_slot()
    return int(current().core.rank()) if without_slot is None else without_slot.rank


def size() -> int:
    """Return the number of ranks; before this process joins, the planned number."""
    without_slot = answers_without_slot()
    return int(current().core.size()) if without_slot is None else without_slot.size


def cluster_version() -> int:
    without_slot = answers_without_slot()
    return int(current().core.cluster_version()) if without_slot is None else without_slot.version


def local_rank() -> int:
    """Return the rank among this host's workers; before this process joins, the planned local rank."""
    without_slot, member = answers_without_slot(), current()
    if without_slot is not None:
        return without_slot.local_rank
    here = _workers_here(member)
    return here.index(member.self_id) if member.self_id in here else 0


def local_size() -> int:
    """Return the number of workers on this host; before this process joins, the planned number."""
    without_slot = answers_without_slot()
    return len(_workers_here(current())) if without_slot is None else without_slot.local_size


def host_of_rank() -> list[int]:
    """Return the host index of each rank. Ranks on the same host have the same index."""
    member = current()
    return [0] if member.cluster is None else member.cluster.host_of_rank


def _workers_here(member: Member) -> list[PeerID | None]:
    """Return the workers of this host. If there is no cluster, return only this process."""
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
    except ValueError:  # the host is given by name, not by address
        host = zlib.crc32(peer.host.encode())
    return version << 48 | host << 16 | peer.port
