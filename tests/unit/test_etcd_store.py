"""What the cluster store in etcd makes of URLs and answers; a small server stands for etcd."""

from __future__ import annotations

import base64
import http.server
import json
import socket
import threading
import types

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import (
    LeadershipLostError,
    StaleVersionError,
    StoreFullError,
    StoreUnreachableError,
    etcd_members,
    open_leadership,
    open_store,
)
from ms_kungfu.errors import ConfigServerError


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("etcd://10.0.0.1:2379,10.0.0.2/job", ("10.0.0.1", "10.0.0.2")),
        ("etcd://etcd-0.etcd:2379/teams/one/train-7", ("etcd-0.etcd",)),
        ("etcd://[fd00::1]:2379,[fd00::2]/job", ("fd00::1", "fd00::2")),
        ("etcds://a/job", ("a",)),
    ],
)
def test_a_url_names_members_and_a_job(url, servers):
    store = open_store(url)
    assert (store.servers, store.url, store.needs_secret) == (servers, url, False)


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("etcd://a:2379", "has no job name; write a URL like etcd://"),
        ("etcd://a:2379/", "has no job name"),
        ("etcd://a:2379/a job", "has no job name"),
        ("etcd://a:2379/job?x=1", "has no job name"),
        ("etcd:///job", "'' is not the address (host:port) of an etcd member"),
        ("etcd://a:2379,/job", "'' is not the address (host:port) of an etcd member"),
        ("etcd://a:x/job", "'a:x' is not the address (host:port) of an etcd member"),
        ("etcd://a:70000/job", "'a:70000' is not the address (host:port) of an etcd member"),
        ("etcd://me:word@a:2379/job", "set ETCDCTL_USER=NAME:PASSWORD instead"),
    ],
)
def test_a_url_that_makes_no_sense_is_refused_in_a_sentence(url, told):
    with pytest.raises(ValueError, match=".") as caught:
        open_store(url)
    assert told in str(caught.value)
    assert "word" not in str(caught.value).replace("PASSWORD", "")


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"ETCDCTL_USER": "me"}, "ETCDCTL_USER must be NAME:PASSWORD"),
        ({"ETCDCTL_PASSWORD": "word"}, "ETCDCTL_USER must be NAME:PASSWORD"),
        ({"ETCDCTL_CACERT": "/none.crt"}, "ETCDCTL_CACERT=/none.crt has no certificates: No such file"),
        ({"ETCDCTL_CERT": "/none.crt"}, "only one of ETCDCTL_CERT and ETCDCTL_KEY is set"),
        ({"ETCDCTL_CERT": "/none.crt", "ETCDCTL_KEY": "/none.key"}, "don't match: No such file"),
    ],
)
def test_etcdctl_variables_are_checked(environment, told, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=".") as caught:
        open_store("etcds://a:2379/job")
    assert told in str(caught.value)


class Server:
    """Answers as it is told: `answers` are (status, JSON or text) in their order, the last one again and again."""

    def __init__(self, *answers):
        asked = self.asked = []
        left = list(answers)

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked.append((self.path, body, dict(self.headers)))
                status, answer = left.pop(0) if len(left) > 1 else left[0]
                text = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_):
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.member = f"127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def member():
    started = []

    def start(*answers):
        started.append(Server(*answers))
        return started[-1]

    yield start
    for server in started:
        server.close()


def held(version, size=1, mark="m", revision=7):
    document = {"Version": version, "Writer": "w", "Mark": mark, "Cluster": cluster(size, version).to_json()}
    value = base64.b64encode(json.dumps(document).encode()).decode()
    return {"header": {"revision": "9"}, "kvs": [{"mod_revision": str(revision), "value": value}]}


def decoded(key):
    return base64.b64decode(key).decode()


def cluster(size, version):
    return Cluster(tuple(PeerID("127.0.0.1", 10000 + i) for i in range(size)), (), version)


def test_a_member_that_can_not_say_is_followed_by_the_next(member):
    alone = member((503, {"error": "etcdserver: no leader", "code": 14}))
    well = member((200, held(4)))
    store = open_store(f"etcd://127.0.0.1:1,{alone.member},{well.member}/job")
    assert store.get() == cluster(1, 4)
    assert len(alone.asked) == 1
    store.get()
    assert len(alone.asked) == 1  # the member that has answered last is asked first
    assert well.asked[0][2]["Grpc-Metadata-hasleader"] == "true"
    well.close()
    with pytest.raises(StoreUnreachableError, match="no leader|refused"):
        open_store(f"etcd://127.0.0.1:1,{alone.member}/job").get()


def test_a_write_whose_answer_was_lost_is_found_again(member):
    first = member((200, held(4)), (503, {"error": "transport is closing", "code": 14}))
    kept = {}
    second = member((200, kept))
    store = open_store(f"etcd://{first.member},{second.member}/job", writer="w")
    # The mark is known once the first member was asked; what the second one holds is that write.
    original = store._ask_member

    def ask(turn, path, message, timeout_s):
        if path.endswith("txn"):
            put = message["success"][0]["request_put"]
            kept.update({"header": {"revision": "10"}, "responses": [
                {"response_range": {"kvs": [{"mod_revision": "10", "value": put["value"]}]}}]})  # fmt: skip
        return original(turn, path, message, timeout_s)

    store._ask_member = ask
    assert store.put(cluster(2, 5)) == cluster(2, 5)
    assert [path for path, *_ in second.asked] == ["/v3/kv/txn"]


def test_write_after_a_concurrent_write_is_stale(member):
    instead = {"header": {"revision": "10"}, "responses": [{"response_range": held(5, mark="other", revision=10)}]}
    one = member((200, held(4)), (200, instead))
    with pytest.raises(StaleVersionError, match="another writer has written version 5 before"):
        open_store(f"etcd://{one.member}/job").put(cluster(2, 5))
    compare = one.asked[1][1]["compare"][0]
    assert (compare["target"], compare["mod_revision"]) == ("MOD", "7")
    with pytest.raises(StaleVersionError, match="is not the next version"):
        open_store(f"etcd://{member((200, held(4))).member}/job").put(cluster(2, 4))


def test_a_write_of_which_is_not_known_what_became_is_not_called_stale(member):
    """The first member may have done it, and another client have written over it: "stale" would say that it was never
    done."""
    instead = {"header": {"revision": "11"}, "responses": [{"response_range": held(6, mark="other", revision=11)}]}
    first = member((200, held(4)), (503, {"error": "transport is closing", "code": 14}))
    second = member((200, instead))
    with pytest.raises(StoreUnreachableError, match="it is unknown whether a write was applied"):
        open_store(f"etcd://{first.member},{second.member}/job").put(cluster(2, 5))


def test_controller_writes_the_desired_cluster_only_with_its_lease(member):
    one = member((200, held(4)), (200, {"succeeded": True}), (200, held(5)), (200, {"succeeded": True}))
    store = open_store(f"etcd://{one.member}/job")
    terms = iter([12, 15])  # between the two writes its lease was over, and it has come back
    store.led_since = lambda: next(terms)
    store.put(cluster(2, 5))
    store.delete()
    for since, (path, asked, _) in zip(["12", "15"], one.asked[1::2]):
        assert path == "/v3/kv/txn"
        of_cluster, of_holder = asked["compare"]
        assert (decoded(of_cluster.pop("key")), decoded(of_holder.pop("key"))) == (
            "/ms_kungfu/job/cluster", "/ms_kungfu/job/holder",
        )  # fmt: skip
        assert of_cluster == {"target": "MOD", "result": "EQUAL", "mod_revision": "7"}
        assert of_holder == {"target": "CREATE", "result": "EQUAL", "create_revision": since}


def test_controller_without_its_lease_gets_an_error(member):
    """The wanted cluster is as it was read, so it is the lease that isn't."""
    instead = {"header": {"revision": "10"}, "responses": [{"response_range": held(4)}]}
    one = member((200, held(4)), (200, instead))
    store = open_store(f"etcd://{one.member}/job")
    store.led_since = lambda: 12
    with pytest.raises(LeadershipLostError, match="another host decides for the job"):
        store.put(cluster(2, 5))


@pytest.mark.parametrize(
    ("kind", "told"),
    [("etcds", "it doesn't answer with TLS; if it doesn't use TLS, write etcd://"),
     ("etcd", "it closes the connection without an answer; if it uses TLS, write etcds://")],
)  # fmt: skip
def test_where_only_one_end_speaks_tls_the_other_kind_of_url_is_named(kind, told):
    with socket.create_server(("127.0.0.1", 0)) as etcd:

        def hang_up():
            connection, _ = etcd.accept()
            with connection:
                connection.recv(65536)

        threading.Thread(target=hang_up, daemon=True).start()
        member = f"127.0.0.1:{etcd.getsockname()[1]}"
        with pytest.raises(StoreUnreachableError) as caught:
            open_store(f"{kind}://{member}/job").get()
    assert str(caught.value) == f"config server {kind}://{member}/job: {member}: {told}"


def test_a_lease_lasts_as_long_as_is_wanted_at_least(member):
    """etcd counts in whole seconds."""
    one = member((200, {"ID": "7587", "TTL": "3"}))
    keys = open_leadership(f"etcd://{one.member}/job")
    assert keys.grant(2.25) == (7587, 3.0)
    keys.grant(2.0)
    assert [asked["TTL"] for _, asked, _ in one.asked] == ["3", "2"]


@pytest.mark.parametrize(
    ("user", "silent", "shares"),
    [
        (None, "abc", [("a", 4.0), ("b", 4.0), ("c", 4.0)]),
        (None, "bc", [("a", 4.0), ("b", 6.0), ("c", 6.0)]),  # what one leaves the others have
        ("me:word", "abc", [("a", 3.0), ("b", 4.0), ("c", 4.0)]),  # a login takes a second of it
    ],
)
def test_each_member_has_its_share_of_the_time(user, silent, shares, monkeypatch):
    """One that is silent doesn't take the time of those that would answer."""
    now_s = 100.0
    asked = []

    def exchange(connection, method, path, body, headers, timeout_s):
        nonlocal now_s
        if path == "/v3/auth/authenticate":
            now_s += 1.0
            return types.SimpleNamespace(status=200), b'{"token": "t"}'
        asked.append((connection.host, timeout_s))
        now_s += timeout_s if connection.host in silent else 0.0
        raise OSError("nobody answers")

    monkeypatch.setattr(etcd_members, "run_time", lambda: now_s)
    monkeypatch.setattr(etcd_members, "exchange", exchange)
    if user:
        monkeypatch.setenv("ETCDCTL_USER", user)
    with pytest.raises(StoreUnreachableError, match="c:2379: nobody answers"):
        open_store("etcd://a,b,c/job", timeout_s=12.0).get()
    assert asked == shares


def test_a_token_that_is_over_is_asked_for_again(member, monkeypatch):
    monkeypatch.setenv("ETCDCTL_USER", "me:word")
    one = member((200, {"token": "t1"}), (200, held(4)), (401, {"error": "etcdserver: invalid auth token", "code": 16}),
                 (200, {"token": "t2"}), (200, held(5)))  # fmt: skip
    store = open_store(f"etcd://{one.member}/job")
    assert (store.get().version, store.get().version) == (4, 5)
    paths = [path for path, *_ in one.asked]
    login, read = "/v3/auth/authenticate", "/v3/kv/range"
    assert paths == [login, read, read, login, read]
    assert [headers.get("Authorization") for *_, headers in one.asked] == [None, "t1", "t1", None, "t2"]


@pytest.mark.parametrize(
    ("status", "answer", "told"),
    [
        (200, "<html>", "doesn't follow etcd's v3 API: 200 <html>; is this the client address"),
        (404, "404 page not found", "doesn't follow etcd's v3 API: 404"),
        (404, {"error": "there is no cluster yet"}, "doesn't follow etcd's v3 API"),
        (403, {"error": "etcdserver: permission denied", "code": 7}, "etcdctl role grant-permission ROLE readwrite"),
        (400, {"error": "etcdserver: user name is empty", "code": 3}, "set ETCDCTL_USER=NAME:PASSWORD"),
        (
            429,
            {"error": "etcdserver: mvcc: database space exceeded", "code": 8},
            "its database is full; free space with",
        ),
        (
            200,
            {"header": {"revision": "1"}, "kvs": [{"value": "bm9uZQ==", "mod_revision": "1"}]},
            "contains no cluster of ms_kungfu (it is not JSON",
        ),
        (
            200,
            {"header": {"revision": "1"}, "kvs": [{"mod_revision": "1"}]},  # an empty value
            "contains no cluster of ms_kungfu (it is not JSON",
        ),
        (
            200,
            {"header": {"revision": "1"}, "kvs": [{"value": "e30=", "mod_revision": "1"}]},
            "contains no cluster of ms_kungfu (it has no Version); use another job name",
        ),
        (200, {"header": 5}, "has no revision"),
        (200, "x" * 2_000_000, "answered more than"),
    ],
)
def test_unexpected_etcd_answer_is_reported_in_a_sentence(member, status, answer, told):
    one = member((status, answer))
    with pytest.raises(ConfigServerError) as caught:
        open_store(f"etcd://{one.member}/job").get()
    assert told in str(caught.value)
    assert not isinstance(caught.value, StoreUnreachableError)
    assert isinstance(caught.value, StoreFullError) == ("is full" in told)
    assert len(str(caught.value)) < 600
