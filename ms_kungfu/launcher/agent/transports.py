"""Create the inter-host transports of cluster versions, and the connections between hosts that they need."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Callable, Protocol

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.broker_protocol import close_all
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.channel import Channel
from ms_kungfu.launcher.control import call
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.state.hosts import Host, Hosts
from ms_kungfu.launcher.state.segment import MAKE_S
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

if TYPE_CHECKING:
    from ms_kungfu._core import TlsEnd

CONNECTIONS_A_PAIR = 3
_FOR_MODELS = 1  # how many of the connections between two hosts carry models
_WAIT_S = 20.0
_MAX_WAITING = 1024
_MAX_SHOWN = 200


class Transport(Protocol):
    """The interface of `_core.InterHostTransport`."""

    def connect(self, local_rank: int) -> tuple[int, int]: ...
    def lose_host(self, host: int) -> None: ...
    def unreachable(self) -> list[tuple[int, str]]: ...
    def failure(self) -> str: ...
    def close(self) -> None: ...


FindStore = Callable[[PeerID], int]
"""Return a new descriptor, which the caller owns, of a local worker's model store; -1 if there is no store."""


def no_stores(peer: PeerID) -> int:
    return -1


def _drop(getting: asyncio.Task[Channel]) -> None:
    """Close the connection that `getting` has returned, because no task waits for it."""
    if not getting.cancelled() and getting.exception() is None:
        getting.result().close()


# Identifies a connection: the job, the cluster version, the number of the attempt to create the version's shared
# memory, the calling host, and the number of the connection.
_Named = tuple[str, int, int, str, int]


@dataclass(eq=False)
class Transports:
    """Create this host's inter-host transports. Used only in the agent's event loop."""

    machine: Machine
    hosts: Hosts
    port: int
    secret: bytes
    job: str = ""  # the job's ID; "" if it isn't known yet
    silent_s: float | None = None  # a connection ends if the other host's operating system is silent for this long
    strategy: str = "AUTO"
    find_store: FindStore = no_stores
    _expected: dict[_Named, asyncio.Future[Channel]] = field(default_factory=dict)
    _waiting: dict[_Named, asyncio.Future[None]] = field(default_factory=dict)

    async def make(self, cluster: Cluster, attempt: int, local_fd: int, board_fd: int) -> Transport:
        """Create the transport of `cluster`, which has workers on this host and on other hosts.

        If this fails, raise the error and close all connections.
        """
        hosts, own = cluster.hosts, cluster.hosts.index(self.hosts.self_name)
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
            return self.machine.make_transport(
                local_fd, board_fd, host=own, host_of_rank=cluster.host_of_rank,
                addresses=[str(worker) for worker in cluster.workers], names=hosts,
                connections=[fds[_FOR_MODELS:] for fds in connections],
                for_models=[fds[:_FOR_MODELS] for fds in connections],
                find=lambda rank: self.find_store(cluster.workers[rank]), tls=tls, strategy=self.strategy,
            )  # fmt: skip
        finally:
            if not taken:
                close_all(fd for with_one in connections for fd in with_one)
                for task in getting:
                    if task.cancel():
                        task.add_done_callback(_drop)  # the cancelled task may still return a connection
                    else:
                        _drop(task)

    async def _called(self, host: str, name: _Named) -> Channel:
        """Return a connection that this host makes to `host`."""
        channel = await call(self.machine, self.hosts.own.address, Host(host).address, self.port, self.secret, MAKE_S)
        try:
            job, version, attempt, own, number = name
            channel.send(m.TransportConnection(job, version, attempt, own, number))
            await channel.receive(m.CONNECTED)
            return channel
        except OSError as error:
            channel.close()
            raise OSError(f"no connection with {host}: {error}") from None
        except BaseException:
            channel.close()
            raise

    async def _calls(self, name: _Named) -> Channel:
        """Wait for another host to connect to this host, and return the connection."""
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

    async def take(self, channel: Channel, said: m.TransportConnection) -> bool:
        """Accept another host's connection for a transport. Return whether a transport now owns it."""
        if self.job not in ("", said.job):  # the calling host may know the job's ID before this host does
            raise ProtocolError(f"connection belongs to another job: {said.job[:_MAX_SHOWN]!r}")
        name = (said.job, said.version, said.attempt, said.host, said.number)
        if name not in self._expected:
            if name in self._waiting or len(self._waiting) >= _MAX_WAITING:
                raise ProtocolError("too many connections")
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
        channel.send(m.Connected())
        await channel.flushed()
        if expected.done():  # `make` no longer waits
            return False
        expected.set_result(channel)
        return True
