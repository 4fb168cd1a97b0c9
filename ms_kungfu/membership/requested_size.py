"""Handle a resize request from the ranks, which the lowest living rank writes to the cluster store.

That rank writes in the background and retries while the store is unreachable; training continues. If the rank fails,
the next rank writes the request, unless the failed rank has already written it. All ranks receive the result in the
next agreement.

The ranks also report a size that they will request later, as a hint to the launcher (`expect`).
"""

from __future__ import annotations

import logging
from typing import Callable

import numpy as np

from ms_kungfu import env
from ms_kungfu.cluster import WORKER_PORTS, Cluster, PeerID, writer_of_workers
from ms_kungfu.cluster_store import ClusterStore, StaleVersionError, StoreUnreachableError
from ms_kungfu.errors import KungFuError, PeerLostError, ResizeError
from ms_kungfu.membership.member import Member, current

_log = logging.getLogger(__name__)
_RETRY_S = 0.2
_CHECK_S = 2.0  # time between two checks that the store still has the written cluster
_HINT_S = 10.0
_MAX_REFUSAL_BYTES = 1024

# The result of a resize request is packed into one number, so that the ranks can agree on the maximum. The number
# contains a kind, a size and a value. For PENDING, the value is the cluster version; for REFUSED, it is the rank that
# knows the reason.
NOTHING, LATER, PENDING, REFUSED = range(4)
_LARGEST = 0xFFFF  # the largest size that fits


def check_size(size: int) -> None:
    """Raise ValueError if no cluster can have `size` ranks."""
    if not 1 <= size <= _LARGEST:
        raise ValueError(f"a cluster has at least 1 rank and at most {_LARGEST}, got size {size}")


def pack(kind: int, size: int, value: int) -> int:
    return kind << 60 | size << 44 | value


def unpack(packed: int) -> tuple[int, int, int]:
    return packed >> 60, packed >> 44 & _LARGEST, packed & (1 << 44) - 1


class _NoSlotsError(ResizeError):
    """Raised if the job's hosts have too few slots. This may change if a host joins."""


class SizeRequest:
    """Write a cluster of a given size to the store, in a separate thread, until the store accepts or rejects it.

    A config server doesn't save clusters to disk, so a restart loses a cluster that the launcher hasn't read yet.
    Therefore, the thread repeatedly checks that the store still has the cluster, and writes the cluster again if
    necessary. The thread ends when the ranks adopt a version.
    """

    def __init__(
        self, member: Member, cluster: Cluster, size: int, failed: list[PeerID], previous: SizeRequest | None = None
    ) -> None:
        """Start the thread. `previous` is the request that this request replaces.

        The thread of `previous` may still be writing, so the new thread waits until that thread has ended.
        """
        self.size = size
        self.version: int | None = None  # the version of the written cluster
        self.refusal = ""
        self.trouble = ""
        self.settled = member.ports.event()  # set once `version`, `refusal` or `trouble` is known
        self._is_over = member.ports.event()
        self._has_ended = member.ports.event()
        self._previous = previous
        self._member = member
        self._cluster = cluster
        self._failed = failed
        member.ports.start_thread("kungfu-propose", self._run)

    def cancel(self) -> None:
        self._is_over.set()

    def _run(self) -> None:
        if self._previous is not None:
            self._previous._has_ended.wait()
            self._previous = None
        self._write_and_keep()
        self._has_ended.set()

    def _write_and_keep(self) -> None:
        while not self._is_over.is_set():
            try:
                if self.version is None or not _keeps(self._member, self.version):
                    self.version = _write(self._member, self._cluster, self.size, self._failed, self._is_over.is_set)
                self.settled.set()
                self._is_over.wait(_CHECK_S)
            except (StoreUnreachableError, _NoSlotsError) as error:
                if self.version is None and not self.trouble:
                    self.trouble = str(error)
                    _log.warning('resize waits: workers=%d reason="%s". Training continues', self.size, error)
                self.settled.set()
                self._is_over.wait(_CHECK_S if isinstance(error, _NoSlotsError) else _RETRY_S)
            except Exception as error:
                # Catch every error, because this rank has to report each error to the other ranks.
                known = isinstance(error, (KungFuError, ValueError))
                self.refusal = str(error) if known else f"{type(error).__name__}: {error}"
                self.settled.set()
                return


def _keeps(member: Member, version: int) -> bool:
    """Return whether the store has this version or a newer one."""
    found = _store(member).get()
    return found is not None and found.version >= version


def _store(member: Member) -> ClusterStore:
    url = member.get(env.CONFIG_SERVER)
    if url is None:
        raise ResizeError("resizing needs a config server: start the job with kungfu-run -w, which embeds one")
    return member.ports.store(url, member.get(env.JOB_SECRET), writer_of_workers(member.get(env.JOB) or ""))


def _failed(member: Member, cluster: Cluster) -> list[PeerID]:
    living = set(member.core.living())
    return [worker for rank, worker in enumerate(cluster.workers) if rank not in living]


def _write(
    member: Member, cluster: Cluster, size: int, failed: list[PeerID], is_over: Callable[[], bool] = lambda: False
) -> int:
    """Write a cluster of `size` workers to the store, and return its version.

    If the newest cluster in the store already has that size, write nothing and return that cluster's version. If
    ``is_over()`` is true, write nothing and return the version of this member's cluster.
    """
    store = _store(member)
    if not member.get(env.WATCH):
        raise ResizeError("resizing needs a launcher that follows the config server: start the job with kungfu-run -w")
    hosts = member.get(env.HOSTS)
    is_several = len(hosts or ()) > 1
    most = member.ports.max_workers_of_hosts if is_several else member.ports.max_workers
    if size > most:
        where = "in a job" if is_several else "per host"
        raise ResizeError(f"{size} workers: at most {most} {where}; request fewer")
    ports = member.get(env.PORT_RANGE) or WORKER_PORTS
    while True:
        # The store may have a newer version than this member's cluster. Derive the new cluster from the newest version.
        newest = store.get() or cluster
        if newest.version < cluster.version:
            raise StoreUnreachableError(f"config server {store.url} has restarted with an older cluster version")
        if newest.size == size and (newest.version > cluster.version or not failed):
            return newest.version
        if is_over():
            return int(cluster.version)
        # If hosts have joined or left, the store has the new slots, but the environment still has the old slots.
        slots = newest.slots or hosts
        if slots is not None and size > sum(slots.values()):
            given = ",".join(f"{host}:{count}" for host, count in slots.items())
            raise _NoSlotsError(
                f"{size} workers: -H {given} has {sum(slots.values())} slots; request fewer workers, or add slots"
            )
        try:
            return store.put(newest.resized(size, ports, failed, slots)).version
        except StaleVersionError:
            continue  # another client has written a newer version since `get`


def propose(size: int) -> int:
    """Write a cluster of this size to the store. Return its version without waiting until the cluster changes.

    If the current version already has that size, write nothing and return the current version.
    """
    member = current()
    check_size(size)
    cluster = member.cluster
    if cluster is None:
        raise ResizeError(f"{size} workers: this process has no launcher; start it with kungfu-run -w")
    failed = _failed(member, cluster)
    if size == cluster.size and not failed and not is_changing():
        return int(cluster.version)
    return _write(member, cluster, size, failed)


def want(member: Member, size: int) -> None:
    """Record that all ranks request `size`."""
    there = member.pending[0] if member.pending is not None else int(member.core.size())
    # If another size is being written, `size` must be written afterwards, even if `size` is already the pending size.
    member.requested_size = None if size == there and member.requested_size is None else size


def wanted_size(member: Member) -> int:
    if member.requested_size is not None:
        return member.requested_size
    return member.pending[0] if member.pending is not None else int(member.core.size())


def pursue(member: Member, wait: bool, must: bool) -> int:
    """If this is the lowest living rank, write the requested size. Return the packed result.

    With `wait`, wait until there is a result. With `must`, treat an unreachable store as a rejection.
    """
    request: SizeRequest | None = member.request
    if not member.speaks_first() or member.cluster is None:
        drop(member)
        return pack(NOTHING, 0, 0)
    if member.requested_size is None:
        if request is None or member.pending is None or request.size != member.pending[0]:
            drop(member)
            return pack(NOTHING, 0, 0)
        if request.version == member.pending[1] and not request.refusal:
            return pack(NOTHING, 0, 0)
        wait = False  # the store has lost the cluster, and the thread is writing it again
    elif request is None or request.size != member.requested_size:
        previous = request
        drop(member)
        failed = _failed(member, member.cluster)
        request = member.request = SizeRequest(member, member.cluster, member.requested_size, failed, previous)
    if wait:
        request.settled.wait()
    if request.version is not None:
        return pack(PENDING, request.size, request.version)
    if must and request.trouble:
        request.cancel()
        request.refusal = request.trouble
    if request.refusal:
        return pack(REFUSED, request.size, int(member.core.rank()))
    return pack(LATER if request.trouble else NOTHING, request.size, 0)


def expect(joining: int, size: int) -> None:
    """Notify the launcher that the ranks will request `size` next, with `joining` new workers.

    The launcher can then start these workers early (`ms_kungfu.launcher.state.prestarted`). A separate thread sends the
    notification. If the notification is lost, the launcher starts the workers only when the ranks request the size.
    """
    member = current()
    version = int(member.core.cluster_version())

    def tell() -> None:
        try:
            member.broker().expect(version, joining, size, _HINT_S)
        except KungFuError as error:
            _log.debug('hint lost: workers=%d error="%s"', size, error)

    if member.cluster is not None and member.get(env.WATCH):
        member.ports.start_thread("kungfu-expect", tell)


def is_changing() -> bool:
    """Return whether this rank knows of a requested size that the cluster hasn't reached yet."""
    member = current()
    return member.requested_size is not None or member.pending is not None


def drop(member: Member) -> None:
    if member.request is not None:
        member.request.cancel()
        member.request = None


def refusal_of(member: Member, rank: int) -> str | None:
    """Return the reason why `rank` couldn't write the request (collective).

    If `rank` has failed in the meantime, return None; the next rank then has to write the request.
    """
    buffer = np.zeros(_MAX_REFUSAL_BYTES, np.uint8)
    if rank == int(member.core.rank()) and member.request is not None:
        text = member.request.refusal.encode()[:_MAX_REFUSAL_BYTES]
        buffer[: len(text)] = np.frombuffer(text, np.uint8)
    try:
        member.core.broadcast("kungfu/refusal", buffer, buffer, rank)
    except PeerLostError:
        if rank in member.core.living():
            raise
        return None
    return buffer.tobytes().rstrip(b"\0").decode(errors="replace")
