"""What a host, a store, a file or another program says at random is refused by the exception that its reader expects.

``KUNGFU_FUZZ`` says how many messages are tried at each, ``KUNGFU_FUZZ_SEED`` which.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import random
from types import SimpleNamespace

import msgspec
import pytest

from ms_kungfu._decoding import MalformedError, ProtocolError, decode
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import etcd_members, open_leadership, open_store
from ms_kungfu.dataset import ledger
from ms_kungfu.errors import ConfigServerError, KungFuError
from ms_kungfu.launcher import status_socket
from ms_kungfu.launcher.controller.remote_agent import RemoteAgent
from ms_kungfu.launcher.joining import options_from, terms_of
from ms_kungfu.launcher.options import JoinRequest, parse_command_line
from ms_kungfu.launcher.state.hosts import Host, Hosts, parse_hosts
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.codec import encode
from ms_kungfu.launcher.wire.documents import Past
from tests import hostile

TRIES = int(os.environ.get("KUNGFU_FUZZ", 300))
A, B = PeerID("127.0.0.1", 10000), PeerID("127.0.0.2", 10000)
CLUSTER = Cluster((A, B), (PeerID("127.0.0.1", 38080),), 3, slots={"127.0.0.1": 2, "127.0.0.2": 2})
REGISTRATION = m.Registration("127.0.0.2", "1", "2", {"-np": "2"}, [0, 1])
VERSIONS = ClusterVersions(
    {3: CLUSTER}, 3, excluded={B: [2]}, ended={B: [range(1, 3)]}, lost_hosts={"c": float("inf"), "d": 2}
)
SNAPSHOT = LeaderSnapshot(
    "job",
    "127.0.0.1",
    CLUSTER,
    (Host("127.0.0.1", 2),),
    VERSIONS,
    end=(1, "failed"),
    told=Past(5.0, []),
)
TERMS = terms_of(
    parse_command_line(["-port", "4000", "sh"]), Hosts(parse_hosts("127.0.0.1:2,127.0.0.2:2"), "127.0.0.1")
)
REQUEST = m.SlotRequest(str(B), 3, 2, 3, 7)


@pytest.fixture
def lots():
    return random.Random(int(os.environ.get("KUNGFU_FUZZ_SEED", 32)))


def joining(terms):
    return options_from(
        m.TERMS.convert(terms), JoinRequest("http://h/config", None, None, None, {}), Host("127.0.0.3", 2)
    )


@pytest.mark.parametrize(
    ("parse", "proper", "refusals"),
    [
        (Cluster.from_json, CLUSTER.to_json(), ValueError),
        (LeaderSnapshot.from_json, SNAPSHOT.to_json(), ProtocolError),
        (joining, msgspec.to_builtins(TERMS), (LookupError, TypeError, ValueError, OverflowError, ProtocolError)),
    ],
    ids=["cluster", "record", "terms"],
)
def test_messages_at_random_are_refused_as_expected(parse, proper, refusals, lots):
    parse(decode(json.dumps(proper), 1 << 20))
    refused = taken = 0
    for _ in range(TRIES):
        try:
            document = decode(hostile.mutated(lots, proper), 1 << 20, raw_bytes=True)
        except MalformedError:
            continue
        try:
            found = parse(document)
        except refusals as error:
            refused += 1
            str(error)
        else:
            taken += 1
            hash(getattr(found, "host", None)), repr(found)
            if hasattr(found, "to_json"):  # goes on to others, and comes back the same
                text = json.dumps(found.to_json())
                assert json.dumps(parse(json.loads(text)).to_json()) == text
    assert refused > TRIES // 50
    assert taken > TRIES // 50


# ---- etcd ----


def answers_at_random(lots):
    """HTTP statuses and bodies of a member: an etcd's, of which any part is something else now and then."""
    held = {"Version": 3, "Writer": "w", "Mark": "m", "Cluster": CLUSTER.to_json()}

    def key(document):
        body = hostile.mutated(lots, document) if lots.random() < 0.8 else hostile.document(lots)
        return {"value": base64.b64encode(body).decode(), "mod_revision": "7", "create_revision": "5"}

    while True:
        ranges = [{"response_range": {"kvs": [key(each)]}} for each in (SNAPSHOT.to_json(), "127.0.0.1")]
        answer = {
            "header": {"revision": "9"}, "kvs": [key(held)], "succeeded": lots.random() < 0.5, "responses": ranges,
            "ID": "7", "TTL": "5", "result": {"TTL": "5"}, "token": "t", "error": "e", "code": 5,
        }  # fmt: skip
        body = hostile.mutated(lots, answer)
        body = hostile.spoiled(lots, body) if lots.random() < 0.1 else body
        yield lots.choice((200, 200, 200, 200, 400, 500)), body


def test_etcds_answers_at_random_are_a_store_error(lots, monkeypatch):
    answers = answers_at_random(lots)

    def exchange(*_):
        status, body = next(answers)
        return SimpleNamespace(status=status), body

    monkeypatch.setattr(etcd_members, "exchange", exchange)
    store, leadership = open_store("etcd://127.0.0.1:1/job"), open_leadership("etcd://127.0.0.1:1/job")
    found, told = [0, 0], set()
    for _ in range(TRIES):
        for ask in (
            store.get, lambda: store.put(CLUSTER.following(CLUSTER.workers)), leadership.look,
            lambda: leadership.grant(5), lambda: leadership.renew(7),
            lambda: leadership.swap(leadership.look(), {}, "h", 7),
        ):  # fmt: skip
            try:
                ask()
                found[0] += 1
            except ConfigServerError as error:
                found[1] += 1
                told.add(str(error))
    assert min(found) > TRIES // 4, found
    assert all(text.isprintable() for text in told)


def test_a_watch_of_etcd_at_random_is_lost_or_news(lots, monkeypatch):
    from ms_kungfu.cluster_store import etcd

    store = open_store("etcd://127.0.0.1:1/job")

    def begin(*_):
        lines = [hostile.mutated(lots, {"result": {"events": [{}]}}), hostile.document(lots)]
        return None, iter([b"\n".join([*lines, b""])])

    monkeypatch.setattr(etcd, "begin", begin)
    assert {store._waits_for_news(1, 60) for _ in range(TRIES)} == {True, False}
    monkeypatch.setattr(etcd, "begin", lambda *_: (None, (b"x" * (1 << 16) for _ in range(1000))))
    assert store._waits_for_news(1, 60) is False


# ---- what a host says that was let in ----


class Owner:
    """Hears what a site has understood."""

    def __init__(self):
        self.options = SimpleNamespace(peer_timeout_s=5)
        self.workers = SimpleNamespace(done=lambda: True, result=lambda: self)
        self.resumes = False
        self.events = self.hanging = self.reachability = self
        self.gathering = SimpleNamespace(news=SimpleNamespace(set=lambda: None))
        self.machine = SimpleNamespace(start_thread=lambda name, function: function())
        self.broker = SimpleNamespace(serve=lambda asker, asked: None)
        self.name, self.heard = "127.0.0.1", []

    def __getattr__(self, name):
        return lambda *what, **more: self.heard.append(name)


SAID = [
    m.Started(1, 17), m.Exited(1, 0, "", {3: {1: "why"}}),
    m.Looked(1.5, (0, 1), {3: {1: 5}}, {}, [1], [], {3: {1: (5, 0.5, 2.0)}}, {3: [(1, -1, True)]}),
    m.Asks(1, REQUEST), m.HungUp(1), m.Made(3, 1, ""), m.TransportFailed(3, "w"), m.Syncs(3, 4),
    m.Unreachable(3, "h", "w"), m.Guardless(),
    m.Beat(), m.Interrupted(15), m.Leave(), m.Ends("why"), m.StatusQuestion(5),
]  # fmt: skip


class Channel:
    """Says each message, and then that nothing more comes."""

    heard = 0.0

    def __init__(self, *messages):
        self._messages = list(messages)

    async def receive(self, reads):
        if not self._messages:
            raise ConnectionError("the connection was closed")
        return reads(self._messages.pop(0))

    def send(self, message):
        encode(message)


def listened(*messages, owner=None):
    async def made():  # Python 3.9 makes an asyncio.Event only where an event loop runs
        return RemoteAgent(owner or Owner(), Channel(*messages), REGISTRATION, None)

    agent = asyncio.run(made())
    agent.segments[3] = SimpleNamespace(
        words={}, beats={}, waits={}, attempt=1, was_made=lambda *_: None, pass_on_sync_points=lambda _: None,
        note_progress=lambda *_: None,
    )  # fmt: skip
    listening = agent.listen()
    try:
        while True:
            listening.send(None)
    except StopIteration as ended:
        return ended.value


def test_random_message_of_a_host_ends_only_its_connection(lots, caplog):
    heard = []
    for _ in range(TRIES):
        heard.append(listened(hostile.mutated(lots, msgspec.to_builtins(lots.choice(SAID)), 0.15)))
    assert "internal error" not in caplog.text
    assert any("sent an invalid message" in why for why in heard)
    assert any("has ended" in why for why in heard)


def test_a_signal_that_is_none_ends_the_hosts_connection():
    for number in (0, -1, 65, 1 << 40, True, "15", None):
        said = {"type": "interrupted", "number": number}
        assert "sent an invalid message" in listened(json.dumps(said).encode())


def test_a_bug_in_hearing_a_host_is_the_loss_of_the_host(caplog):
    owner = Owner()
    owner.events = SimpleNamespace(host_leaves=lambda name: 1 // 0)
    assert "ZeroDivisionError" in listened(encode(m.Leave()), owner=owner)
    assert "internal error" in caplog.text


# ---- files and sockets of this user ----


@pytest.mark.parametrize("text", [b"[" * 5000, b'{"job": "\\ud800"}', b"[]", b'{"job": 1e999}', b"\xff"])
def test_a_launcher_that_tells_nonsense_has_no_status(text, tmp_path):
    import socket
    import threading

    name = f"{os.getpid()}.x.status"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / name))
        listener.listen()

        def tell():
            with listener.accept()[0] as client:
                client.sendall(text)

        thread = threading.Thread(target=tell)
        thread.start()
        folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
        found = status_socket._ask(folder, name, 10)
        os.close(folder)
        thread.join()
    assert found is None or "is just ending" in found["error"]


def test_a_ledger_of_nonsense_has_problems(lots, tmp_path):
    header = {"ledger": ledger.FORMAT, "job": "j", "time": 1.0, "data": 0}
    for _ in range(TRIES // 10):
        lines = [hostile.mutated(lots, header), *(hostile.document(lots) for _ in range(3))]
        (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines) + b"\n")
        try:
            records, problems, _ = ledger.read(tmp_path)
        except KungFuError:  # of a newer format
            continue
        assert problems
        assert not [record for each in records.values() for record in each if not isinstance(record.where, str)]
