"""A network between simulated hosts: TCP's connections, byte by byte, and what becomes of them.

A connection delivers in order, or ends; how long that takes is drawn. A cable that is cut loses what goes one way: that
is sent again when it is whole, unless an end has had enough of waiting (TCP_USER_TIMEOUT). A host whose processes stand
still answers all the same, for its kernel does; one whose processes have ended closes their connections.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from collections import deque

_ROOM = 1 << 18  # bytes under way, or unread, before a sender has to wait
_RESEND_S = 0.2
_SYN_S = 0.5
_PROBE_S = 1.0
_FIN, _RESET = object(), object()


class Network:
    """All connections, and which cables are cut."""

    def __init__(self, world):
        self.world, self.random = world, world.network_random
        self.listeners = {}  # address -> Socket
        self.sockets = []  # ends of connections
        self.cut = {}  # (from, to) -> how often
        self.cut_since = {}  # pairs that are apart, in whichever direction -> when they were parted
        self.traps = []  # [two hosts, messages to go, those of links]: then the connection is reset
        self._ports = itertools.count(40000)

    def next_port(self):
        return next(self._ports)

    def passes(self, here, there):
        return here == there or not self.cut.get((here, there))

    def latency(self):
        draw = self.random.random()
        return 0.0005 + (0.002 * draw if draw < 0.95 else 0.8 * (draw - 0.95))

    def part(self, here, there, seconds, both=True):
        """What goes from `here` to `there` is lost, and what comes back, too."""
        ways = [(here, there), (there, here)] if both else [(here, there)]
        for way in ways:
            self.cut[way] = self.cut.get(way, 0) + 1
        pair = frozenset((here, there))
        if pair not in self.cut_since:
            self.cut_since[pair] = self.world.loop.now
            for end in self.sockets:
                if end.is_open and frozenset((end.host, end.other_host)) == pair:
                    end.watch_silence()
        self.world.loop.at(seconds, self._heal, ways, pair)

    def _heal(self, ways, pair):
        for way in ways:
            self.cut[way] -= 1
        if all(not self.cut.get(way) for way in itertools.permutations(pair)):
            self.cut_since.pop(pair, None)
            self.world.say("do", f"-- {' and '.join(sorted(host.name for host in pair))} are joined again")
            for end in self.sockets:
                if end.is_open and frozenset((end.host, end.other_host)) == pair:
                    self.world.loop.at(_PROBE_S, end.probe)

    def reset(self, end):
        """A machine between them ends a connection: both ends hear of it, and what was under way is lost."""
        for each in (end, end.peer):
            if each is not None:
                each.outgoing.clear()
                each.fail(errno.ECONNRESET)

    def _join(self, caller, called):
        for one, other in ((caller, called), (called, caller)):
            one.peer, one.other_host, one.is_open = other, other.host, True
            self.sockets.append(one)

    def connected(self, caller, listener):
        called = Socket(self, listener.host, listener.name)
        self._join(caller, called)
        listener.queue.append(called)
        listener.host.loop.look_at(listener)
        if frozenset((caller.host, called.host)) in self.cut_since:  # by now
            caller.watch_silence()
            called.watch_silence()

    def forget_the_closed(self):
        self.sockets = [end for end in self.sockets if end.is_open]


class Socket:
    """socket.socket as `launcher.control` uses it, and one end of a connection."""

    def __init__(self, network, host, name=None):
        self.network, self.host, self.name = network, host, name
        self.peer = self.other_host = None
        self.is_open = False  # connected, and not ended here
        self.closed = False
        self.eof = False  # the other end sends no more
        self.error = None  # errno
        self.silent_s = None  # TCP_USER_TIMEOUT
        self.queue = deque()  # of a listener: the callers
        self.inbox = bytearray()
        self.outgoing = deque()
        self.under_way = 0  # bytes
        self.is_links = False  # not the launchers' any more
        self.on_message = self.on_end = None  # of a link, which sends objects
        self._sending = False
        self._last_arrival = 0.0
        self._waiting = None

    # ---- what a launcher does ----

    def setblocking(self, blocking):
        pass

    def setsockopt(self, level, option, value):
        if (level, option) == (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT):
            self.silent_s = value / 1000 or None

    def getsockopt(self, level, option, most):
        raise OSError(errno.ENOPROTOOPT, os.strerror(errno.ENOPROTOOPT))

    def fileno(self):
        return -1 if self.closed else 1000

    def getsockname(self):
        return self.name

    def bind(self, address):
        self.name = (address[0], address[1] or self.network.next_port())

    def listen(self, most):
        if self.name in self.network.listeners:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        self.network.listeners[self.name] = self

    def accept(self):
        if not self.queue:
            raise BlockingIOError
        accepted = self.queue.popleft()
        return accepted, accepted.peer.name

    def send(self, data):
        self._check()
        if self.under_way > _ROOM:
            raise BlockingIOError
        self.transmit(bytes(data))
        return len(data)

    def shutdown(self, how):
        if self.is_open and how in (socket.SHUT_WR, socket.SHUT_RDWR):
            self._put(_FIN)
        if how == socket.SHUT_RDWR:
            self.eof = True
            self.wake()

    def close(self):
        if self.closed:
            return
        self.closed = True
        if self.network.listeners.get(self.name) is self:
            del self.network.listeners[self.name]
            for called in self.queue:
                called.close()
        if self.is_open:
            self._put(_RESET if self.inbox else _FIN)
            self.is_open = False
            self.network.forget_the_closed()
        self.wake()

    def detach(self):
        """A descriptor, which stands for this end from now on."""
        self.is_links = True
        return self.host.descriptor_of(self)

    async def receive(self, count):
        while True:
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
            if self.inbox:
                data = bytes(self.inbox[:count])
                del self.inbox[:count]
                if self.peer is not None:
                    self.peer.under_way -= len(data)
                    self.peer.host.loop.look_at(self.peer)
                return data
            if self.eof or self.closed:
                return b""
            self._waiting = asyncio.get_running_loop().create_future()
            try:
                await self._waiting
            finally:
                self._waiting = None

    async def connect(self, address):
        network = self.network
        if self.name is None:
            self.bind((self.host.address, 0))
        pause = _SYN_S
        other = network.world.host_at(address[0])
        while True:
            await asyncio.sleep(network.latency())
            if other.is_on and network.passes(self.host, other):
                await asyncio.sleep(network.latency())
                if network.passes(other, self.host):
                    listener = network.listeners.get(address[:2])
                    if listener is None:
                        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
                    network.connected(self, listener)
                    return
            await asyncio.sleep(pause)
            pause *= 2

    def _check(self):
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        if not self.is_open:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    # ---- what the kernels do ----

    def transmit(self, item):
        """Bytes, or a link's object."""
        if not self.is_open:
            return
        self.under_way += len(item) if isinstance(item, bytes) else 0
        self._put(item)
        for trap in self.network.traps:
            if trap[0] == {self.host, self.other_host} and trap[2] == self.is_links:
                trap[1] -= 1
                if trap[1] < 0:
                    self.network.traps.remove(trap)
                    self.network.world.say("do", f"-- reset: {self.host.name} and {self.other_host.name}")
                    if self.network.random.random() < 0.5:  # the last message may have come through
                        self._deliver_all()
                    self.network.reset(self)
                break

    def _put(self, item):
        network = self.network
        self._last_arrival = max(self._last_arrival, network.world.loop.now + network.latency())
        self.outgoing.append((self._last_arrival, item))
        if not self._sending:
            self._sending = True
            network.world.loop.at(self._last_arrival - network.world.loop.now, self._arrives, _RESEND_S)

    def _arrives(self, pause):
        self._sending = False
        if not self.outgoing:
            return
        loop = self.network.world.loop
        if not (self.other_host.is_on and self.network.passes(self.host, self.other_host)):
            self._sending = True
            loop.at(pause, self._arrives, min(2 * pause, 2.0))
            return
        while self.outgoing and self.outgoing[0][0] <= loop.now:
            self._deliver(self.outgoing.popleft()[1])
        if self.outgoing:
            self._sending = True
            loop.at(self.outgoing[0][0] - loop.now, self._arrives, _RESEND_S)

    def _deliver_all(self):
        while self.outgoing:
            self._deliver(self.outgoing.popleft()[1])

    def _deliver(self, item):
        peer = self.peer
        if item is _RESET:
            peer.fail(errno.ECONNRESET)
        elif not peer.is_open:
            if (
                item is not _FIN and peer.error is None and self.is_open
            ):  # no process is there any more, and its kernel says so
                self.fail(errno.ECONNRESET)
        elif item is _FIN:
            peer.eof = True
            peer.wake()
            peer.tell_end("the connection was closed")
        elif isinstance(item, bytes):
            peer.inbox += item
            peer.wake()
        elif peer.on_message is not None:
            peer.on_message(item)

    def fail(self, number):
        if not self.is_open:
            return
        self.error, self.is_open = number, False
        self.inbox.clear()
        self.wake()
        self.host.loop.look_at(self)
        self.tell_end(os.strerror(number))
        self.network.forget_the_closed()

    def tell_end(self, why):
        if self.on_end is not None:
            self.on_end(why)

    def wake(self):
        if self._waiting is not None and not self._waiting.done() and not self.host.is_over:
            self._waiting.set_result(None)

    def watch_silence(self):
        """Both are apart: this end has had enough of it after its time, if nothing has changed."""
        if self.silent_s is not None:
            since = self.network.cut_since[frozenset((self.host, self.other_host))]
            wait = self.silent_s * (1 + 0.6 * self.network.random.random())
            self.network.world.loop.at(wait, self._had_enough, since)

    def probe(self):
        """A keepalive: the other end may have given up meanwhile, and this one has got no word of it."""
        whole = self.network.passes(self.host, self.other_host) and self.network.passes(self.other_host, self.host)
        peer_is_gone = not self.peer.is_open and not self.peer.outgoing
        if self.silent_s is not None and whole and peer_is_gone and not self.eof:
            self.fail(errno.ECONNRESET)

    def _had_enough(self, since):
        if self.network.cut_since.get(frozenset((self.host, self.other_host))) == since:
            self.outgoing.clear()
            self.fail(errno.ETIMEDOUT)
