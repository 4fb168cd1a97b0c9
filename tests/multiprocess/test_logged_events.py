"""The event log of real jobs: a killed and a stopped worker, and the summary at the end."""

import json
import os
import signal
import time

import pytest
from launching import ONE_FOLDER, ROOT

from ms_kungfu.job_events import FILE_NAME

pytestmark = pytest.mark.timeout(240)


def events_in(logdir):
    return [json.loads(line) for line in (logdir / FILE_NAME).read_text().splitlines()]


def until(logdir, event):
    deadline = time.monotonic() + 60
    while not (found := [each for each in events_in(logdir) if each["event"] == event]):
        assert time.monotonic() < deadline, events_in(logdir)
        time.sleep(0.05)
    return found


@pytest.fixture
def trains(start_module):
    """Waits until the launcher knows a step of each rank of a job."""

    def wait(one):
        environment = {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(one.program.runtime_dir)}
        deadline = time.monotonic() + 60
        while True:
            command = start_module(ONE_FOLDER, "status", "--json", environment=environment)
            told = json.loads("\n".join(command.stdout)) if command.wait() == 0 else []
            if told and "processes" in told[0] and all(each["step"] for each in told[0]["processes"]):
                return
            assert time.monotonic() < deadline, told

    return wait


def test_log_summary_and_story_of_a_job_with_a_killed_worker(job, trains, start_module, tmp_path):
    logdir = tmp_path / "logs"
    one = job("-np", 3, "-logdir", logdir)
    pids = one.in_version(0, 3)
    trains(one)
    os.kill(pids.pop(1), signal.SIGKILL)
    one.in_version(1, 2)
    assert one.finish(2) == set(pids.values())
    events = events_in(logdir)
    kinds = [event["event"] for event in events]
    assert kinds[:2] == ["log_began", "job_started"]
    assert kinds[-1] == "job_ended"
    assert (kinds.count("worker_started"), kinds.count("worker_registered")) == (3, 3)
    (failed,) = (event for event in events if event["event"] == "worker_failed")
    assert (failed["rank"], failed["signal"], failed["decision"]) == (1, 9, "shrink")
    assert failed["step"] > 0
    (committed,) = (event for event in events if event["event"] == "version_committed")
    assert (committed["version"], committed["workers_before"], committed["workers"]) == (1, 3, 2)
    assert committed["step"] >= failed["step"]
    assert all(event["time"] <= after["time"] for event, after in zip(events, events[1:]))
    summary = [line.partition("summary: ")[2] for line in one.program.output.splitlines() if "summary: " in line]
    assert 3 <= len(summary) <= 12
    assert summary[-1] == f"logs={logdir}"
    assert any(line.startswith("failed rank=1 step=") for line in summary), summary
    page = (logdir / "report.html").read_text()
    assert page.count('"event":"') == len(events)
    (logdir / "report.html").unlink()
    assert start_module(ONE_FOLDER, "report", logdir, environment={"PYTHONPATH": str(ROOT)}).wait() == 0
    assert (logdir / "report.html").read_text() == page
    command = start_module(ONE_FOLDER, "explain", "--json", logdir, environment={"PYTHONPATH": str(ROOT)})
    assert command.wait() == 0
    story = json.loads("\n".join(command.stdout))
    assert [chapter["kind"] for chapter in story] == ["job", "failure", "resize", "job"]
    assert (story[1]["rank"], story[1]["cause"]) == (1, "was killed by SIGKILL")


def test_stopped_worker_is_a_stall_until_it_goes_on(job, trains, tmp_path):
    one = job("-np", 2, "-logdir", tmp_path)
    pids = one.in_version(0, 2)
    trains(one)
    os.kill(pids[1], signal.SIGSTOP)
    (began,) = until(tmp_path, "stall_began")
    assert (began["rank"], began["waiting"], began["reason"]) == (1, [0], "stopped by a signal")
    assert began["step"] > 0
    os.kill(pids[1], signal.SIGCONT)
    (ended,) = until(tmp_path, "stall_ended")
    assert ended["rank"] == 1
    assert ended["seconds"] >= 2.0
    one.finish(2)


def test_file_that_cannot_be_written_stops_no_job(job, tmp_path):
    (tmp_path / FILE_NAME).mkdir()
    one = job("-np", 2, "-logdir", tmp_path)
    pids = one.in_version(0, 2)
    assert one.finish(2) == set(pids.values())
    assert one.program.output.count("event log failed: ") == 1


def test_quiet_job_has_no_summary(job):
    one = job("-np", 1, "-q")
    one.in_version(0, 1)
    one.finish(1)
    assert "summary: " not in one.program.output
