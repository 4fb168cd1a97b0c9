"""Connections between launchers: which callers get in, and a version's transports. All ends are in this process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import threading
from types import SimpleNamespace

import msgspec
import pytest

from ms_kungfu._decoding import ProtocolError
from ms_kungfu._proofs import new_nonce, proof_of
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher import channel as channels
from ms_kungfu.launcher import control, network, server
from ms_kungfu.launcher.agent import transports
from ms_kungfu.launcher.agent.segments import HostSegment
from ms_kungfu.launcher.agent.transports import Transports
from ms_kungfu.launcher.channel import Channel
from ms_kungfu.launcher.control import ControlServer, RefusedError, call
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.state.hosts import Host, Hosts
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.codec import Reads
from tests.garbage import collected
from tests.ports import free_port

pytestmark = pytest.mark.timeout(60)
SECRET = b"s" * 16
A, B, C = (f"127.0.0.{number}" for number in (1, 2, 3))


class Said(msgspec.Struct):
    """What these tests have launchers say."""

    text: str
    number: int = 0


SAID = Reads(Said)
REGISTRATION = Said("hello")


class Transport:
    """Keeps its connections."""

    def __init__(
        self, local_fd, board_fd, *, host, host_of_rank, addresses, names, connections, for_models, find, tls, strategy
    ):
        self.host, self.host_of_rank, self.names = host, list(host_of_rank), list(names)
        self.for_models, self.find = [len(fds) for fds in for_models], find
        self.connections = [[socket.socket(fileno=fd) for fd in (*m, *c)] for m, c in zip(for_models, connections)]
        self.asked = []
        self.closed = False

    def connect(self, local_rank):
        self.asked.append(local_rank)
        return os.memfd_create("socket"), os.memfd_create("socket")

    def failure(self):
        return ""

    def close(self):
        self.closed = True
        for connection in (c for fds in self.connections for c in fds):
            connection.close()


class Launcher:
    """What of one is needed: a port, and what makes its segments."""

    def __init__(self, name, names, port, secret=SECRET, job="job"):
        self.made = []
        self.machine = Machine()
        self.machine.make_transport = self.make_transport
        hosts = Hosts(tuple(Host(each, 8) for each in names), name)
        self.transports = Transports(self.machine, hosts, port, secret, job)
        self.server = ControlServer(self.machine, secret, self.serve)
        self.name, self.port = name, port

    def make_transport(self, *fds, **options):
        self.made.append(Transport(*fds, **options))
        return self.made[-1]

    def make(self, cluster, attempt=1):
        return HostSegment.make(cluster, attempt, True, 2, self.transports)

    async def serve(self, channel):
        return await self.transports.take(channel, await channel.receive(m.FIRST_WORDS))

    async def __aenter__(self):
        await self.server.start(self.name, self.port)
        return self

    async def __aexit__(self, *_):
        await self.server.close()


@contextlib.asynccontextmanager
async def launchers(*names, **options):
    port = free_port()
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(Launcher(name, names, port, **options)) for name in names]


def cluster(version, *hosts):
    ports = {host: iter(range(10000, 11000)) for host in hosts}
    return Cluster(tuple(PeerID(host, next(ports[host])) for host in hosts), (), version)


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def run(coroutine):
    """Nothing is left open by it."""
    before = descriptors()
    asyncio.run(coroutine)
    assert descriptors() <= before


# ---- transports ----


def test_each_pair_of_hosts_is_connected_with_the_same_number_at_both_ends():
    async def test():
        async with launchers(A, B, C) as three:
            version = cluster(3, A, B, A, C, B)
            made = await asyncio.gather(*(each.make(version) for each in three))
            ends = [each.made[0] for each in three]
            assert [(each.host, each.host_of_rank, each.names) for each in ends] == [
                (place, [0, 1, 0, 2, 1], [A, B, C]) for place in range(3)
            ]
            for one in range(3):
                assert ends[one].for_models == [int(one != other) for other in range(3)]
                for other in range(3):
                    assert len(ends[one].connections[other]) == (0 if one == other else transports.CONNECTIONS_A_PAIR)
                    for number, connection in enumerate(ends[one].connections[other]):
                        connection.setblocking(True)
                        connection.sendall(b"%d%d%d" % (one, other, number))
            for one in range(3):
                for other in range(3):
                    for number, connection in enumerate(ends[one].connections[other]):
                        assert connection.recv(10) == b"%d%d%d" % (other, one, number)
            assert [segment.ranks() for segment in made] == [[0, 2], [1, 4], [3]]
            for segment in made:
                segment.close()
            assert all(transport.closed for transport in ends)

    run(test())


def test_host_called_before_it_knows_the_version_lets_the_caller_wait():
    async def test():
        async with launchers(A, B) as (first, second):
            late = asyncio.ensure_future(second.make(cluster(0, A, B), 7))
            while len(first.transports._waiting) < transports.CONNECTIONS_A_PAIR:
                await asyncio.sleep(0.01)
            segment = await first.make(cluster(0, A, B), 7)
            segment.close()
            (await late).close()

    run(test())


def test_another_attempts_connections_are_not_taken_for_this_ones(monkeypatch):
    monkeypatch.setattr(transports, "MAKE_S", 0.5)
    monkeypatch.setattr(transports, "_WAIT_S", 0.1)

    async def test():
        async with launchers(A, B) as two:
            for segment in await asyncio.gather(
                *(each.make(cluster(0, A, B), attempt) for attempt, each in enumerate(two)),
                return_exceptions=True,
            ):
                assert isinstance(segment, OSError)
                assert "no connection with" in str(segment)
            assert [each.made for each in two] == [[], []]
            assert [each.transports._expected for each in two] == [{}, {}]

    run(test())


def test_a_version_that_is_given_up_while_its_hosts_meet_leaves_nothing():
    async def test():
        async with launchers(A, B, C) as three:
            # The third one never comes.
            making = [asyncio.ensure_future(each.make(cluster(0, A, B, C))) for each in three[:2]]
            await asyncio.sleep(0.3)
            for task in making:
                task.cancel()
            await asyncio.wait(making)
            assert all(task.cancelled() for task in making)

    run(test())


def test_a_transport_that_cannot_be_made_leaves_nothing():
    async def test():
        async with launchers(A, B) as two:

            def refuse(*fds, connections, for_models, **options):
                for fd in (fd for with_one in (*connections, *for_models) for fd in with_one):
                    os.close(fd)  # they are taken over
                raise OSError("no thread")

            for each in two:
                each.machine.make_transport = refuse
            found = await asyncio.gather(*(each.make(cluster(0, A, B)) for each in two), return_exceptions=True)
            assert [str(error) for error in found] == ["no thread", "no thread"]

    run(test())


def test_connections_are_closed_if_a_later_one_cannot_be_detached(monkeypatch):
    detach, detached = Channel.detach, []

    def detach_one(self, silent_s):
        if detached:
            raise OSError("no such connection")
        detached.append(detach(self, silent_s))
        return detached[0]

    monkeypatch.setattr(Channel, "detach", detach_one)

    async def test():
        async with launchers(A, B) as two:
            making = [asyncio.ensure_future(each.make(cluster(0, A, B))) for each in two]
            found = await asyncio.gather(*making, return_exceptions=True)
            assert [str(error) for error in found] == ["no such connection", "no such connection"]
            assert len(detached) == 1
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(detached[0])

    run(test())


def test_workers_of_one_host_have_no_transport():
    async def test():
        async with launchers(A, B) as (_, second):
            segment = await second.make(cluster(0, B, B))
            assert segment.ranks() == [0, 1]
            segment.close()
            assert second.made == []

    run(test())


def segment_over_hosts(cluster, transport):
    """The one of host A, with this transport."""

    async def make(*_):
        return transport

    there = SimpleNamespace(machine=Machine(), hosts=SimpleNamespace(self_name=A), make=make)
    return asyncio.run(HostSegment.make(cluster, 1, True, 2, there))


def test_segment_over_hosts_passes_descriptors_and_closes_its_copies():
    asked, told = [], []

    def connect(local_rank):
        asked.append(local_rank)
        return os.memfd_create("socket"), os.memfd_create("socket")

    def send(message, fds):
        told.append(message)
        assert [os.fstat(fd).st_size > 0 for fd in fds] == [True, True, False, False]

    segment = segment_over_hosts(cluster(4, A, B, A), SimpleNamespace(connect=connect, close=lambda: None))
    before = descriptors()
    segment.hand_over(SimpleNamespace(send=send), SimpleNamespace(rank=2))
    assert asked == [1]
    assert descriptors() == before
    assert [slot.rank for slot in told] == [2]
    with pytest.raises(KeyError):  # it isn't here
        segment.hand_over(SimpleNamespace(send=send), SimpleNamespace(rank=1))
    segment.close()


def test_transport_finds_the_stores_of_ranks_by_their_peers():
    async def test():
        async with launchers(A, B) as two:
            members = cluster(4, A, B, A)
            for each in two:
                each.transports.find_store = lambda peer: 7 if peer == members.workers[2] else -1
            parts = await asyncio.gather(*(each.make(members) for each in two))
            assert [[each.made[0].find(rank) for rank in (0, 2)] for each in two] == [[-1, 7], [-1, 7]]
            for part in parts:
                part.close()

    run(test())


def test_failure_is_in_control_block_by_job_rank_and_in_its_hosts_segment(monkeypatch):
    told = []

    class Control:
        def __init__(self, fd):
            self.size = len(told)
            told.append([])
            self.told = told[-1]

        def mark_lost(self, *what):
            self.told.append(what)
            order.append(self)

        def gave_up(self, rank):
            return f"{rank}"

        def heartbeat(self, rank):
            return 10 + rank

        def progress(self, rank):
            return rank, 0.5, 2.0

    from ms_kungfu import _core

    order = []
    monkeypatch.setattr(_core, "SegmentControl", Control)
    segment = segment_over_hosts(cluster(4, A, B, A), SimpleNamespace(close=lambda: None))
    segment.mark_lost(1, "died", True, True)
    assert told == [[], [(1, "died", True, True)]]
    segment.mark_lost(2, "died", True, False)
    assert told == [[(1, "died", True, False)], [(1, "died", True, True), (2, "died", True, False)]]
    assert order[1:] == [segment._board, segment._segment]  # a rank that reads the segment finds it on the board
    assert segment.gave_up(2) == "1"  # by its place on this host
    assert segment.heartbeat(2) == 11
    assert segment.progress(2) == (1, 0.5, 2.0)
    segment.close()


# ---- callers that are admitted ----


async def first_of(channel):
    try:
        return await channel.receive(SAID)
    except ConnectionError:
        return None


@contextlib.asynccontextmanager
async def serving(secret=SECRET, host=A):
    served = []

    async def serve(channel):
        served.append(await channel.receive(SAID))
        channel.send(served[-1])
        await channel.flushed()
        return False

    server, port = ControlServer(Machine(), secret, serve), free_port()
    await server.start(host, port)
    try:
        yield port, served
    finally:
        await server.close()


@pytest.mark.parametrize(("caller", "called"), [(B, A), ("localhost", A), ("::1", "::1")])
def test_caller_with_the_secret_is_served(caller, called):
    if called == "::1" and not network.is_of_this_machine(called):
        pytest.skip("this machine has no IPv6")

    async def test():
        async with serving(host=called) as (port, served):
            channel = await call(Machine(), caller, called, port, SECRET, 10)
            channel.send(REGISTRATION)
            assert await channel.receive(SAID) == REGISTRATION
            assert served == [REGISTRATION]
            channel.close()

    run(test())


@pytest.mark.parametrize(("theirs", "ours"), [(SECRET, b"t" * 16), (SECRET, b""), (b"", SECRET)])
def test_caller_with_another_secret_is_rejected_with_the_reason(theirs, ours, caplog):
    async def test():
        async with serving(theirs) as (port, served):
            for _ in range(3):
                with pytest.raises(RefusedError, match="the called launcher has another secret"):
                    await call(Machine(), B, A, port, ours, 10)
            assert served == []

    run(test())
    assert caplog.text.count("connection rejected: ") == 1


def test_impostor_is_found_out_by_the_caller():
    """He repeats what he has been told, or makes something up."""

    async def impostor(reader, writer):
        for _ in range(2):  # the caller's nonce, and his proof
            (length,) = struct.unpack(">I", await reader.readexactly(4))
            writer.write(struct.pack(">I", length) + await reader.readexactly(length))
        await writer.drain()
        writer.close()

    async def test():
        server = await asyncio.start_server(impostor, A, 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RefusedError, match="the other end doesn't know the job's secret"):
            await call(Machine(), B, A, port, SECRET, 10)
        server.close()
        await server.wait_closed()

    run(test())


def test_call_without_an_answer_ends_after_the_requested_time():
    async def test():
        begin = asyncio.get_running_loop().time()
        with pytest.raises(OSError, match=rf"no answer from {A}:\d+"):
            await call(Machine(), B, A, free_port(), SECRET, 0.5)
        assert asyncio.get_running_loop().time() - begin < 30

    run(test())


async def whole_of(connection):
    """All that comes until the other end has closed."""
    loop, data = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionError):
        while piece := await loop.sock_recv(connection, 4096):
            data += piece
    return data


@pytest.mark.parametrize(
    "words",
    [b"\xff" * 8, struct.pack(">I", 4097), struct.pack(">I", 4) + b"abcd", struct.pack(">I", 2) + b"[]",
     struct.pack(">I", 16) + b'{"nonce": "abc"}', b""],
)  # fmt: skip
def test_caller_without_a_proof_is_disconnected_in_time(words, monkeypatch):
    monkeypatch.setattr(server, "HANDSHAKE_S", 0.3)

    async def test():
        async with serving() as (port, served):
            with socket.create_connection((A, port)) as stranger:
                stranger.setblocking(False)
                await asyncio.get_running_loop().sock_sendall(stranger, words)
                await asyncio.wait_for(whole_of(stranger), 20)
            assert served == []

    run(test())


def test_a_proof_that_was_heard_is_worth_nothing_in_another_connection():
    async def test():
        async with serving() as (port, served):
            nonce = new_nonce()
            with socket.create_connection((A, port)) as stranger:
                channel = Channel(stranger.dup())
                channel.send(m.Nonce(nonce, m.PROTOCOL))
                challenge = (await channel.receive(m.NONCE)).nonce
                heard = m.Proof(proof_of(SECRET, "caller", challenge, nonce))
                channel.send(heard)
                assert isinstance(await channel.receive(m.PROOF), m.Proof)
                channel.close()
            with socket.create_connection((A, port)) as stranger:
                channel = Channel(stranger.dup())
                channel.send(m.Nonce(nonce, m.PROTOCOL))
                await channel.receive(m.NONCE)
                channel.send(heard)
                assert isinstance(await channel.receive(m.PROOF), m.Error)
                channel.close()
            assert served == []

    run(test())


def test_silent_unauthenticated_clients_make_way_for_later_callers():
    async def test():
        async with serving() as (port, served):
            strangers = []
            for _ in range(3 * control.ControlServer.most_unproved):
                strangers.append(socket.create_connection((A, port)))
                await asyncio.sleep(0)
            channel = await call(Machine(), B, A, port, SECRET, 20)
            channel.send(REGISTRATION)
            assert await channel.receive(SAID) == REGISTRATION
            channel.close()
            for stranger in strangers:
                stranger.close()

    run(test())


# ---- messages ----


def pair():
    """Two channels that are connected."""
    with socket.socket() as listener:
        listener.bind((A, 0))
        listener.listen()
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return Channel(one), Channel(other)


def test_messages_of_several_threads_arrive_whole_in_order_of_the_calls():
    async def test():
        one, other = pair()
        lock, sent = threading.Lock(), []

        def send(name):
            for number in range(200):
                with lock:  # the order is the callers' to make
                    sent.append((name + "x" * 3000, number))
                    one.send(Said(*sent[-1]))

        threads = [threading.Thread(target=send, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for number in range(200):
            with lock:
                sent.append(("loop", number))
                one.send(Said(*sent[-1]))
            await asyncio.sleep(0)
        assert [msgspec.structs.astuple(await other.receive(SAID)) for _ in range(600)] == sent
        for thread in threads:
            thread.join()
        one.close()
        other.close()

    run(test())


def test_an_end_that_does_not_read_is_given_up_before_memory_is(monkeypatch):
    monkeypatch.setattr(channels, "_MAX_QUEUED_BYTES", 1 << 20)

    async def test():
        one, other = pair()
        for _ in range(1000):
            one.send(Said("x" * 10000))
        with pytest.raises(ConnectionError):
            await one.receive(SAID)
        assert one._queued <= 1 << 20
        one.close()
        other.close()

    run(test())


def test_a_message_over_the_limit_is_not_read():
    async def test():
        one, other = pair()
        one.send(Said("x" * 5000))
        with pytest.raises(ProtocolError, match="over the limit of 4096"):
            await other.receive(SAID, 4096)
        one.close()
        other.close()

    run(test())


# ---- what ends a connection, and no job ----


@contextlib.contextmanager
def no_bug():
    """Nothing reaches the loop's exception handler, by which a launcher ends its job."""
    found = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context))
    with collected():  # the exception of a task that isn't awaited gets there late
        yield
    assert found == []


def framed(*bodies):
    return b"".join(struct.pack(">I", len(body)) + body for body in bodies)


HALF = b'"\\ud800"'
GOOD = b'"' + b"0" * 32 + b'"'
NONCE, PROOF = (b'{"type": "nonce", "protocol": 2, "nonce": ', b'{"type": "proof", "proof": ')


@pytest.mark.parametrize(
    "words",
    [
        framed(NONCE + HALF + b"}", PROOF + b'"x"}'),
        framed(NONCE + GOOD + b"}", PROOF + HALF + b"}"),
        framed(NONCE + GOOD + b"}", PROOF + b'"\xc3\xa9"}'),
        framed(NONCE + GOOD + b"}", PROOF + b'"' + b"\xe0\xa5\xa6" * 64 + b'"}'),  # digits, and not hex
        framed(NONCE + GOOD + b', "protocol": 99}', b""),
        framed(NONCE + b"9" * 4000 + b"}"),
        framed(NONCE + b"[" * 4000 + b"}"),
    ],
    ids=["nonce", "proof", "no-ascii", "no-hex", "protocol", "number", "nesting"],
)
def test_malformed_text_before_the_proof_is_refused(words, caplog):
    async def test():
        async with serving() as (port, served):
            with no_bug():
                stranger = await asyncio.open_connection(A, port)
                stranger[1].write(words)
                await asyncio.wait_for(stranger[0].read(), 20)
                stranger[1].close()
                channel = await call(Machine(), B, A, port, SECRET, 10)
                channel.close()

    run(test())
    (refusal,) = [record.getMessage() for record in caplog.records if "rejected" in record.getMessage()]
    assert "internal error" not in caplog.text
    refusal.encode()


def test_exception_while_serving_ends_that_connection(caplog):
    async def serve(channel):
        raise RecursionError(await channel.receive(SAID))

    async def test():
        server, port = ControlServer(Machine(), SECRET, serve), free_port()
        await server.start(A, port)
        with no_bug():
            for _ in range(2):
                channel = await call(Machine(), B, A, port, SECRET, 10)
                channel.send(REGISTRATION)
                with pytest.raises(ConnectionError):
                    await channel.receive(SAID)
                channel.close()
            await server.close()

    run(test())
    assert caplog.text.count("internal error: where=connection from=") == 2


def test_exception_while_accepting_ends_that_connection(monkeypatch):
    async def test():
        async with serving() as (port, served):
            with no_bug():
                real = control.Channel

                def fails(*_, **__):
                    monkeypatch.setattr(control, "Channel", real)
                    raise OSError("gone already")

                monkeypatch.setattr(control, "Channel", fails)
                reader, writer = await asyncio.open_connection(A, port)
                assert await asyncio.wait_for(reader.read(), 20) == b""
                writer.close()
                channel = await call(Machine(), B, A, port, SECRET, 10)
                channel.close()

    run(test())


@pytest.mark.parametrize(
    "answers",
    [
        [NONCE + HALF + b"}"],
        [NONCE + GOOD + b"}", PROOF + HALF + b"}"],
        [b'{"type": "error", "error": ' + HALF + b"}"],
        [b'{"type": "error", "error": "\\u001b[2J"}'],
        [b"[" * 4000],
    ],
    ids=["nonce", "proof", "error", "terminal", "nesting"],
)
def test_caller_refuses_a_hostile_listener(answers):
    async def test():
        async def answer(reader, writer):
            for each in answers:
                await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
                writer.write(framed(each))
            await reader.read()
            writer.close()

        port = free_port()
        listener = await asyncio.start_server(answer, A, port)
        with no_bug():
            with pytest.raises(RefusedError) as refused:
                await call(Machine(), B, A, port, SECRET, 10)
            str(refused.value).encode()
            assert "\x1b" not in str(refused.value)
        listener.close()
        await listener.wait_closed()

    run(test())
