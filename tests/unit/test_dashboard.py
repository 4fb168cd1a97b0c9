"""The live page's server: which requests it serves, what a client gets, and that no client disturbs the job."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from ms_kungfu import job_events as e
from ms_kungfu._flags import UsageError
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import StaleVersionError
from ms_kungfu.config_server import connections
from ms_kungfu.launcher.agent.departure import Departure
from ms_kungfu.launcher.agent.segments import HostSegments
from ms_kungfu.launcher.commands import write_without
from ms_kungfu.launcher.controller.dashboard import JobDashboard
from ms_kungfu.launcher.dashboard import server as server_module
from ms_kungfu.launcher.dashboard.activity import Activity, RankFacts
from ms_kungfu.launcher.dashboard.history import History
from ms_kungfu.launcher.dashboard.metrics import JobMetrics
from ms_kungfu.launcher.dashboard.requests import CommandRefused, Evict, Refused, Resize, Stop, check_source
from ms_kungfu.launcher.options import parse_command_line
from ms_kungfu.launcher.wire import messages as m
from tests.event_loops import EventOfPython39
from tests.fed_dashboard import WAIT_S, FedDashboard, status

pytestmark = pytest.mark.timeout(60)
ROOT = Path(__file__).resolve().parents[2]


def began(time=1.0):
    return e.LogBegan(version=e.VERSION, job="a job", ms_kungfu="1", host="a", time=time)


def statistics(number, **values):
    return e.Statistics(**{"time": float(number), "step": number, "seconds": 1.0, "steps": 2, "samples": 8,
                           "committed": 0.5, "p50": 0.1, "p99": 0.2, **values})  # fmt: skip


def await_that(holds):
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# ---- security --------------------------------------------------------------------------------------------------------


@pytest.fixture
def dashboard():
    with FedDashboard() as fed:
        yield fed


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "10.0.0.1", "", "a b",
                                  "localhost:1@evil.example", "[::1", "2130706433"])  # fmt: skip
@pytest.mark.parametrize("path", ["/", "/events", "/metrics"])
def test_foreign_host_is_refused(dashboard, host, path):
    code, headers, text = dashboard.request("GET", path, Host=host)
    assert code in (400, 403)
    assert b"job" not in text


def test_own_names_of_a_host_are_served(dashboard):
    for host in ("127.0.0.1", "localhost", "LOCALHOST:9", "[::1]:9", "127.0.0.1:65000"):  # ports of a tunnel
        assert dashboard.request("GET", "/metrics", Host=host)[0] == 200


@pytest.mark.parametrize(
    ("host", "is_served"),
    [("10.0.0.1:80", True), ("10.9.9.9", True), ("node1", True), ("NODE1.cluster:80", True), ("node2", False),
     ("localhost", True), ("[fe80::1]", True)],
)  # fmt: skip
def test_server_on_a_network_has_its_names_and_any_address(host, is_served):
    def check():
        check_source({"Host": host}, "10.0.0.1", ("node1", "node1.cluster"), is_page=False)

    if is_served:
        check()
    else:
        with pytest.raises(Refused):
            check()


FOREIGN = [
    {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "https://127.0.0.1"},
    {"Origin": "http://127.0.0.1:1"}, {"Sec_Fetch_Site": "cross-site"}, {"Sec_Fetch_Site": "same-site"},
    {"Host": "evil.example", "Origin": "http://evil.example"},
]  # fmt: skip


@pytest.mark.parametrize("headers", FOREIGN)
def test_request_of_another_site_is_refused(dashboard, headers):
    assert dashboard.post("/resize", {"workers": 3}, **headers)[0] == 403
    assert dashboard.request("GET", "/events", **headers)[0] == 403
    assert dashboard.commands == []


def test_link_of_another_site_opens_the_page_only(tmp_path):
    (tmp_path / "page.html").write_text("<title>page</title>")
    (tmp_path / "page.js").write_text("'use strict'")
    with FedDashboard(files=tmp_path) as fed:
        assert fed.request("GET", "/", Sec_Fetch_Site="cross-site")[0] == 200
        assert fed.request("GET", "/page.js", Sec_Fetch_Site="cross-site")[0] == 403
        code, headers, text = fed.request("GET", "/page.js")
        assert (code, headers["Content-Type"], text) == (200, "text/javascript; charset=utf-8", b"'use strict'")
        assert fed.request("GET", "/page.css")[0] == 404


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer ", "Bearer x", "Basic {token}", "{token}",
                                   "Bearer {token}x", "Bearer \xff"])  # fmt: skip
def test_command_without_the_token_is_refused(dashboard, given):
    words = {"Content_Type": "application/json"}
    if given is not None:
        words["Authorization"] = given.format(token=dashboard.token)
    for path in ("/resize", "/evict", "/stop"):
        code, headers, _ = dashboard.request("POST", path, b"{}", **words)
        assert (code, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert dashboard.commands == []


def test_commands_reach_the_job(dashboard):
    own = f"http://127.0.0.1:{dashboard.server.port}"
    from_page = {"Origin": own, "Sec_Fetch_Site": "same-origin"}
    assert dashboard.post("/resize", {"workers": 3}, **from_page) == (
        202, {"accepted": True, "message": "accepted by the test"},
    )  # fmt: skip
    assert dashboard.post("/evict", {"rank": 2})[0] == 202
    assert dashboard.post("/evict", {"rank": 2, "peer": "a:10002"})[0] == 202
    assert dashboard.post("/stop", {})[0] == 202
    assert dashboard.commands == [Resize(3), Evict(2), Evict(2, "a:10002"), Stop()]
    dashboard.refusal = "it does not"
    assert dashboard.post("/stop", {}) == (409, {"error": "it does not"})


def test_command_is_logged_before_the_job_runs_it(dashboard, caplog):
    caplog.set_level(logging.INFO, "ms_kungfu")
    with dashboard.blocked():
        client = dashboard.command("/resize", {"workers": 3})
        await_that(lambda: caplog.messages)
        client.close()
        await_that(lambda: not dashboard.server._face.connections)
    assert caplog.messages == ['dashboard command: command=resize from=127.0.0.1 request={"workers":3}']


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/resize", b"", 400), ("/resize", b"{}", 400), ("/resize", b'{"workers": 0}', 400),
        ("/resize", b'{"workers": true}', 400), ("/resize", b'{"workers": 2.5}', 400),
        ("/resize", b'{"workers": 2, "x": 1}', 400), ("/resize", b"[" * 1000, 400), ("/resize", b"\xff", 400),
        ("/resize", b'{"workers": 1' + b" " * 2000 + b"}", 413), ("/resize", b'{"workers": 99999999}', 400),
        ("/evict", b'{"rank": -1}', 400), ("/evict", b"null", 400),
        ("/evict", b'{"rank": 1, "peer": 2}', 400),
        ("/evict", b'{"rank": 1, "peer": "a"}', 400), ("/stop", b"[]", 400), ("/stop", b'{"a":1}', 400),
    ],
)  # fmt: skip
def test_invalid_body_is_refused(dashboard, path, body, code):
    words = {"Authorization": f"Bearer {dashboard.token}"}
    assert dashboard.request("POST", path, body, Content_Type="application/json", **words)[0] == code
    assert dashboard.request("POST", path, b"{}", Content_Type="text/plain", **words)[0] == 415
    assert dashboard.commands == []


def test_every_answer_has_the_security_headers_and_no_cookie(dashboard):
    for method, path in (("GET", "/"), ("GET", "/nothing"), ("POST", "/stop"), ("GET", "/stop"), ("GET", "/metrics")):
        _, headers, _ = dashboard.request(method, path)
        assert "default-src 'none'; script-src 'self'" in headers["Content-Security-Policy"]
        assert "frame-ancestors 'none'" in headers["Content-Security-Policy"]
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert (headers["Referrer-Policy"], headers["Cache-Control"]) == ("no-referrer", "no-store")
        assert not {"Set-Cookie", "Access-Control-Allow-Origin"} & set(headers)


def test_blocked_job_is_reported_within_the_time_limit_of_a_connection(dashboard, monkeypatch):
    monkeypatch.setattr(connections, "_REQUEST_S", connections._REQUEST_S / 5)
    monkeypatch.setattr(server_module, "_STATUS_S", server_module._STATUS_S / 5)
    with dashboard.blocked():
        code, _, text = dashboard.request("GET", "/metrics")
    assert (code, "doesn't answer" in json.loads(text)["error"]) == (503, True)


def test_command_may_take_longer_than_other_requests(dashboard, monkeypatch):
    monkeypatch.setattr(connections, "_REQUEST_S", 0.9)
    monkeypatch.setattr(server_module, "_COMMAND_S", 1.0)
    with dashboard.blocked():
        code, answer = dashboard.post("/resize", {"workers": 3})
    assert (code, "doesn't answer" in answer["error"]) == (503, True)


# ---- streams ---------------------------------------------------------------------------------------------------------


def test_client_gets_past_and_coming_events(dashboard):
    dashboard.feed(began(), statistics(2))
    dashboard.sample(3.0, [{"state": "computing", "step": 7}], with_status=False)
    stream = dashboard.stream()
    hello, past, first, second = stream.take(4)
    assert hello[2] == {"job": "a job", "version": e.VERSION, "first": 1, "resumes": False}
    assert past == ("past", None, [{"time": 3.0, "ranks": [["computing", 7]]}])
    assert (first[1], first[2]["event"], second[1], second[2]["event"]) == (1, "log_began", 2, "statistics")
    dashboard.sample(4.0, [{"state": "waiting", "step": 8}])
    assert stream.take(1) == [
        ("now", None, {"time": 4.0, "ranks": [{"state": "waiting", "step": 8}], "status": dashboard.current})
    ]
    dashboard.feed(statistics(5))
    assert stream.take(1)[0][1] == 3


def test_client_after_a_pause_without_clients_gets_no_old_sample(dashboard, monkeypatch):
    monkeypatch.setattr(server_module, "_QUIET_S", 0.1)
    dashboard.sample(1.0, [{"state": "waiting", "step": 1}])
    first = dashboard.stream()
    assert [name for name, _, _ in first.take(3)] == ["hello", "past", "now"]
    first.close()
    dashboard.sample(2.0, [{"state": "computing", "step": 2}], with_status=False)  # no client is connected
    second = dashboard.stream()
    assert b"event: now\n" not in second.until_silence()
    dashboard.sample(3.0, [{"state": "computing", "step": 3}])
    ((name, _, now),) = second.take(1)
    assert (name, now["time"]) == ("now", 3.0)


def test_client_that_reconnects_gets_newer_events_only(dashboard):
    dashboard.feed(began(), *(statistics(number) for number in range(2, 6)))
    hello, _, first = dashboard.stream(Last_Event_ID="3").take(3)
    assert (hello[2]["resumes"], hello[2]["first"], first[1]) == (True, 4, 4)
    for unknown in ("99", "-1", "x", "1" * 30):
        hello, _, first = dashboard.stream(Last_Event_ID=unknown).take(3)
        assert (hello[2]["resumes"], hello[2]["first"], first[1]) == (False, 1, 1), unknown


def test_numbers_of_another_server_are_not_continued():
    with FedDashboard(first_event=1000) as fed:
        fed.feed(began())
        assert fed.stream(Last_Event_ID="5").take(1)[0][2]["resumes"] is False
        assert fed.stream(Last_Event_ID="1000").take(3)[2][1] == 1001


@pytest.mark.parametrize("text", ["a\nb", "a\r\n\r\ndata: {}", "</script><script>x()</script>", "a\u2028b",
                                  "\0\x1b[31m", "\ud800"])  # fmt: skip
def test_text_of_an_event_is_one_message(dashboard, text):
    dashboard.feed(e.JobStarted(workers=1, hosts=[text[:200]], command=text), began())
    _, _, first, second = dashboard.stream().take(4)
    assert first[2]["command"] == text.replace("\ud800", "?")
    assert second[2]["event"] == "log_began"


def test_last_events_are_sent_before_the_server_ends():
    with FedDashboard() as fed:
        stream = fed.stream()
        stream.take(2)
        fed.feed(began(), e.JobEnded(exit_code=0))
    assert [name for _, _, document in stream for name in [document["event"]]] == ["log_began", "job_ended"]


def test_silent_stream_stays_open_with_comments(dashboard, monkeypatch):
    monkeypatch.setattr(connections, "_REQUEST_S", 1.0)
    monkeypatch.setattr(server_module, "_QUIET_S", 0.1)
    stream = dashboard.stream()
    stream.take(2)
    for _ in range(15):  # 1.5 s
        assert set(stream.until_silence()) <= {b"\n"}
    dashboard.feed(began())
    assert stream.take(1)[0][2]["event"] == "log_began"


def test_kernel_buffers_little_for_a_client_and_drops_a_silent_one(dashboard):
    stream = dashboard.stream()
    stream.take(2)
    (connection,) = dashboard.server._face.connections
    served = connection.transport.get_extra_info("socket")
    with socket.socket() as limited:
        default = limited.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        limited.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, server_module._STREAM_BUFFER_BYTES)
        wanted = limited.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    assert wanted != default
    assert served.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == wanted
    assert served.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == server_module._UNANSWERED_MS


def test_slow_client_is_dropped(dashboard, monkeypatch):
    monkeypatch.setattr(server_module, "_WRITE_S", 0.2)
    slow = dashboard.stream()  # reads no more
    await_that(lambda: dashboard.server.num_streams == 1)
    event = e.RuntimeMessage(reason="x" * 4000)
    for _ in range(4000):  # more than the sockets hold
        dashboard.feed(event)
    await_that(lambda: dashboard.server.num_streams == 0)
    assert dashboard.stream().take(3)[2][1] == 1  # others are served
    slow.close()


class FullConnection:
    """A response to a client that reads nothing after the first pieces."""

    def __init__(self, most):
        self.pieces, self._most = [], most

    async def write(self, data):
        self.pieces.append(bytes(data))
        if sum(map(len, self.pieces)) > self._most:
            raise ConnectionError


def test_long_messages_are_written_in_short_pieces():
    ranks = [{"state": "computing", "step": 1_000_000 + rank} for rank in range(256)]

    async def main(response, events):
        face = server_module._Face(SimpleNamespace(first_event=0), asyncio.get_running_loop())
        face._news, face._stopped = asyncio.Event(), asyncio.Event()
        for second in range(600 - events):
            face.sample({"time": float(second), "ranks": ranks})
        for _ in range(events):
            face.add(e.RuntimeMessage(reason="x" * 10_000))
        with pytest.raises(ConnectionError):
            await face._stream(response, None)
        face._loop.close()

    for events in (0, 600):
        response = FullConnection(2_000_000)
        asyncio.run(main(response, events))
        assert max(map(len, response.pieces)) < 128 * 1024


def test_idle_clients_leave_connections_for_others(dashboard):
    streams = [dashboard.stream() for _ in range(dashboard.server.most_streams)]
    assert len(streams) >= 150
    assert {stream.status for stream in streams} == {200}
    assert dashboard.request("GET", "/events")[0] == 503
    silent = [socket.create_connection(("127.0.0.1", dashboard.server.port)) for _ in range(200)]
    assert dashboard.request("GET", "/metrics")[0] == 200
    assert dashboard.post("/resize", {"workers": 3})[0] == 202
    dashboard.feed(began())
    assert all(stream.take(3)[2][2]["event"] == "log_began" for stream in streams)
    for client in [*silent, *streams]:
        client.close()
    await_that(lambda: dashboard.server.num_streams == 0)
    assert dashboard.stream().status == 200


def test_connections_of_a_remote_address_are_limited():
    limit = server_module._limit_of
    assert (limit("127.0.0.1"), limit("::1"), limit("10.0.0.1")) == (None, None, server_module._MAX_OF_SOURCE)


# ---- the history -----------------------------------------------------------------------------------------------------


def test_history_is_bounded_and_keeps_sums():
    history = History(most=100)
    history.add(began())
    for number in range(1, 2001):
        history.add(statistics(number, loss=1 / number, waiting=0.25))
        history.add(
            e.RankStatistics(seconds=2.0, p50=[0.1, None], p99=[0.2, 0.3], computing=[0.5, 0.5], waiting=[0.0, 0.5],
                             data=[None, None], checkpoint=[None, None])
        )  # fmt: skip
        if number % 50 == 0:
            history.add(e.CheckpointWritten(path="p", seconds=1.0))
        assert len(history.items) <= 100
    kept = [item.event for item in history.items]
    sums = [each for each in kept if isinstance(each, e.Statistics)]
    assert sum(each.steps for each in sums) == 4000
    assert sum(each.samples for each in sums) == 16000
    assert sum(each.seconds for each in sums) == pytest.approx(2000)
    assert sum(each.committed for each in sums) == pytest.approx(1000)
    assert {each.waiting for each in sums} == {0.25}
    assert isinstance(kept[0], e.LogBegan)
    numbers = [item.number for item in history.items]
    assert numbers == sorted(numbers)
    assert numbers[-1] == history.last


def test_history_without_statistics_drops_the_oldest():
    history = History(most=100)
    history.add(began())
    for number in range(500):
        history.add(e.CheckpointWritten(path=str(number), seconds=1.0))
    kept = [item.event for item in history.items]
    assert len(kept) <= 100
    assert isinstance(kept[0], e.LogBegan)
    assert [each.path for each in kept[1:]] == [str(number) for number in range(501 - len(kept), 500)]


class PausedReader:
    """A response to a client that reads only while `goes_on` is set."""

    def __init__(self):
        self.goes_on, self.text = asyncio.Event(), b""

    async def write(self, data):
        await self.goes_on.wait()
        self.text += data


def test_client_of_a_thinned_history_gets_no_step_twice():
    async def main():
        face = server_module._Face(SimpleNamespace(first_event=0), asyncio.get_running_loop())
        face._news, face._stopped = asyncio.Event(), asyncio.Event()
        history = face._history = History(most=100)
        reader = PausedReader()
        task, lists = asyncio.ensure_future(face._stream(reader, None)), {id(history.items): history.items}
        for number in range(1, 1001):
            face.add(statistics(number))
            lists[id(history.items)] = history.items
            (reader.goes_on.clear if number % 30 < 25 else reader.goes_on.set)()
            for _ in range(10):
                await asyncio.sleep(0)
        reader.goes_on.set()
        face.stop()
        await task
        face._loop.close()
        assert len(lists) > 20
        assert history.knows(history.last)
        assert not history.knows(1)
        return reader.text.decode()

    text = asyncio.run(main())
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith('data: {"event"')]
    numbers = [int(number) for number in re.findall(r"^id: (\d+)$", text, re.MULTILINE)]
    assert sum(event["steps"] for event in events) == 2000
    assert numbers == sorted(set(numbers))
    assert (len(numbers), numbers[-1]) == (len(events), 1000)


# ---- metrics ---------------------------------------------------------------------------------------------------------


def metrics_of(text):
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:1] != "#"}


def example_of_metrics():
    metrics = JobMetrics()
    for event in (
        began(0.0), e.JobStarted(workers=2, hosts=["a"], command="c", time=0.0),
        statistics(1, loss=0.5), statistics(2), statistics(4, p50=0.3),
        e.WorkerFailed(decision="shrink", time=4.0), e.WorkerFailed(decision="shrink", standing="standby", time=4.0),
        e.VersionCommitted(version=1, workers=1, workers_before=2, seconds=1),
        e.StallEnded(seconds=3.0, rank=1),
        e.RankStatistics(seconds=2.0, p50=[0.1, 0.1], p99=[0.1, 0.1], computing=[0.1, 0.9], waiting=[0.8, None],
                         data=[None, None], checkpoint=[None, None]),
    ):  # fmt: skip
        metrics.add(event)
    return metrics.render(status(2, version=7))


def test_metrics_are_those_of_the_events_and_the_status():
    text, kind = example_of_metrics()
    found = metrics_of(text.decode())
    assert kind.startswith("text/plain")
    wanted = {
        "workers": 2, "version": 7, "steps_total": 6, "samples_total": 24, "goodput_ratio": 1.5 / 4, "loss": 0.5,
        'failures_total{decision="shrink"}': 1, 'failures_total{decision="replace"}': 0, "resizes_total": 1,
        "stalls_total": 1, "stalled_seconds_total": 3, 'step_seconds{quantile="0.5"}': 0.3,
        'step_seconds{quantile="0.99"}': 0.2, 'waiting_ratio{rank="0"}': 0.8,
    }  # fmt: skip
    assert {name: found[f"kungfu_job_{name}"] for name in wanted} == pytest.approx(wanted)
    assert 'kungfu_job_waiting_ratio{rank="1"}' not in found


def test_metrics_without_their_library_say_how_to_install_it(dashboard, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "prometheus_client", None)
    code, _, text = dashboard.request("GET", "/metrics")
    assert (code, "pip install" in text.decode()) == (501, True)


def test_each_metric_of_the_grafana_dashboard_exists():
    board = json.loads((ROOT / "examples" / "grafana" / "kungfu.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    asked = {name for query in queries for name in re.findall(r"\bkungfu_\w+", query)}
    existing = {name.partition("{")[0] for name in metrics_of(example_of_metrics()[0].decode())}
    assert asked
    assert asked == existing  # none is missing on the board either
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


# ---- what each rank does ---------------------------------------------------------------------------------------------


def report(collectives, data=0.0, checkpoint=0.0, seconds=1.0):
    return e.StepReport(step=5, seconds=seconds, ended=5, samples=0, committed=1.0, p50=0.1, p99=0.1,
                        collectives=collectives, data=data, checkpoint=checkpoint)  # fmt: skip


def doing(activity="", seconds=0.0, operations=""):
    return m.Doing(activity, seconds, operations)


@pytest.mark.parametrize(
    ("facts", "wanted"),
    [
        ({}, ("computing", "before its first step", [])),
        ({"step": 3}, ("computing", None, [])),
        ({"failed": "was killed", "sleeps": True}, ("failed", "was killed", [])),
        ({"joins": True, "note": "starts its program"}, ("joining", "starts its program", [])),
        ({"stopped": True, "step": 3}, ("unknown", "stopped by a signal", [])),
        ({"sleeps": True, "awaits": [1, 2], "doing": doing(operations="op")}, ("waiting", "op", [1, 2])),
        ({"sleeps": True, "doing": doing("evaluation", 9.0)}, ("reducing", None, [])),
        ({"doing": doing("data", 0.1)}, ("data", "data", [])),
        ({"doing": doing("evaluation", 0.1)}, ("computing", "evaluation", [])),
        ({"doing": doing("compilation")}, ("compiling", "compilation", [])),
        ({"doing": doing("checkpoint", 5.0), "report": report(0.9), "ended_ago_s": 0.5}, ("checkpoint",) * 2 + ([],)),
        ({"doing": doing("data", 0.1), "report": report(0.1), "ended_ago_s": 0.5, "step": 5}, ("computing", None, [])),
        ({"sleeps": True, "awaits": [1], "report": report(0.1), "ended_ago_s": 5.0, "step": 5}, ("waiting", None, [1])),
    ],
)  # fmt: skip
def test_state_of_a_rank_follows_from_what_is_known(facts, wanted):
    (found,) = Activity().sample(100.0, [RankFacts(0, PeerID("a", 10000), **facts)])
    assert (found["state"], found["operation"], found["waits_for"]) == wanted


def test_state_of_short_steps_is_where_the_time_went():
    facts = [
        RankFacts(0, PeerID("a", 10000), step=5, ended_ago_s=0.1, report=report(0.1, data=0.6)),
        RankFacts(1, PeerID("a", 10000), step=5, ended_ago_s=0.1, report=report(0.1, checkpoint=0.7)),
        RankFacts(2, PeerID("a", 10000), step=5, ended_ago_s=0.1, report=report(0.2)),
    ]
    assert [each["state"] for each in Activity().sample(0.0, facts)] == ["data", "checkpoint", "computing"]
    busy = [RankFacts(rank, PeerID("a", 10000), step=5, ended_ago_s=0.1, report=report(0.8)) for rank in range(2)]
    assert [each["state"] for each in Activity().sample(0.0, busy)] == ["reducing"] * 2


def test_rank_waits_for_the_one_that_waits_least():
    shares = (0.9, 0.1, 0.8)
    facts = [
        RankFacts(rank, PeerID("a", 10000), step=5, ended_ago_s=0.1, report=report(s)) for rank, s in enumerate(shares)
    ]
    found = Activity().sample(0.0, facts)
    assert [(each["state"], each["waits_for"]) for each in found] == [
        ("waiting", [1]), ("computing", []), ("waiting", [1]),
    ]  # fmt: skip


def test_sample_says_for_how_long_a_rank_is_in_its_state():
    activity = Activity()
    wait = RankFacts(0, PeerID("a", 10000), pid=1, sleeps=True, awaits=[1])
    assert [activity.sample(now, [wait])[0]["seconds"] for now in (10.0, 11.0, 12.5)] == [0.0, 1.0, 2.5]
    other = RankFacts(0, PeerID("a", 10000), pid=1, sleeps=True, awaits=[2])
    assert activity.sample(13.0, [other])[0]["seconds"] == 0.0
    slow = RankFacts(0, PeerID("a", 10000), pid=1, doing=doing("data", 4.0))
    assert activity.sample(14.0, [slow])[0]["seconds"] == 4.0
    steps = [
        activity.sample(20.0 + second, [RankFacts(0, PeerID("a", 10000), pid=1, step=second // 2)])[0]
        for second in range(4)
    ]
    assert [each["seconds"] for each in steps] == [0.0, 1.0, 0.0, 1.0]


class FakeSegment:
    def ranks(self):
        return [3]

    def doing(self, rank):
        return doing("data", 1.5)

    def close(self):
        pass


def test_host_reports_activity_only_while_it_is_watched(monkeypatch):
    async def main():
        sent = []
        machine = SimpleNamespace(resident_bytes={10: 4096, 11: None}.get)
        transports = SimpleNamespace(machine=machine)
        segments = HostSegments(transports, sent.append, 1.0, lambda: {7: 10, 8: 11}, lambda: ([], ()), 1)
        segments.open[2] = FakeSegment()
        monkeypatch.setattr("ms_kungfu.launcher.agent.segments._ACTIVITY_S", 0.0)
        segments.watch_activity(m.WatchActivity(True))
        segments.watch_activity(m.WatchActivity(True))
        assert sent == [m.Activity({2: {3: doing("data", 1.5)}}, {7: 4096})]
        while len(sent) < 3:
            await asyncio.sleep(0)
        segments.watch_activity(m.WatchActivity(False))
        for _ in range(5):
            await asyncio.sleep(0)
        assert len(sent) == 3
        segments.close()

    asyncio.run(main())


# ---- the job's side --------------------------------------------------------------------------------------------------


def job(**facts):
    options = SimpleNamespace(watch=facts.get("watch", True), grace_period_s=30.0)
    begun = SimpleNamespace(url=facts.get("url"), secret="")
    return SimpleNamespace(
        options=options, begun=begun, has_begun=facts.get("has_begun", True),
        course=SimpleNamespace(is_over=facts.get("is_over", False)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("facts", "command", "reason"),
    [
        ({"watch": False}, Resize(2), "without -w"),
        ({"watch": False}, Evict(1), "without -w"),
        ({"has_begun": False}, Resize(2), "hasn't begun"),
        ({"is_over": True}, Stop(), "already ending"),
    ],
)
def test_job_refuses_a_command_it_cannot_follow(facts, command, reason):
    dashboard = JobDashboard(job(**facts), dict, lambda: None)
    with pytest.raises(CommandRefused, match=reason):
        asyncio.run(dashboard.obey(command))


class Controller:
    moves = True
    has_stepped_down = False

    def __init__(self):
        self.seen = []

    def interrupted(self, *words):
        self.seen.append(words)


def test_stop_of_the_dashboard_is_repeated_to_the_next_controller():
    async def main():
        controller, sent = Controller(), []
        options = SimpleNamespace(grace_period_s=30.0, host=SimpleNamespace(name="a"))
        own = SimpleNamespace(controller=controller)
        departure = Departure(options, own, sent.append, lambda *words: None, lambda: False, lambda: 0.0)
        dashboard = JobDashboard(job(watch=False), dict, departure.stop_job)
        assert "30 s" in await dashboard.obey(Stop())
        assert (controller.seen, sent) == ([(15, " from the dashboard")], [])
        own.controller = None  # it has stepped down
        departure.tell_again()
        assert sent == [m.Interrupted(15)]

    asyncio.run(main())


class ChangingStore:
    """A cluster store to which another client writes before the first `put`."""

    url = "http://127.0.0.1:9/config"

    def __init__(self, size, change):
        self.cluster = Cluster(tuple(PeerID("a", 10000 + rank) for rank in range(size)), version=5)
        self._change = change

    def get(self):
        return self.cluster

    def put(self, wanted):
        change, self._change = self._change, None
        if change is not None:
            self.cluster = change(self.cluster)
            raise StaleVersionError
        self.cluster = wanted
        return wanted


@pytest.mark.parametrize("peer", ["", "a:10003"])
def test_evicted_worker_stays_the_same_if_ranks_shift(peer):
    store = ChangingStore(5, lambda cluster: cluster.without([cluster.workers[1]]))
    assert "without a:10003" in write_without(store, 3, peer)
    assert (store.cluster.version, [each.port for each in store.cluster.workers]) == (7, [10000, 10002, 10004])


def test_evicted_worker_that_left_meanwhile_changes_nothing():
    store = ChangingStore(5, lambda cluster: cluster.without([cluster.workers[3]]))
    assert write_without(store, 3) == "nothing to do: worker a:10003 has left before cluster version 6"
    assert (store.cluster.version, store.cluster.size) == (6, 4)


def test_eviction_of_another_worker_than_shown_is_refused():
    store = ChangingStore(5, None)
    with pytest.raises(ValueError, match="rank 3 is worker a:10003 in cluster version 5, not a:10002"):
        write_without(store, 3, "a:10002")
    assert store.cluster.version == 5


def sampled(server, describe):
    """Return a `JobDashboard` that has taken its first sample."""
    loop = SimpleNamespace(time=lambda: 0.0, call_later=lambda *words: "the next sample")
    context = SimpleNamespace(remote=None, manager=None, loop=loop, machine=SimpleNamespace(time=lambda: 5.0))
    dashboard = JobDashboard(context, describe, lambda: None, _server=server)
    dashboard._activity = Activity()
    dashboard._sample()
    return dashboard


def test_failed_sample_costs_one_line_and_leaves_no_old_sample(caplog):
    samples = []
    server = SimpleNamespace(has_clients=True, sample=samples.append)
    assert sampled(server, lambda: {"state": "running"})._timer == "the next sample"
    assert sampled(server, lambda: 1 // 0)._timer is None
    assert samples == [{"time": 5.0, "ranks": [], "status": {"state": "running"}}, {"time": 5.0, "ranks": []}]
    (line,) = caplog.messages
    assert line.startswith('internal error: where=dashboard error="ZeroDivisionError')


def test_failed_server_costs_one_line(caplog):
    caplog.set_level(logging.INFO, "ms_kungfu")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = server_module.DashboardServer(SimpleNamespace(), port=taken.getsockname()[1])

        async def main():
            server.start()
            server.add(began())
            await asyncio.get_running_loop().run_in_executor(None, server._thread.join)
            server.add(began())
            server.sample({"time": 1.0, "ranks": []})
            await server.stop()

        asyncio.run(main())
    assert [re.sub(r":\d+", "", line) for line in caplog.messages] == [
        'dashboard failed: address=127.0.0.1 error="Address already in use". The job goes on without it'
    ]


def test_server_without_a_thread_leaves_nothing_open(monkeypatch):
    async def main():
        made = asyncio.new_event_loop()
        monkeypatch.setattr(asyncio, "new_event_loop", lambda: made)
        monkeypatch.setattr(threading.Thread, "start", fail)
        server = server_module.DashboardServer(SimpleNamespace())
        with pytest.raises(RuntimeError, match="no thread"):
            server.start()
        await server.stop()
        assert made.is_closed()

    def fail(thread):
        raise RuntimeError("no thread")

    asyncio.run(main())


def test_server_makes_its_events_in_its_own_loop(monkeypatch):
    monkeypatch.setattr(asyncio, "Event", EventOfPython39)
    with FedDashboard() as fed:
        face = fed.server._face
        assert (face._news.made_in, face._stopped.made_in) == (face._loop, face._loop)


def test_server_that_stops_for_an_error_logs_it(monkeypatch, caplog):
    class BrokenEvent(asyncio.Event):
        async def wait(self):
            raise RuntimeError("broken")

    monkeypatch.setattr(asyncio, "Event", BrokenEvent)
    with FedDashboard() as fed:
        fed.server._thread.join(WAIT_S)
    assert 'error="broken"' in caplog.text


def test_server_that_fails_without_an_error_number_logs_it(monkeypatch, caplog):
    def fail(server):
        raise OSError("no sockets here")

    monkeypatch.setattr(server_module.DashboardServer, "bind", fail)

    async def main():
        server = server_module.DashboardServer(SimpleNamespace())
        server.start()
        await asyncio.get_running_loop().run_in_executor(None, server._thread.join, WAIT_S)

    asyncio.run(main())
    assert [record.getMessage() for record in caplog.records] == [
        'dashboard failed: address=127.0.0.1:0 error="no sockets here". The job goes on without it'
    ]


def test_address_that_is_not_loopback_is_warned_of(caplog):
    caplog.set_level(logging.INFO, "ms_kungfu")
    with FedDashboard(host="0.0.0.0") as fed:
        url, warning = caplog.records
        assert re.fullmatch(rf"dashboard: url=http://0.0.0.0:\d+/#token={fed.token}", url.getMessage())
        assert (warning.levelname, "isn't encrypted" in warning.getMessage()) == ("WARNING", True)
    caplog.clear()
    with FedDashboard() as fed:
        assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], None), (["-dashboard"], "127.0.0.1:0"), (["-dashboard", "0.0.0.0:8000"], "0.0.0.0:8000"),
        (["-dashboard=:8000"], "127.0.0.1:8000"), (["--dashboard", "[::1]:80"], "[::1]:80"),
        (["-dashboard", "-q"], "127.0.0.1:0"),
    ],
)  # fmt: skip
def test_flag_has_an_optional_address(words, wanted):
    assert parse_command_line([*words, "python", "-c", "0"]).dashboard == wanted


@pytest.mark.parametrize("value", ["8000", "a:b", "a:99999", "a b:1", "::1:80"])
def test_address_that_cannot_be_read_is_refused(value):
    with pytest.raises(UsageError, match="127.0.0.1:8080"):
        parse_command_line([f"-dashboard={value}", "python", "-c", "0"])
