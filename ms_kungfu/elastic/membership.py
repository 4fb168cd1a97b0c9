"""A worker's side of a change of membership.

The ranks of a cluster agree on the next version through the communicator that they have; then each asks its host's
broker for that version's segment and joins it. `docs/architecture.md` has the whole protocol. All functions belong to
the thread that trains; none may run while another collective of this process is under way.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, field

import numpy as np

from .. import _core, env
from ..config_server.client import ConfigClient, StaleConfigError
from ..errors import KungFuError, ResizeError
from . import rendezvous
from .cluster import Cluster, PeerID

_FIRST_PORT, _LAST_PORT = 10000, 10999  # KungFu's default range


@dataclass(frozen=True)
class Change:
    """What a step or resize did to the membership."""

    changed: bool
    detached: bool
    old_size: int
    new_size: int


@dataclass
class _State:
    """What this process knows of its membership; None and False before :func:`join`."""

    self_id: PeerID | None = None
    cluster: Cluster | None = None
    detached: bool = False
    received: bool = True
    hosts: dict[str, int] = field(default_factory=dict)


_state = _State()


def _segment(member_of: int | None, version: int | None) -> rendezvous.Granted | rendezvous.Detached:
    broker, secret = env.BROKER.get(), env.JOB_SECRET.get()
    if broker is None or secret is None or _state.self_id is None:
        raise ResizeError("this process was not started by kungfu-run, so it can't join a cluster")
    return rendezvous.request_segment(
        broker,
        bytes.fromhex(secret),
        _state.self_id,
        env.INCARNATION.get(),
        member_of,
        version,
        env.JOIN_TIMEOUT.get(),
    )


def _enter(granted: rendezvous.Granted, has_state: bool) -> None:
    try:
        _core.join(
            granted.fd,
            granted.rank,
            str(_state.self_id),
            has_state,
            env.COLLECTIVE_TIMEOUT.get(),
            env.JOIN_TIMEOUT.get(),
        )
    finally:
        os.close(granted.fd)
    _state.cluster = granted.cluster


def _detach(version: int | None) -> None:
    _state.detached = True
    _core.leave("this process has been detached from the cluster" + (f" at version {version}" if version else ""))


def join() -> None:
    """Joins the cluster that this process was started for. Called once, by :func:`ms_kungfu.runtime.init`."""
    global _state
    own = env.SELF.get()
    if own is None:
        raise ValueError("KUNGFU_BROKER is set but KUNGFU_SELF is not; start the program with kungfu-run")
    _state = _State(self_id=PeerID.parse(own))
    granted = _segment(member_of=None, version=None)
    if isinstance(granted, rendezvous.Detached):
        # The cluster shrank again before this process was ready.
        _detach(None)
        return
    _enter(granted, has_state=False)
    # In the first cluster everyone starts alike, with nothing to receive; a newcomer sees members that have state.
    _state.received = int(_core.state_root()) == granted.cluster.size


def forget() -> None:
    """Back to a process without a cluster."""
    global _state
    _state = _State()


def _adopt(version: int) -> Change:
    """Moves to cluster `version`, on which all present members have agreed."""
    old_size = int(_core.size())
    granted = _segment(member_of=int(_core.cluster_version()), version=version)
    if isinstance(granted, rendezvous.Detached):
        _detach(version)
        return Change(True, True, old_size, old_size)
    _enter(granted, has_state=_state.received)
    return Change(True, False, old_size, granted.cluster.size)


def _propose(size: int) -> int:
    """Rank 0: writes a cluster of `size` workers to the config server and returns its version."""
    cluster = _state.cluster
    url, secret = env.CONFIG_SERVER.get(), env.JOB_SECRET.get()
    if cluster is None:
        raise ResizeError(f"a cluster that kungfu-run has not started stays at 1 rank, {size} were asked for")
    if url is None:
        raise ResizeError("resizing needs a config server: start the job with kungfu-run -w -config-server URL")
    if not env.WATCH.get():
        raise ResizeError("resizing needs a launcher that follows the config server: start it with kungfu-run -w")
    hosts = env.HOSTS.get()
    slots = None if hosts is None else sum(hosts.values())
    if slots is not None and size > slots:
        given = ",".join(f"{host}:{count}" for host, count in (hosts or {}).items())
        raise ResizeError(f"{size} workers were asked for, -H {given} has {slots} slots")
    ports = env.PORT_RANGE.get() or range(_FIRST_PORT, _LAST_PORT + 1)
    client = ConfigClient(url, secret)
    while True:
        # The server may hold a newer version than this cluster has adopted; a wish for a size builds on the newest.
        newest = client.get() or cluster
        if newest.version > cluster.version and newest.size == size:
            return newest.version
        try:
            return client.put(newest.resized(size, ports)).version
        except StaleConfigError:
            continue  # somebody else wrote in between, so there was progress


_OUTCOME = struct.Struct("<QQ")  # version (0: none), bytes of an error's text; small enough to travel inline


def _decide(size: int | None) -> tuple[int, str]:
    """Rank 0's decision: the version to move to (0: stay) or an error's text."""
    try:
        if size is not None and size != int(_core.size()):
            return _propose(size), ""
        announced = int(_core.announced_version())
        return (announced if announced > int(_core.cluster_version()) else 0), ""
    except Exception as error:
        # Whatever it is, the others wait for the outcome and have to be told.
        known = isinstance(error, (KungFuError, ValueError))
        return 0, str(error) if known else f"{type(error).__name__}: {error}"


def _follow_rank_0(size: int | None) -> Change:
    version, text = 0, b""
    if int(_core.rank()) == 0:
        version, error = _decide(size)
        text = error.encode()
    outcome = np.frombuffer(_OUTCOME.pack(version, len(text)), np.uint8).copy()
    _core.broadcast("kungfu/outcome", outcome, outcome, 0)
    version, length = _OUTCOME.unpack(outcome.tobytes())
    if length:
        message = np.frombuffer(text.ljust(length, b"\0"), np.uint8).copy()
        _core.broadcast("kungfu/refusal", message, message, 0)
        raise ResizeError(message.tobytes().decode(errors="replace"))
    if version == 0:
        present = int(_core.size())
        return Change(False, False, present, present)
    return _adopt(version)


def change_size(size: int) -> tuple[bool, bool]:
    """The runtime's resize handler: all ranks have agreed on `size`, which is not the present size."""
    change = _follow_rank_0(size)
    return change.changed, change.detached


def resize(size: int) -> Change:
    """Collective: changes the cluster to `size` ranks; see :func:`ms_kungfu.runtime.resize`."""
    from .. import runtime

    runtime.init()
    if size < 1:
        raise ValueError(f"a cluster has at least 1 rank, got size {size}")
    old_size = int(_core.size())
    changed, detached = _core.resize(size)
    return Change(changed, detached, old_size, int(_core.size()))


def step(size: int | None = None) -> Change:
    """Collective, once a step: moves to what rank 0 wants.

    Args:
        size: the size wanted from now on, e.g. by a schedule; only rank 0's counts. None keeps the present one, unless
            somebody has changed the cluster at the config server (``kungfu-run resize``), which is then followed.

    Raises:
        ResizeError: at every rank, if the change isn't possible; the cluster is as before.
    """
    from .. import runtime

    runtime.init()
    if size is not None and size < 1:
        raise ValueError(f"a cluster has at least 1 rank, got size {size}")
    if _state.cluster is None or _state.detached:
        present = int(_core.size())
        if size is not None and size != present and not _state.detached:
            raise ResizeError(f"a cluster that kungfu-run has not started stays at 1 rank, {size} were asked for")
        return Change(False, _state.detached, present, present)
    return _follow_rank_0(size)


def sync_root() -> int:
    """The lowest rank that has the training state; 0 in a cluster where everyone starts alike."""
    root, size = int(_core.state_root()), int(_core.size())
    return root if root < size else 0


def is_joiner() -> bool:
    """Whether this process joined a running job and has not received the training state yet."""
    return not _state.received


def state_received() -> None:
    """Tells that this process now has the training state."""
    _state.received = True


def identity() -> tuple[PeerID, int]:
    """This process's name in the job, and the cluster version that it was started for."""
    if _state.self_id is None:
        raise KungFuError("this process was not started by kungfu-run, so it has no name in a job")
    return _state.self_id, env.INCARNATION.get()


def peer_of(rank: int) -> PeerID | None:
    """The peer of this rank in the present cluster."""
    workers = () if _state.cluster is None else _state.cluster.workers
    return workers[rank] if rank < len(workers) else None


def is_detached() -> bool:
    return _state.detached


def local_rank() -> int:
    """The rank among the workers of this host."""
    if _state.cluster is None or _state.self_id is None:
        return 0
    same_host = [w for w in _state.cluster.workers if w.host == _state.self_id.host]
    return same_host.index(_state.self_id) if _state.self_id in same_host else 0


def local_size() -> int:
    """The number of workers on this host."""
    if _state.cluster is None or _state.self_id is None:
        return 1
    return sum(w.host == _state.self_id.host for w in _state.cluster.workers)


def uid() -> int:
    own = env.SELF.get()
    port = PeerID.parse(own).port if own is not None else 0
    return env.INCARNATION.get() << 16 | port
