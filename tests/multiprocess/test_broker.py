"""The broker, what passes on to it on a host, and the worker's end of their protocol, over real sockets; the segment is
plain anonymous memory here."""

import asyncio
import contextlib
import errno
import functools
import gc
import inspect
import json
import os
import re
import socket
import struct
import threading
import time

import pytest

from ms_kungfu import broker_protocol
from ms_kungfu._proofs import proof_of
from ms_kungfu._version import VERSION
from ms_kungfu.broker_protocol import BrokerClient, Connection, Detached, Granted, Stay
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.errors import CollectiveTimeoutError, KungFuError, PeerLostError, ResizeError
from ms_kungfu.launcher import channel as channels
from ms_kungfu.launcher.agent import relay
from ms_kungfu.launcher.channel import WorkerChannel
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.segments import NotMadeYet
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.codec import encode

pytestmark = pytest.mark.timeout(60)
SECRET = b"s" * 32
A, B, C = (PeerID("127.0.0.1", 10000 + i) for i in range(3))


class MemorySegment:
    """Holds text that says which version it is for, and what it was told."""

    def __init__(self, cluster, recovers):
        self.fd = os.memfd_create("test")
        os.write(self.fd, f"{cluster.size} {cluster.version}".encode())
        self.told = []
        self.reaped = set()
        self.beats = {}
        self.steps = {}
        self.closed = False

    def mark_lost(self, rank, reason, recover, reaped):
        self.told.append((rank, reason, "recover") if recover else (rank, reason))
        if reaped:
            self.reaped.add(rank)

    def check_made(self):
        pass

    def gave_up(self, rank):
        return ""

    def heartbeat(self, rank):
        return self.beats.get(rank, 0)

    def progress(self, rank):
        return self.steps.get(rank)

    def announce(self, version):
        self.told.append(version)

    def lose_host(self, host):
        self.told.append(host)

    def close(self):
        self.closed = True
        os.close(self.fd)


class HostsPart:
    """Of a segment: what the host has of it."""

    def __init__(self, segment):
        self._segment = segment

    def hand_over(self, asker, message):
        asker.send(message, (self._segment.fd,))


class Asker:
    """At the broker: a worker that has asked by way of its host."""

    def __init__(self, passes_on, number):
        self._relay, self._number = passes_on, number

    def send(self, message, fds=()):
        self._relay.answer(self._number, message)

    def end(self):
        self._relay.answer(self._number, None)


class End(Connection):
    """One end of a connection, by hand."""

    def send(self, message, fds=()):
        self.send_bytes(encode(message), fds)

    def receive(self, reads):
        body, fds = self.receive_bytes()
        broker_protocol.close_all(fds)
        return reads(body)


class Loop:
    """A launcher's event loop, in a thread of its own."""

    def __init__(self):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def call(self, function, *arguments, **keywords):
        """In the loop."""

        async def called():
            result = function(*arguments, **keywords)
            return await result if inspect.isawaitable(result) else result

        return asyncio.run_coroutine_threadsafe(called(), self.loop).result(20)

    def stop(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        while self.loop.is_running():
            time.sleep(0.001)
        self.loop.close()


class Host(Loop):
    """A broker and a host that passes on to it, and what they have asked for."""

    def __init__(self, *clusters, is_alive=relay.is_alive, **options):
        super().__init__()
        self.leaving = []
        self.last = []
        self.trouble = []
        self.ready = []
        self.segments = []
        self.unknown = []
        self.committed = []
        self.asking = {}
        self.parts = {}
        self._relay = self.call(relay.Relay, self.pass_on, self.parts, is_alive=is_alive)
        self._broker = self.call(
            Broker,
            **options,
            on_leave=self.leaving.append,
            on_last=self.last.append,
            on_trouble=self.trouble.append,
            on_ready=self.ready.append,
            make_segment=self.make_segment,
            on_unknown_version=self.on_unknown_version,
            on_committed=lambda *committed: self.committed.append(committed),
        )
        self._server = self.call(relay.BrokerServer, self._relay, SECRET)
        self.relay, self.broker, self.server = (
            InLoop(self, each) for each in (self._relay, self._broker, self._server)
        )
        self.to_admit = {}
        for cluster in clusters:
            self.broker.admit(cluster)
        self.broker.commit_version(clusters[0].version)

    def make_segment(self, cluster, recovers):
        return self.made(cluster, MemorySegment(cluster, recovers))

    def made(self, cluster, segment):
        self.segments.append(segment)
        self.parts[cluster.version] = HostsPart(segment)
        return segment

    def make_slowly(self, slow):
        """From now on segments take their time."""

        def make(cluster, recovers):
            slow.append(SlowSegment(cluster, recovers))
            self.parts[cluster.version] = HostsPart(slow[-1])
            return slow[-1]

        self.broker._segments.make = make

    def pass_on(self, said):
        """What the host tells the head."""
        if isinstance(said, m.HungUp):
            self._broker.requests.withdraw(self.asking[said.number])
            return
        self.asking[said.number] = Asker(self._relay, said.number)
        self._broker.serve(self.asking[said.number], said.message)

    def on_unknown_version(self, version):
        self.unknown.append(version)
        if version in self.to_admit:
            self._broker.admit(self.to_admit[version])

    def client(self, secret=SECRET):
        return BrokerClient(self.server.address, secret)

    def grant(self, *asked, secret=SECRET, **more):
        with contextlib.closing(self.client(secret)) as client:
            return client.request_segment(*asked, **more)

    def identity(self, standby):
        with contextlib.closing(self.client()) as client:
            return client.request_identity(standby)

    def close(self):
        if self.loop.is_closed():
            return
        self.server.close()
        self.broker.close()
        self.relay.close()
        self.stop()

    def ask(self, peer, incarnation=0, member_of=None, version=None, timeout=20, secret=SECRET):
        answer = self.grant(peer, incarnation, member_of, version, timeout, secret=secret)
        if isinstance(answer, Granted):
            text = os.pread(answer.fd, 100, 0).decode()
            os.close(answer.fd)
            return answer.cluster.version, answer.rank, text
        return answer

    def ask_later(self, *arguments, **keywords):
        return Later(lambda: self.ask(*arguments, **keywords))

    def later(self, function):
        return Later(function)

    def wait_until(self, condition):
        deadline = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    def wait_for_connections(self, count):
        while len(self._server._proved) + len(self._server._unproved) != count:
            time.sleep(0.001)


class InLoop:
    """An object whose methods are called in the event loop that it belongs to."""

    def __init__(self, host, owner):
        self._host, self._owner = host, owner

    def __getattr__(self, name):
        found = getattr(self._owner, name)
        return functools.partial(self._host.call, found) if inspect.ismethod(found) else found


class Later(threading.Thread):
    """A call on another thread."""

    def __init__(self, function):
        super().__init__(daemon=True)
        self._function = function
        self.start()

    def run(self):
        try:
            self._result = self._function(), None
        except Exception as error:
            self._result = None, error

    def result(self):
        self.join(20)
        value, error = self._result
        if error is not None:
            raise error
        return value


def cluster(version, *workers):
    return Cluster(tuple(workers), (), version)


@pytest.fixture
def host():
    made = []

    def make(*clusters, **options):
        made.append(Host(*clusters, **options))
        return made[-1]

    gc.collect()  # what other tests have left
    descriptors = len(os.listdir("/proc/self/fd"))
    yield make
    for one in made:
        one.close()
        one.wait_for_connections(0)
        assert all(segment.closed for segment in one.segments)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_workers_share_the_segment_of_their_version(host):
    one = host(cluster(3, A, B))
    assert one.ask(A, 3) == (3, 0, "2 3")
    assert one.ask(B, 3) == (3, 1, "2 3")
    assert len(one.segments) == 1


def test_descriptor_is_closed_on_exec(host):
    one = host(cluster(0, A))
    granted = one.grant(A, 0, None, None, 20)
    assert not os.get_inheritable(granted.fd)
    os.close(granted.fd)


def test_joining_worker_waits_for_the_commit_and_removed_one_is_detached(host):
    one = host(cluster(0, A, B))
    one.broker.admit(cluster(1, A, C))
    joining_worker = one.ask_later(C, 1)
    one.wait_for_connections(1)
    assert one.committed == []
    leaver = one.ask_later(B, 0, 0, 1)
    one.wait_for_connections(2)
    assert one.committed == []
    one.wait_until(lambda: one.ready)
    assert one.ask(A, 0, 0, 1) == (1, 0, "2 1")
    assert leaver.result() == Detached()
    assert joining_worker.result() == (1, 1, "2 1")
    one.wait_until(lambda: one.committed == [(cluster(1, A, C), None)])
    # By incarnation: an earlier process of that peer ID may be on its way out. Reported again with the slot.
    assert one.ready[0] == (C, 1)
    assert set(one.ready) == {(A, 0), (C, 1)}


def test_step_of_the_committing_member_is_reported(host):
    one = host(cluster(0, A), cluster(1, A))
    granted = one.grant(A, 0, 0, 1, 20, step=120)
    os.close(granted.fd)
    one.wait_until(lambda: one.committed)  # told behind the grant, by another thread
    assert one.committed == [(cluster(1, A), 120)]


def test_choice_on_record_that_a_death_has_overtaken_is_not_made(host):
    on_record = []
    one = host(cluster(0, A, B), cluster(1, A, B, C), recovers=True, on_commit=on_record.append)
    waiting = one.ask_later(A, 0, 0, 1)
    one.wait_until(lambda: on_record == [1])
    one.broker.mark_lost(C, "was killed by SIGKILL", 1, recover=True)
    assert not one.broker.noted()
    one.broker.not_noted()
    assert waiting.result() == Stay()
    assert one.committed == []


def test_unknown_version_is_looked_for_at_once_and_only_once(host):
    one = host(cluster(0, A))
    one.to_admit[1] = cluster(1, A, B)
    assert one.ask(A, 0, 0, 1) == (1, 0, "2 1")
    assert one.unknown == [1]


def test_refused_version_is_a_resize_error_with_the_reason(host):
    one = host(cluster(0, A))
    waiting = one.ask_later(A, 0, 0, 1)
    one.wait_for_connections(1)
    one.broker.refuse(1, "more than 2 slots")
    with pytest.raises(ResizeError, match="version 1 is rejected: more than 2 slots"):
        waiting.result()


def test_members_hear_of_losses_and_of_newer_versions(host):
    one = host(cluster(0, A, B))
    one.broker.mark_lost(B, "was killed by SIGKILL", 0)  # before there is a segment
    one.ask(A)
    one.broker.admit(cluster(1, A))
    assert one.segments[0].told == [0, (1, "was killed by SIGKILL"), 1]
    one.broker.mark_lost(A, "exited with code 1", 0)
    assert one.segments[0].told[-1] == (0, "exited with code 1")


def test_the_loss_of_an_earlier_process_is_not_the_new_ones(host):
    one = host(cluster(0, A, B), cluster(1, A))
    one.ask(A, 0, 0, 1)
    one.broker.admit(cluster(2, A, B))
    one.ask(A, 0, 1, 2)
    one.broker.mark_lost(B, "exited with code 0", 0)
    one.ask(B, 2)
    one.broker.mark_lost(B, "exited with code 1", 2)
    assert one.segments[-1].told == [2, (1, "exited with code 1")]


def test_segments_of_versions_that_are_over_are_closed(host):
    one = host(cluster(0, A))
    one.ask(A)
    for version in range(1, 5):
        one.broker.admit(cluster(version, A))
        one.ask(A, 0, version - 1, version)
    assert [segment.closed for segment in one.segments] == [True, True, True, False, False]


def test_version_is_not_prepared_before_its_segment_can_be_made(host):
    one = host(cluster(0, A))

    def fail(*_):
        raise OSError("no memory")

    one.broker._segments.make = fail
    one.broker.admit(cluster(1, A))
    assert one.trouble == ["the shared memory of cluster version 1 (1 worker) can't be made: no memory"]
    assert one.segments[0].told == [0]
    one.broker._segments.make = one.make_segment
    one.broker.prepare()
    assert one.segments[0].told == [0, 1]
    assert one.ask(A, 0, 0, 1) == (1, 0, "1 1")


class SlowSegment(MemorySegment):
    """On several hosts, which take their time: `made` says what came of it."""

    made: object = None

    def check_made(self):
        if self.made is None:
            raise NotMadeYet
        if self.made is not True:
            raise self.made


def test_version_with_a_slow_segment_is_prepared_once_the_segment_exists(host):
    one = host(cluster(0, A, B))
    slow = []
    one.make_slowly(slow)
    one.broker.admit(cluster(1, A, B))
    assert one.segments[0].told == [0]
    waiting = one.ask_later(A, 0, 0, 1)  # whoever asks nevertheless waits, too
    one.broker.mark_lost(B, "killed", 0, recover=True)
    one.broker.prepare()
    assert one.trouble == []
    assert slow[0].told == []
    slow[0].made = True
    one.broker.prepare()
    assert len(slow) == 1
    assert slow[0].told[:2] == [1, (1, "killed")]  # of a death meanwhile, too
    assert waiting.result() == (1, 0, "2 1")


def test_a_segment_that_cannot_be_made_after_a_while_is_made_anew(host):
    one = host(cluster(0, A))
    slow = []
    one.make_slowly(slow)
    one.broker.admit(cluster(1, A))
    slow[0].made = OSError("host b: no memory")
    one.broker.prepare()
    assert one.trouble == ["the shared memory of cluster version 1 (1 worker) can't be made: host b: no memory"]
    assert slow[0].closed
    one.broker.prepare()
    assert len(slow) == 2
    slow[1].made = True
    one.broker.prepare()
    assert one.segments[0].told == [0, 1]
    assert one.ask(A, 0, 0, 1) == (1, 0, "1 1")


def test_unfinished_segment_is_closed_once_its_version_is_obsolete(host):
    one = host(cluster(0, A, B))
    slow = []
    one.make_slowly(slow)
    one.broker.admit(cluster(1, A, C))
    one.broker.admit(cluster(2, A, B))  # which leaves C out again
    one.broker.close()
    assert slow
    assert all(segment.closed for segment in slow)


def test_a_version_is_not_chosen_before_its_segment_exists(host):
    one = host(cluster(0, A, B))

    def fail(*_):
        raise OSError("no memory")

    one.broker._segments.make = fail
    one.broker.admit(cluster(1, A, B))
    for peer in (A, B):  # both are told so, whatever was free meanwhile
        with pytest.raises(ResizeError, match="version 1 is rejected: the shared memory .* can't be made: no memory"):
            one.ask(peer, 0, 0, 1)
        one.broker._segments.make = one.make_segment
    assert one.broker.versions.current == cluster(0, A, B)
    one.broker.admit(cluster(2, A, B))
    assert one.ask(A, 0, 0, 2) == (2, 0, "2 2")


def test_a_moment_without_descriptors_does_not_make_the_broker_deaf(host, monkeypatch):
    one = host(cluster(0, A))
    failed = []

    class Listener:
        def __init__(self, listener):
            self._listener = listener

        def accept(self):
            connection, address = self._listener.accept()
            if len(failed) < 3:
                failed.append(True)
                connection.close()
                raise OSError(errno.EMFILE, "Too many open files")
            return connection, address

        def __getattr__(self, name):
            return getattr(self._listener, name)

    listener = one.server._listener
    listener._socket = Listener(listener._socket)
    for _ in range(4):  # the first is still heard by the socket itself
        with contextlib.suppress(PeerLostError, CollectiveTimeoutError):
            one.ask(A, timeout=5)
    assert len(failed) == 3
    assert one.ask(A) == (0, 0, "1 0")


def test_unauthenticated_clients_of_this_user_make_way_for_workers(host, monkeypatch):
    """Those who say nothing are sent away, and not whoever comes last; a kept connection stays."""
    monkeypatch.setattr(relay.BrokerServer, "most_unproved", 20)
    one = host(cluster(0, A, B))
    client = one.client()
    granted = client.request_segment(A, 0, None, None, 20)
    os.close(granted.fd)
    with contextlib.ExitStack() as stack:
        for _ in range(70):
            stranger = stack.enter_context(socket.socket(socket.AF_UNIX))
            stranger.connect("\0" + one.server.address)
        assert one.ask(B, timeout=5)[1] == 1  # half of what strangers have for a word
        assert len(one.server._unproved) <= 20
        granted = client.request_segment(A, 0, None, None, 20)
        os.close(granted.fd)
        client.close()


def test_worker_taken_for_an_unauthenticated_client_retries(host, monkeypatch):
    one = host(cluster(0, A))
    turned_away = []

    def accepted(connection, source):
        if len(turned_away) < 3:
            turned_away.append(connection)
            connection.close()
        else:
            one._server._on_accepted(connection, source)

    monkeypatch.setattr(one.server._listener, "_accepted", accepted)
    assert one.ask(A)[1] == 0
    assert len(turned_away) == 3


def test_worker_reaped_later_is_reported_later(host):
    one = host(cluster(0, A, B), cluster(1, A, B))
    one.broker.mark_lost(B, "hangs", 0, recover=True, reaped=False)
    one.broker.mark_reaped(A, 0)
    assert one.segments[0].reaped == set()
    one.broker.mark_reaped(B, 0)
    assert one.segments[0].reaped == {1}
    assert one.ask(A, 0, 0, 1)[0] == 1
    assert one.segments[-1].reaped == {1}  # one that was made afterwards


def test_other_users_get_nothing(host, monkeypatch):
    one = host(cluster(0, A))
    monkeypatch.setattr(broker_protocol.os, "geteuid", lambda: 12345678)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + one.server.address)
        assert stranger.recv(1) == b""


def test_wrong_secret_gets_nothing(host):
    one = host(cluster(0, A))
    with pytest.raises(KungFuError, match="the job's broker has another secret"):
        one.ask(A, secret=b"x" * 32)
    connection = End(socket.socket(socket.AF_UNIX), 10)
    connection.socket.connect("\0" + one.server.address)
    connection.send(m.Nonce("1" * 32, m.PROTOCOL))
    connection.receive(m.NONCE)
    connection.send(m.Proof("0" * 64))
    assert isinstance(connection.receive(m.PROOF), m.Error)  # not even the broker's own proof
    with pytest.raises(ConnectionError):
        connection.receive(m.PROOF)
    connection.close()
    assert not one.broker._holders


def test_worker_does_not_trust_a_broker_without_the_secret():
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("\0kungfu-test-impostor")
    listener.listen()

    def pretend():
        connection = End(listener.accept()[0], 10)
        connection.send(connection.receive(m.NONCE))  # sends back what it has heard
        connection.send(connection.receive(m.PROOF))
        connection.close()

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(KungFuError, match="does not know the job's secret"):
        BrokerClient("kungfu-test-impostor", SECRET).request_segment(A, 0, None, None, 10)
    listener.close()


def child_of(ask):
    """Forks a process that asks: 7 if it is told that the slot isn't its own."""
    pid = os.fork()
    if pid == 0:
        try:
            ask()
        except KungFuError as error:
            os._exit(7 if "belongs to process" in str(error) else 1)
        os._exit(0)
    return pid


def test_a_forked_child_does_not_get_its_parents_place(host):
    one = host(cluster(0, A))
    one.ask(A)
    assert one.ask(A) == (0, 0, "1 0")  # the same process may ask again
    pid = child_of(lambda: one.ask(A))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_joining_worker_fails_after_its_timeout(host):
    one = host(cluster(0, A), cluster(1, A, B))
    with pytest.raises(CollectiveTimeoutError, match=r"127\.0\.0\.1:10001: no answer .* within 0\.2 s"):
        one.ask(B, 1, timeout=0.2)


def test_child_of_a_standby_gets_no_slot_and_costs_the_parent_none(host):
    one = host(cluster(0, A))
    one.ask(A)
    spare = one.later(lambda: one.identity(7))
    one.wait_until(lambda: one.broker.requests.ready_standbys == {7})
    one.broker.admit(cluster(3, A, B))
    one.call(one.broker.requests.assign, 7, B, 3)
    one.ask(A, 0, 0, 3)
    os.close(spare.result().fd)
    pid = child_of(lambda: one.identity(7))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    one.broker.admit(cluster(4, A, B))
    assert one.ask(B, 3, 3, 4)[0] == 4


def test_child_that_asks_before_the_parent_has_its_slot_gets_none(host):
    one = host(cluster(0, A), cluster(1, A, B))
    one.ask(A)
    parent = one.ask_later(B, 1)
    one.wait_until(lambda: one.broker.is_ready(B, 1))
    pid = child_of(lambda: one.grant(B, 1, None, None, 20))
    one.wait_until(lambda: len(one.broker.requests._waiting) == 2)
    one.ask(A, 0, 0, 1)
    assert parent.result()[0] == 1
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7


def test_leaver_is_answered_if_the_version_is_given_up(host):
    """By each change that may be its answer: nothing looks again by itself."""
    one = host(cluster(0, A, B), cluster(1, A, C), recovers=True)
    leaver = one.ask_later(B, 0, 0, 1)
    one.wait_until(lambda: one.broker.requests._waiting)
    one.broker.mark_lost(C, "was killed by SIGKILL", 1, recover=True)
    assert leaver.result() == Stay()


def test_leaver_is_answered_if_its_host_is_lost(host):
    one = host(cluster(0, A, B), cluster(1, A, C), recovers=True)
    leaver = one.ask_later(B, 0, 0, 1)
    one.wait_until(lambda: one.broker.requests._waiting)
    one.broker.lose_host("127.0.0.1", [(C, 1)], "is gone")
    assert leaver.result() == Stay()


def test_leaver_is_answered_when_all_have_finished(host):
    one = host(cluster(0, A, B), cluster(1, A), recovers=True)
    leaver = one.ask_later(B, 0, 0, 1)
    one.wait_until(lambda: one.broker.requests._waiting)
    one.broker.exclude_everybody()
    assert leaver.result() == Detached()


def test_honest_clients_are_not_evicted_once_they_have_proved_themselves(host, monkeypatch):
    monkeypatch.setattr(relay.BrokerServer, "most_unproved", 2)
    one = host(cluster(0, A))
    asking = [one.later(lambda: one.client().expect(0, 1, 2, 20.0)) for _ in range(60)]
    for each in asking:
        each.result()


def test_descriptors_that_cannot_be_doubled_are_not_left(host, monkeypatch):
    one, other = socket.socketpair()
    loop = Loop()
    channel = loop.call(WorkerChannel, one)
    real, made = os.dup, []

    def dup(fd):
        if len(made) == 2:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(real(fd))
        return made[-1]

    monkeypatch.setattr(channels.os, "dup", dup)
    with pytest.raises(OSError, match="Too many"):
        loop.call(channel.send, m.Noted(), (0, 1, 2))
    monkeypatch.undo()
    for fd in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    loop.call(channel.close)
    other.close()
    loop.stop()


def test_waiting_worker_learns_of_the_failed_launcher(host):
    one = host(cluster(0, A), cluster(1, A, B))
    waiting = one.ask_later(B, 1)
    one.wait_for_connections(1)
    one.close()
    with pytest.raises(PeerLostError, match="the launcher has ended"):
        waiting.result()
    with pytest.raises(PeerLostError, match="the launcher has ended"):
        one.ask(A)


def _proven(one):
    connection = End(socket.socket(socket.AF_UNIX), 10)
    connection.socket.connect("\0" + one.server.address)
    connection.send(m.Nonce("1" * 32, m.PROTOCOL))
    nonce = connection.receive(m.NONCE).nonce
    connection.send(m.Proof(proof_of(SECRET, "worker", nonce, "1" * 32)))
    connection.receive(m.PROOF)
    return connection


@pytest.mark.parametrize(
    ("request_", "told"),
    [
        ({}, "missing required field"),
        ({"incarnation": 0, "peer": "x"}, "matching regex"),
        ({"incarnation": -1, "peer": str(A)}, "`int` >= 0"),
        ({"incarnation": True, "peer": str(A)}, "Expected `int`"),
        ({"incarnation": 0, "peer": str(A), "version": "1"}, r"\$.version"),
        ({"incarnation": 0, "peer": str(A), "member_of": 0}, "must send the version"),
        ({"incarnation": 0, "peer": str(A), "software": {"ms_kungfu": VERSION}}, "missing required field `mindspore`"),
        ({"incarnation": 0, "peer": str(A)}, "of an unknown version"),
        ({"type": "take_store", "peer": str(A)}, "Invalid value 'take_store'"),
    ],
)
def test_requests_that_make_no_sense_are_answered_by_a_sentence(host, request_, told):
    one = host(cluster(0, A))
    connection = _proven(one)
    body = json.dumps({"type": "slot_request", **request_}).encode()
    connection.socket.sendall(struct.pack(">I", len(body)) + body)
    assert re.search(told, connection.receive(m.FROM_BROKER).error)
    connection.close()


@pytest.mark.parametrize("standby", [False, True])
def test_joining_worker_with_other_library_versions_is_refused_by_name(host, monkeypatch, standby):
    one = host(cluster(0, A, B, C))

    def come(peer, version, mindspore):
        monkeypatch.setattr(broker_protocol, "VERSION", version)
        monkeypatch.setattr(broker_protocol, "mindspore_version", lambda: mindspore)
        return one.identity(7) if standby and peer == B else one.ask(peer)

    who = "standby 7" if standby else str(B)
    assert come(A, VERSION, "2.10.0")[:2] == (0, 0)
    with pytest.raises(
        KungFuError, match=f"ms_kungfu is 9.9 in .*{who}, but {VERSION} in its launcher; .* restart the job"
    ):
        come(B, "9.9", "2.10.0")
    with pytest.raises(
        KungFuError, match=f"MindSpore is 2.9.0 in .*{who}, but 2.10.0 in worker {A}; .* restart the job"
    ):
        come(B, VERSION, "2.9.0")
    assert come(C, VERSION, "")[:2] == (0, 2)  # one that needs none


def test_member_is_not_asked_for_library_versions_again(host, monkeypatch):
    """A package that is replaced under a running process changes nothing in it."""
    one = host(cluster(0, A), cluster(1, A))
    assert one.ask(A)[:2] == (0, 0)
    monkeypatch.setattr(broker_protocol, "VERSION", "9.9")
    assert one.ask(A, 0, 0, 1)[:2] == (1, 0)


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x00",
        struct.pack(">I", 2**31) + b"x",
        struct.pack(">I", 3) + b"abc",
        struct.pack(">I", 4) + b"null",
        struct.pack(">I", 60_000) + b"[" * 60_000,
        struct.pack(">I", 2) + json.dumps({}).encode(),
        *(
            struct.pack(">I", 110) + json.dumps(said).encode().ljust(110)
            for said in (
                {"type": "nonce", "nonce": 1, "protocol": m.PROTOCOL},
                {"type": "nonce", "nonce": "\ud800", "protocol": m.PROTOCOL},
                {"type": "proof", "proof": "\ud800"},
            )
        ),
    ],
)
def test_garbage_closes_only_its_own_connection(host, garbage, caplog, capsys):
    one = host(cluster(0, A))
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect("\0" + one.server.address)
        stranger.sendall(garbage)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):  # it did not care to read the rest
            while stranger.recv(1000):
                pass
    assert one.ask(A) == (0, 0, "1 0")
    assert (caplog.text, capsys.readouterr().err) == ("", "")  # also of the thread of its connection


def test_large_clusters_fit_into_a_message(host):
    peers = [PeerID("127.0.0.1", 10000 + i) for i in range(1000)]
    one = host(cluster(0, *peers))
    assert one.ask(peers[-1])[1] == 999


# ---- recovery ----


def test_the_members_of_all_versions_go_on_without_the_dead(host):
    one = host(cluster(0, A, B), cluster(1, A, B, C), recovers=True)
    one.ask(A)
    one.broker.mark_lost(B, "was killed by SIGKILL", 0, recover=True)
    assert one.segments[0].told == [0, (1, "was killed by SIGKILL", "recover")]
    one.broker.admit(cluster(2, A, B))  # whoever wrote it had not heard of it
    assert one.ask(A, 0, 0, 2)[0] == 2
    assert one.segments[1].told == [2, (1, "was killed by SIGKILL", "recover")]
    one.broker.admit(cluster(3, A))
    one.broker.admit(cluster(4, A, B))
    one.ask(A, 0, 2, 4)
    assert one.segments[-1].told == [4]


def test_segment_exists_before_members_ask_and_is_closed_if_none_asks(host):
    one = host(cluster(0, A, B))
    one.ask(A)
    one.broker.admit(cluster(1, A))
    assert len(one.segments) == 2
    one.broker.admit(cluster(2, A, B))
    one.ask(A, 0, 0, 2)
    assert [s.closed for s in one.segments] == [False, True, False]


def test_member_keeps_its_connection_and_forked_child_authenticates_itself(host):
    one = host(cluster(0, A, B), cluster(1, A))
    client = one.client()

    def ask(member_of, version):
        answer = client.request_segment(A, 0, member_of, version, 20)
        os.close(answer.fd)
        return answer.cluster.version

    assert ask(None, None) == 0
    connection = client._connection
    assert ask(0, 1) == 1
    assert client._connection is connection
    one.wait_for_connections(1)
    child = os.fork()
    if child == 0:
        try:
            ask(0, 1)
        except ResizeError as error:
            os._exit(0 if "has no slot;" in str(error) and client._connection is None else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(0, 1) == 1
    client.close()
    one.wait_for_connections(0)


def test_without_recovery_a_death_is_a_loss(host):
    one = host(cluster(0, A, B))
    one.ask(A)
    one.broker.mark_lost(B, "was killed by SIGKILL", 0, recover=True)
    assert one.segments[0].told == [0, (1, "was killed by SIGKILL")]


def test_version_is_prepared_once_its_joining_workers_wait_for_it(host):
    one = host(cluster(0, A))
    one.ask(A)
    one.broker.admit(cluster(1, A, B, C))
    first = one.ask_later(B, 1)
    one.wait_until(lambda: one.broker.is_ready(B, 1))
    assert one.segments[0].told == [0]
    second = one.ask_later(C, 1)
    one.wait_until(lambda: one.segments[0].told == [0, 1])
    one.ask(A, 0, 0, 1)
    assert (first.result()[1], second.result()[1]) == (1, 2)


def test_joining_worker_that_has_disconnected_is_not_ready(host):
    one = host(cluster(0, A), cluster(1, A, B))
    with pytest.raises(CollectiveTimeoutError):
        one.ask(B, 1, timeout=0.3)
    one.wait_until(lambda: not one.broker.is_ready(B, 1))


def test_standby_becomes_the_needed_worker(host):
    one = host(cluster(0, A))
    one.ask(A)
    spare = one.later(lambda: one.identity(7))
    one.wait_until(lambda: one.broker.requests.ready_standbys == {7})
    one.broker.admit(cluster(3, A, B))
    one.call(one.broker.requests.assign, 7, B, 3)
    one.wait_until(lambda: one.segments[0].told == [0, 3])
    one.ask(A, 0, 0, 3)
    granted = spare.result()
    os.close(granted.fd)
    assert (granted.peer, granted.incarnation, granted.rank, granted.cluster) == (B, 3, 1, cluster(3, A, B))
    one.wait_until(lambda: one.broker.requests.ready_standbys == set())
    assert one.ask(B, 3, timeout=5)[1] == 1  # it has a name now; the same process may ask again


def test_a_standby_whose_version_is_overtaken_is_detached(host):
    one = host(cluster(0, A), cluster(1, A, B), cluster(2, A))
    spare = one.later(lambda: one.identity(1))
    one.call(one.broker.requests.assign, 1, B, 1)
    one.ask(A, 0, 0, 2)
    assert spare.result() == Detached()


def test_leave_request_is_granted_unless_the_worker_is_the_last(host):
    one = host(cluster(0, A, B))
    one.client().request_leave(A, 20)
    one.wait_until(lambda: one.leaving == [A])
    one.client().request_leave(C, 20)  # is not in it any more
    assert one.leaving == [A]
    one.broker.mark_lost(B, "exited with code 1", 0)
    with pytest.raises(ResizeError, match=r"127\.0\.0\.1:10000 is the last worker"):
        one.client().request_leave(A, 20)
    one.broker.end()
    with pytest.raises(ResizeError, match="the job is ending"):
        one.client().request_leave(A, 20)


def test_last_member_with_sigterm_is_reported_and_waits_for_its_end(host):
    one = host(cluster(0, A), cluster(1, A, B), min_size=2)
    with pytest.raises(ResizeError, match="10001 can't leave: only 1 worker would be left"):  # B isn't a member yet
        one.client().request_leave(B, 20, terminated=True)
    one.client().request_leave(A, 20, terminated=True)
    one.wait_until(lambda: one.last == [A])
    assert one.leaving == []


def test_fewer_than_the_smallest_size_are_never_left(host):
    """The caller is told, also of those who are leaving already; the job goes on."""
    one = host(cluster(0, A, B, C), min_size=2)
    one.client().request_leave(C, 20)
    with pytest.raises(ResizeError, match=r"10001 can't leave: only 1 worker would be left, but -min-np is 2$"):
        one.client().request_leave(B, 20)
    assert one.leaving == [C]
    one.call(one.broker.leaves.stays, C)  # its wish was dropped
    one.client().request_leave(B, 20)
    one.wait_until(lambda: one.leaving == [C, B])


def test_heartbeats_are_a_processs_own(host):
    one = host(cluster(0, A, B))
    assert one.broker.facts.heartbeat(A, 0) == ()
    one.ask(A)
    assert one.broker.facts.heartbeat(A, 0) == (0,)  # it has a place now, and is expected to count
    one.segments[0].beats = {0: 5, 1: 6}
    assert one.broker.facts.heartbeat(A, 0) == (5,)
    assert one.broker.facts.heartbeat(B, 0) == (6,)
    one.broker.admit(cluster(1, A, B))
    one.ask(A, 0, 0, 1)
    assert one.broker.facts.heartbeat(A, 0) == (5, 0)
    assert one.broker.facts.heartbeat(B, 1) == ()
    one.segments[0].beats.clear()
    assert one.broker.facts.heartbeat(A, 0) == ()  # it has left


def test_progress_of_a_process_is_its_last_report_in_the_newest_version(host):
    one = host(cluster(0, A, B))
    one.ask(A)
    assert one.broker.facts.progress(A, 0) is None
    one.segments[0].steps = {0: (5, 0.1, 2.0)}
    assert one.broker.facts.progress(A, 0) == (5, 0.1, 2.0)
    one.broker.admit(cluster(1, B, A))
    one.ask(A, 0, 0, 1)
    assert one.broker.facts.progress(A, 0) == (5, 0.1, 2.0)  # it has told nothing there yet
    one.segments[1].steps = {1: (6, 0.1, 0.5)}
    assert one.broker.facts.progress(A, 0) == (6, 0.1, 0.5)
    assert one.broker.facts.progress(B, 0) is None


def about_stores(host, request, fd=None, secret=SECRET):
    """The answer to a request about model stores, and the text behind the descriptor that came with it."""
    connection = End(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), 20)
    try:
        connection.socket.connect("\0" + host.server.address)
        broker_protocol.prove(connection, secret)
        connection.send(request, () if fd is None else (fd,))
        body, fds = connection.receive_bytes()
        answer = m.FROM_BROKER(body)
        texts = [os.pread(each, 100, 0).decode() for each in fds]
        for each in fds:
            os.close(each)
        return answer, texts
    finally:
        connection.close()


def store_of(text):
    fd = os.memfd_create("test")
    os.write(fd, text.encode())
    return fd


def test_a_store_is_handed_on_until_its_process_has_ended(host):
    living = {os.getpid()}
    one = host(cluster(0, A, B), is_alive=living.__contains__)
    for peer in (A, B):
        one.ask(peer)
    assert about_stores(one, m.GetStore(str(A))) == (m.Store(False), [])
    for peer, text in ((A, "a"), (B, "b")):
        fd = store_of(text)
        assert about_stores(one, m.PutStore(str(peer), 0), fd) == (m.Store(True), [])
        os.close(fd)
    assert about_stores(one, m.GetStore(str(B))) == (m.Store(True), ["b"])
    fd = store_of("unknown")
    answer, _ = about_stores(one, m.PutStore(str(C), 0), fd)
    assert "no longer a member" in answer.error
    one.relay.forget_failed()
    assert about_stores(one, m.GetStore(str(A))) == (m.Store(True), ["a"])
    living.clear()
    one.relay.forget_failed()
    assert about_stores(one, m.GetStore(str(A))) == (m.Store(False), [])
    answer, _ = about_stores(one, m.PutStore(str(A), 0), fd)
    assert "no longer a member" in answer.error
    os.close(fd)
    with pytest.raises((OSError, broker_protocol.ProtocolError)):
        about_stores(one, m.GetStore(str(A)), secret=b"x" * 32)


def test_no_limit_of_a_worker_runs_while_deadlines_are_held(monkeypatch):
    """The launcher waits for the job's store, and the answer comes after the worker's limit."""
    monkeypatch.setattr(relay, "_REMIND_S", 0.05)
    limit_s, asked, got, loop = 2.0, [], {}, Loop()
    passes_on = loop.call(relay.Relay, asked.append, {})
    loop.call(passes_on.hold_deadlines, True)
    server = loop.call(relay.BrokerServer, passes_on, SECRET)

    def ask(what, request):
        try:
            got[what] = request(BrokerClient(server.address, SECRET))
        except KungFuError as error:
            got[what] = error

    asking = [
        threading.Thread(target=ask, args=("place", lambda client: client.request_segment(A, 0, 0, 1, limit_s))),
        threading.Thread(target=ask, args=("cores", lambda client: client.fix_cores(1, limit_s))),
    ]
    for thread in asking:
        thread.start()
    deadline = time.monotonic() + 60
    while len(asked) < 2:
        assert time.monotonic() < deadline, asked
        time.sleep(0.01)
    threading.Event().wait(1.5 * limit_s)
    for message in asked:
        is_place = isinstance(message.message, m.SlotRequest)
        loop.call(passes_on.answer, message.number, m.Stay() if is_place else m.CoresFixed(3))
    for thread in asking:
        thread.join()
    loop.call(server.close)
    loop.stop()
    assert got == {"place": Stay(), "cores": 3}
