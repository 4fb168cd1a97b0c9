"""kungfu-config-server as a process, spoken to over HTTP."""

import contextlib
import http.client
import json
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import StaleVersionError, StoreUnreachableError, open_store
from ms_kungfu.config_server.secret_file import read_secret
from ms_kungfu.errors import ConfigServerError

pytestmark = pytest.mark.timeout(60)
SECRET = "5ec7e7"


def workers(size):
    return {"Workers": [f"127.0.0.1:{10000 + i}" for i in range(size)]}


def cluster(size, version):
    return Cluster(tuple(PeerID("127.0.0.1", 10000 + i) for i in range(size)), (), version)


class Server:
    def __init__(self, program):
        self.program = program
        self.url = program.wait_for(r"serving (http://\S+/config)")[0][1]
        self.port = int(self.url.split(":")[2].split("/")[0])

    def request(self, method, body=None, query="", path="/config", **headers):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        text = body if isinstance(body, (bytes, type(None))) else json.dumps(body).encode()
        connection.request(method, path + query, text, headers)
        response = connection.getresponse()
        answer = response.read()
        connection.close()
        try:
            return response.status, json.loads(answer)
        except ValueError:
            return response.status, answer

    def write(self, method, body=None, secret=SECRET):
        return self.request(method, body, Authorization=f"Bearer {secret}")

    def client(self):
        return open_store(self.url, SECRET)


@pytest.fixture
def server(start_module):
    def start(*arguments, secret=SECRET):
        environment = {"KUNGFU_JOB_SECRET": secret} if secret else {}
        return Server(start_module("ms_kungfu.config_server", "-port", 0, *arguments, environment=environment))

    return start


def test_a_cluster_is_stored_read_replaced_and_forgotten(server):
    one = server()
    assert one.request("GET")[0] == 404
    assert one.write("PUT", workers(2)) == (200, {**workers(2), "Runners": [], "Version": 0})
    assert one.request("GET") == (200, {**workers(2), "Runners": [], "Version": 0})
    assert one.write("PUT", {**workers(3), "Runners": ["127.0.0.1:38080"]})[1]["Version"] == 1
    assert one.write("POST", {**workers(1), "Version": 2})[1]["Runners"] == ["127.0.0.1:38080"]
    assert one.write("DELETE")[0] == 200
    assert one.request("GET")[0] == 404
    assert one.write("PUT", workers(2))[1]["Version"] == 3
    assert one.write("POST")[0] == 200
    assert one.request("GET")[0] == 404


def test_a_write_says_whose_it_is_for_as_long_as_its_version_holds(server):
    one = server()
    writer = open_store(one.url, SECRET, writer="launcher1")
    assert writer.put(cluster(1, 0)).writer == "launcher1"
    assert one.client().get().writer == one.client().watch(-1, 20).writer == "launcher1"
    assert one.write("PUT", one.request("GET")[1] | {"Version": 1})[0] == 200  # by hand, the document edited
    assert one.client().get().writer == ""
    assert one.request("PUT", workers(1), **{"Authorization": f"Bearer {SECRET}", "Kungfu-Writer": "a b"})[0] == 400
    assert one.client().get().version == 1


def test_a_stale_write_is_a_409_and_changes_nothing(server):
    one = server()
    one.write("PUT", workers(1))
    assert one.write("PUT", {**workers(2), "Version": 1})[0] == 200
    status, answer = one.write("PUT", {**workers(3), "Version": 1})
    assert status == 409
    assert "send the new one with Version 2" in answer["error"]
    assert one.request("GET")[1]["Workers"] == workers(2)["Workers"]


def test_of_many_writers_exactly_one_wins_each_version(server):
    one = server()
    one.write("PUT", workers(1))
    wins = []

    def write_until_version_20(size):
        client = one.client()
        while (version := client.get().version) < 20:
            with contextlib.suppress(StaleVersionError):
                wins.append((client.put(cluster(size, version + 1)).version, size))

    threads = [threading.Thread(target=write_until_version_20, args=(2 + i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    versions = sorted(version for version, _ in wins)
    assert versions == list(range(1, len(versions) + 1))
    assert len(one.request("GET")[1]["Workers"]) == dict(wins)[versions[-1]]


GARBAGE = [
    (b" ", 400, "not JSON"),
    (b"garbage", 400, "not JSON"),
    (b"\xff\xfe", 400, "not UTF-8"),
    (b"[" * 100_000, 400, "nested more than 64 levels deep"),
    (b"null", 400, "JSON object"),
    ({"Workers": []}, 400, "Workers is empty"),
    ({"Workers": ["127.0.0.1"]}, 400, "127.0.0.1"),
    ({"Workers": ["x" * 100_000]}, 400, "xxx"),
    ({"Workers": ["127.0.0.1:1", "127.0.0.1:1"]}, 400, "twice"),
    ({"workers": ["127.0.0.1:1"]}, 400, "workers"),
    ({**workers(1), "Version": "next"}, 400, "Version"),
]


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_garbage_is_a_4xx_that_says_what_is_wrong_and_changes_nothing(server, method):
    one = server()
    one.write("PUT", workers(2))
    wrong = []
    for body, status, told in GARBAGE:
        found, answer = one.write(method, body)
        version = one.request("GET")[1]["Version"]
        if not (found == status and told in answer["error"] and len(answer["error"]) < 600 and version == 0):
            wrong.append((str(body)[:80], found, answer, version))
    assert wrong == []


def test_a_document_that_is_too_long_is_a_413(server):
    one = server()
    assert one.write("PUT", b" " * 300_000)[0] == 413
    assert one.request("GET")[0] == 404


def test_other_methods_and_paths_are_refused_by_status(server):
    one = server()
    assert one.request("PATCH")[0] == 405
    assert one.request("GET", path="/other")[0] == 404


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_writing_needs_the_secret_and_reading_does_not(server, method):
    one = server()
    one.write("PUT", workers(1))
    assert one.request(method, workers(2))[0] == 401
    assert one.request(method, workers(2), Authorization="Basic abc")[0] == 401
    assert one.request(method, workers(2), Authorization="Bearer ")[0] == 401
    for wrong in ("wrong", SECRET + "0", SECRET[:-1], "\xe4"):
        assert one.write(method, workers(2), wrong)[0] == 403
    assert one.request("GET")[1]["Version"] == 0


def test_long_poll_answers_when_there_is_something_newer(server):
    one = server()
    one.write("PUT", workers(1))
    assert one.request("GET", query="?newer_than=-1")[1]["Version"] == 0
    assert one.request("GET", query="?newer_than=0&timeout=0.05")[0] == 304
    answers = []
    waiting = threading.Thread(target=lambda: answers.append(one.client().watch(0, 20)))
    waiting.start()
    one.write("PUT", workers(4))
    waiting.join(10)
    assert answers == [cluster(4, 1)]


@pytest.mark.parametrize("query", ["?newer_than=x", "?newer_than=0&timeout=nan", "?newer_than=0&timeout=long"])
def test_long_poll_with_nonsense_is_a_400(server, query):
    assert server().request("GET", query=query)[0] == 400


def test_first_cluster_may_come_from_a_file(server, tmp_path, start_module):
    (tmp_path / "first.json").write_text(json.dumps({**workers(2), "Version": 5}))
    assert server("-init", tmp_path / "first.json").request("GET")[1]["Version"] == 5
    (tmp_path / "bad.json").write_text("{}")
    program = start_module("ms_kungfu.config_server", "-init", tmp_path / "bad.json")
    program.assert_exit(2)
    assert "bad.json: Workers must be a list" in program.output


def test_secret_is_left_for_the_user_alone_and_taken_away_at_the_end(server, monkeypatch):
    one = server(secret=None)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(one.program.runtime_dir))
    path = Path(one.program.wait_for(r"the secret for writing is in (\S+)")[0][1])
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(path.parent).st_mode) == 0o700
    secret = read_secret(one.url)
    assert len(secret) == 64
    assert secret not in one.program.output
    assert one.write("PUT", workers(1), secret)[0] == 200
    one.program.signal(signal.SIGTERM)
    one.program.assert_exit(0)
    one.program.assert_gone(time.monotonic())


def test_after_a_kill_its_successor_takes_over_the_secret(server, start_module):
    one = server(secret=None)
    path = Path(one.program.wait_for(r"the secret for writing is in (\S+)")[0][1])
    secret = path.read_text()
    one.program.signal(signal.SIGKILL)
    one.program.assert_exit(-signal.SIGKILL)
    again = Server(start_module("ms_kungfu.config_server", "-port", one.port))
    assert again.write("PUT", workers(1), secret)[0] == 200


def test_config_server_ends_at_once_also_during_a_long_poll(server):
    one = server()

    def poll():
        with contextlib.suppress(http.client.RemoteDisconnected):
            one.request("GET", query="?newer_than=0&timeout=50")

    waiting = threading.Thread(target=poll, daemon=True)
    waiting.start()
    address = f"0100007F:{one.port:04X}"
    while not any(line.split()[1::2][:2] == [address, "01"] for line in Path("/proc/net/tcp").read_text().splitlines()):
        time.sleep(0.01)  # until it has accepted the connection
    begin = time.monotonic()
    one.program.signal(signal.SIGINT)
    one.program.assert_exit(0)
    assert time.monotonic() - begin < 25  # the poll takes 50
    waiting.join(10)


def test_client_that_hangs_up_before_100_continue_is_no_bug(server):
    server = server()
    head = b"PUT /config HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n"
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(head)
    assert server.request("GET")[0] == 404
    assert "rror" not in server.program.output


def test_a_taken_port_is_named(server, start_module):
    one = server()
    program = start_module("ms_kungfu.config_server", "-port", one.port)
    program.assert_exit(1)
    assert len(program.lines) == 1
    assert f"127.0.0.1:{one.port}" in program.lines[0]
    assert "use another -port, or 0" in program.lines[0]


def test_config_server_listens_on_loopback_only(server):
    one = server()
    hexadecimal = f"{one.port:04X}"
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
    assert [address for address in listening if address.endswith(hexadecimal)] == [f"0100007F:{hexadecimal}"]


def test_wrong_flags_are_one_sentence(start_module):
    for arguments, told in ((["-prt", "1"], "did you mean -port?"), (["x"], "takes flags only")):
        program = start_module("ms_kungfu.config_server", *arguments)
        program.assert_exit(2)
        assert len(program.lines) == 1
        assert told in program.lines[0]


# ---- the client ----


def test_client_ignores_proxies(server, monkeypatch):
    one = server()
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert one.client().put(cluster(1, 0)) == cluster(1, 0)
    assert one.client().get() == cluster(1, 0)


def test_client_raises_typed_errors_with_the_servers_words(server):
    one = server()
    assert one.client().get() is None
    one.client().put(cluster(2, 0))
    with pytest.raises(StaleVersionError, match="409 Version 0 is not the next version"):
        one.client().put(cluster(2, 0))
    with pytest.raises(ConfigServerError, match="403 this is not the secret"):
        open_store(one.url, "wrong").put(cluster(2, 1))
    with pytest.raises(ConfigServerError, match="401 writing needs"):
        open_store(one.url).put(cluster(2, 1))
    one.program.kill_all()
    with pytest.raises(StoreUnreachableError, match="refused"):
        one.client().get()


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:9100", "ftp://a/config", "http://", "http://a:b/config", "http://[::1/config"]
)
def test_a_store_is_refused_whose_url_is_none(url):
    with pytest.raises(ValueError, match="is not a URL like http://"):
        open_store(url)
