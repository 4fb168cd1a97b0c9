"""`kungfu-run -dashboard`: a client follows a job with two workers, and changes it."""

import json
import signal

import pytest

from tests.fed_dashboard import Stream, request

pytestmark = pytest.mark.timeout(240)


class Client:
    """A client of a job's dashboard that reads the stream."""

    def __init__(self, job):
        found = job.wait_for(r"dashboard: url=http://127\.0\.0\.1:(\d+)/#token=(\S+)")[0]
        self.port, self.token = int(found[1]), found[2]
        self._messages = iter(Stream(self.port, {}))

    def await_message(self, holds):
        """Return the next message for which `holds(event, document)`."""
        return next(document for event, _, document in self._messages if holds(event, document))

    def await_event(self, name):
        return self.await_message(lambda event, document: event == "" and document["event"] == name)

    def await_ranks(self, holds):
        return self.await_message(lambda event, document: event == "now" and holds(document["ranks"]))

    def post(self, path, body, token=None):
        words = {"Authorization": f"Bearer {self.token if token is None else token}"}
        code, _, text = request(
            self.port, "POST", path, json.dumps(body).encode(), Content_Type="application/json", **words
        )
        return code, json.loads(text)


def test_client_sees_a_stall_and_resizes_the_job(job, tmp_path):
    gate = tmp_path / "gate"
    run = job("-np", 2, "-dashboard", program=[f"loop=5:1:{gate}"])
    pids = run.in_version(0, 2)
    client = Client(run)
    assert client.await_event("job_started")["workers"] == 2

    def stalls(ranks):
        return [each["state"] for each in ranks] == ["waiting", "computing"] and all(each["memory"] for each in ranks)

    now = client.await_ranks(stalls)
    assert {each["rank"]: each["pid"] for each in now["ranks"]} == pids
    assert [each["peer"] for each in now["ranks"]] == ["127.0.0.1:10000", "127.0.0.1:10001"]
    waiting, awaited = now["ranks"]
    assert (waiting["waits_for"], awaited["waits_for"]) == ([1], [])
    assert (awaited["operation"], awaited["step"], awaited["host"]) == ("evaluation", 5, "127.0.0.1")
    assert now["status"]["cluster"] == {"version": 0, "size": 2}
    gate.touch()

    for path, body in (("/resize", {"workers": 3}), ("/evict", {"rank": 1}), ("/stop", {})):
        assert client.post(path, body, token="guessed")[0] == 401
    assert client.post("/evict", {"rank": 7}) == (409, {"error": "there is no rank 7: cluster version 0 has 2 workers"})
    assert client.post("/resize", {"workers": 3})[0] == 202
    assert client.await_event("version_committed")["workers"] == 3
    there = run.in_version(1, 3)
    assert client.await_ranks(lambda ranks: len(ranks) == 3 and all(each["step"] for each in ranks))

    code, answer = client.post("/evict", {"rank": 1, "peer": "127.0.0.1:10000"})
    assert (code, "rank 1 is worker 127.0.0.1:10001" in answer["error"]) == (409, True)
    assert client.post("/evict", {"rank": 0, "peer": "127.0.0.1:10000"})[0] == 202
    assert client.await_event("version_committed")["workers"] == 2
    assert set(run.in_version(2, 2).values()) == set(there.values()) - {there[0]}
    assert b"kungfu_job_resizes_total 2.0" in request(client.port, "GET", "/metrics")[2]
    run.finish(2)
    assert client.await_event("job_ended")["exit_code"] == 0


def test_stop_ends_the_job_and_a_job_without_w_refuses_changes(job):
    run = job("-np", 2, "-dashboard", watch=False)
    run.in_version(0, 2)
    client = Client(run)
    code, answer = client.post("/resize", {"workers": 1})
    assert (code, "without -w" in answer["error"]) == (409, True)
    assert client.post("/stop", {})[0] == 202
    assert "interrupted by SIGTERM from the dashboard" in client.await_event("job_ended")["reason"]
    run.program.assert_exit(128 + signal.SIGTERM)
