"""A host's part of a cluster version over several hosts: segment, control block and inter-host transport."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Callable, Protocol

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.broker_protocol import close_all
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.agent.plain_segment import HostSegment, PlainSegment, the_runtime
from ms_kungfu.launcher.channel import Channel
from ms_kungfu.launcher.control import call
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.state.hosts import Host, Hosts
from ms_kungfu.launcher.state.segment import MAKE_S, Asker, Progress
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

if TYPE_CHECKING:
    from ms_kungfu._core import TlsEnd

CONNECTIONS_A_PAIR = 3
_FOR_MODELS = 1  # of these connections
_WAIT_S = 20.0
_MAX_WAITING = 1024
_MAX_SHOWN = 200


class Link(Protocol):
    """`_core.InterHostTransport`."""

    def connect(self, local_rank: int) -> tuple[int, int]: ...
    def lose_host(self, host: int) -> None: ...
    def unreachable(self) -> list[tuple[int, str]]: ...
    def failure(self) -> str: ...
    def close(self) -> None: ...


class MakeLink(Protocol):
    def __call__(
        self, local_fd: int, board_fd: int, *, host: int, host_of_rank: Sequence[int], addresses: Sequence[str],
        names: Sequence[str], connections: Sequence[Sequence[int]], for_models: Sequence[Sequence[int]],
        find: Callable[[int], int], tls: Mapping[int, TlsEnd], strategy: str,
    ) -> Link: ...  # fmt: skip


FindStore = Callable[[PeerID], int]
"""A descriptor of the model store of a worker of this host, which the caller owns; -1: it has none (yet)."""


def no_stores(peer: PeerID) -> int:
    return -1


class LinkedSegment:
    """One host's part of the shared memory of a version over several.

    `connections`: to each host of the version, which the segment takes over; `tls`: of those with TLS.
    """

    def __init__(
        self,
        cluster: Cluster,
        host: str,
        cores: int,
        recovers: bool,
        connections: list[list[int]],
        make_link: MakeLink,
        find_store: FindStore = no_stores,
        tls: Mapping[int, TlsEnd] | None = None,
        strategy: str = "AUTO",
        runtime: Callable[[], Any] = the_runtime,
    ) -> None:
        here = [rank for rank, worker in enumerate(cluster.workers) if worker.host == host]
        self._local = {rank: place for place, rank in enumerate(here)}
        self._hosts = cluster.hosts
        self._fds: list[int] = []
        try:
            for size, board in ((len(here) + 1, False), (cluster.size, True)):
                self._fds.append(runtime().create_segment(size, cluster.version, cores, recovers, board))
            self._segment, self._board = map(runtime().SegmentControl, self._fds)
            own, connections = connections, []
            self._link: Link | None = make_link(
                *self._fds, host=cluster.hosts.index(host), host_of_rank=cluster.host_of_rank,
                addresses=[str(worker) for worker in cluster.workers], names=cluster.hosts,
                connections=[fds[_FOR_MODELS:] for fds in own], for_models=[fds[:_FOR_MODELS] for fds in own],
                find=lambda rank: find_store(cluster.workers[rank]), tls=tls or {}, strategy=strategy,
            )  # fmt: skip
        except BaseException:
            close_all([*self._fds, *(fd for with_one in connections for fd in with_one)])
            raise

    def check_made(self) -> None:
        pass

    def hand_over(self, asker: Asker, message: m.Slot, rank: int) -> None:
        assert self._link is not None
        sockets = self._link.connect(self._local[rank])
        try:
            asker.send(message, (*self._fds, *sockets))
        finally:
            close_all(sockets)

    def announce(self, version: int) -> None:
        self._board.announce(version)

    def hold_deadlines(self, held: bool) -> None:
        for memory in (self._segment, self._board):  # where its ranks wait, and where they look
            memory.hold_deadlines(held)

    def mark_lost(self, rank: int, reason: str, recover: bool, reaped: bool) -> None:
        # The control block has the failures of all hosts in one order. A rank that learns of one by the segment finds
        # it there.
        self._board.mark_lost(rank, reason, recover, reaped)
        if rank in self._local:
            self._segment.mark_lost(self._local[rank], reason, recover, reaped)

    def lose_host(self, host: str) -> None:
        if self._link is not None:
            self._link.lose_host(self._hosts.index(host))

    def unreachable(self) -> list[tuple[str, str]]:
        """Return hosts to which a connection has ended, and how."""
        found = [] if self._link is None else self._link.unreachable()
        return [(self._hosts[place], why) for place, why in found]

    def heartbeat(self, rank: int) -> int:
        return self._segment.heartbeat(self._local[rank])

    def gave_up(self, rank: int) -> str:
        return self._segment.gave_up(self._local[rank])

    def progress(self, rank: int) -> Progress | None:
        return self._segment.progress(self._local[rank])

    def awaited(self) -> list[tuple[int, int, bool]]:
        rank_of = [*self._local, -1]  # the transport has the last rank
        return [(rank_of[a], rank_of[b], is_overdue) for a, b, is_overdue in self._segment.awaited()]

    def set_ending(self, rank: int, ending: bool) -> None:
        """Note a rank's end; one of another host is behind the transport."""
        self._segment.set_ending(self._local.get(rank, len(self._local)), ending)

    def ranks(self) -> list[int]:
        """Return the ranks of this host."""
        return list(self._local)

    def sync_points(self) -> int:
        """Return how many sync points this host's workers have requested, or have been notified of."""
        return self._board.sync_points

    def request_sync_point(self, number: int) -> None:
        self._board.request_sync_point(number)

    def failure(self) -> str:
        """Return why no exchange with the other hosts is possible any more; "" while it is."""
        return "" if self._link is None else self._link.failure()

    def close(self) -> None:
        if self._link is not None:
            self._link.close()
            self._link = None  # its connections end with it
        close_all(self._fds)
        self._fds.clear()


def _drop(getting: asyncio.Task[Channel]) -> None:
    """Ignore the result: no task waits for it."""
    if not getting.cancelled() and getting.exception() is None:
        getting.result().close()


# Job, version, number of the attempt to make it, calling host, number of the connection.
_Named = tuple[str, int, int, str, int]


@dataclass(eq=False)
class LinkMaker:
    """Makes this host's segments, in the event loop."""

    machine: Machine
    hosts: Hosts
    port: int
    secret: bytes
    cores: int
    job: str = ""  # its name, once that is known
    silent_s: float | None = None  # how long a connection may get no answer from the other end's system
    strategy: str = "AUTO"
    find_store: FindStore = no_stores
    _expected: dict[_Named, asyncio.Future[Channel]] = field(default_factory=dict)
    _waiting: dict[_Named, asyncio.Future[None]] = field(default_factory=dict)

    async def make(self, cluster: Cluster, attempt: int, recovers: bool) -> HostSegment:
        """Make this host's part of `cluster`, which has workers here.

        Raises the error that prevents it; nothing is left then.
        """
        hosts, own = cluster.hosts, cluster.hosts.index(self.hosts.self_name)
        if len(hosts) == 1:
            return PlainSegment(cluster, self.cores, recovers, self.machine.runtime)
        named = [(place, (self.job, cluster.version, attempt, hosts[max(place, own)], number))
                 for place in range(len(hosts)) if place != own
                 for number in range(CONNECTIONS_A_PAIR)]  # fmt: skip
        getting = [asyncio.ensure_future(self._called(hosts[p], name) if p < own else self._calls(name))
                   for p, name in named]  # fmt: skip
        connections: list[list[int]] = [[] for _ in hosts]
        taken = False
        try:
            done, late = await asyncio.wait(getting, timeout=MAKE_S, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if late:
                missing = next(hosts[place] for (place, _), task in zip(named, getting) if task in late)
                raise OSError(f"no connection with {missing} within {MAKE_S:g} s")
            tls: dict[int, TlsEnd] = {}
            for (place, _), task in zip(named, getting):
                channel = task.result()
                fd = channel.detach(self.silent_s)
                connections[place].append(fd)
                if channel.tls is not None:
                    tls[fd] = channel.tls
            taken = True
            return LinkedSegment(
                cluster, self.hosts.self_name, self.cores, recovers, connections, self.machine.make_link,
                self.find_store, tls, self.strategy, self.machine.runtime,
            )  # fmt: skip
        finally:
            if not taken:
                close_all(fd for with_one in connections for fd in with_one)
                for task in getting:
                    if task.cancel():
                        task.add_done_callback(_drop)  # it may still end by itself
                    else:
                        _drop(task)

    async def _called(self, host: str, name: _Named) -> Channel:
        """Make a connection to a host."""
        channel = await call(self.machine, self.hosts.own.address, Host(host).address, self.port, self.secret, MAKE_S)
        try:
            job, version, attempt, own, number = name
            channel.send(m.Link(job, version, attempt, own, number))
            await channel.receive(m.LINKED)
            return channel
        except OSError as error:
            channel.close()
            raise OSError(f"no connection with {host}: {error}") from None
        except BaseException:
            channel.close()
            raise

    async def _calls(self, name: _Named) -> Channel:
        """Wait for the connection that another host makes."""
        expected = self._expected[name] = asyncio.get_running_loop().create_future()
        try:
            if name in self._waiting and not self._waiting[name].done():
                self._waiting[name].set_result(None)
            return await expected
        except asyncio.CancelledError:
            if expected.done() and not expected.cancelled():
                expected.result().close()
            raise
        finally:
            del self._expected[name]

    async def take(self, channel: Channel, link: m.Link) -> bool:
        """Accept another host's connection for a transport. Return whether it belongs to one now."""
        if self.job not in ("", link.job):  # a caller may know the job before this host does
            raise ProtocolError(f"no link of this job: {link.job[:_MAX_SHOWN]!r}")
        name = (link.job, link.version, link.attempt, link.host, link.number)
        if name not in self._expected:
            if name in self._waiting or len(self._waiting) >= _MAX_WAITING:
                raise ProtocolError("too many links")
            wait = self._waiting[name] = asyncio.get_running_loop().create_future()
            try:
                await within(_WAIT_S, wait)
            except asyncio.TimeoutError:
                return False
            finally:
                del self._waiting[name]
        expected = self._expected.get(name)
        if expected is None or expected.done():
            return False
        channel.send(m.Linked())
        await channel.flushed()
        if expected.done():  # given up meanwhile
            return False
        expected.set_result(channel)
        return True
