"""What the page computes from the events of simulated jobs is what `kungfu-run explain` and the summary say."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("greenlet", reason="the simulator's threads are greenlets: pip install ms-kungfu[test]")
pytest.importorskip("mindspore", reason="MindSpore is not installed")

from msgspec.structs import asdict

from ms_kungfu import job_events as e
from ms_kungfu.launcher.dashboard.report import write_report
from ms_kungfu.launcher.explain_command import events_in
from ms_kungfu.launcher.state.account import JobAccount, spell
from ms_kungfu.launcher.state.story import story_of
from tests.fault.stories import SCRIPTS, drawn, play

pytestmark = pytest.mark.browser

COMPUTE = """([events, totals]) => {
    const job = new Job();
    for (const event of events) job.feed(event);
    const account = Object.fromEntries(["sizes", ...totals].map((name) => [name, job.account[name]]));
    return {story: job.story.chapters(), account};
}"""
TOTALS = [
    "steps", "samples", "committed_s", "measured_s", "loss", "failures", "stalls", "stalled_s", "seconds", "goodput",
]  # fmt: skip


@pytest.fixture(scope="module")
def page(chromium, tmp_path_factory):
    """Return a report, in which the functions of model.js can be called."""
    folder = tmp_path_factory.mktemp("model")
    (folder / e.FILE_NAME).write_bytes(b'{"event":"log_began","time":1.0,"version":1,"job":"j","ms_kungfu":"0"}\n')
    write_report([folder / e.FILE_NAME], folder / "report.html")
    page = chromium.new_page()
    page.goto((folder / "report.html").as_uri())
    yield page
    page.close()


@pytest.fixture
def compute(page):
    """Return what model.js computes from the lines of a log."""
    return lambda lines: page.evaluate(COMPUTE, [[json.loads(line) for line in lines], TOTALS])


def check(compute, lines):
    events, unread = events_in(lines)
    assert unread == 0
    account = JobAccount()
    for event in events:
        account.add(event)
    found = compute(lines)
    assert found["story"] == [asdict(chapter) for chapter in story_of(events)]
    expected = {name: getattr(account, name) for name in TOTALS}
    assert found["account"] == {**expected, "sizes": [list(each) for each in account.sizes]}
    return found


@pytest.mark.parametrize("name", SCRIPTS)
def test_page_says_of_a_simulated_job_what_explain_says(name, compute):
    world, _ = play(SCRIPTS[name])
    assert len(check(compute, world.event_lines)["story"]) >= 2


def test_page_says_of_300_drawn_jobs_what_explain_says(compute):
    for seed in range(300):
        world, _ = play(drawn(seed))
        assert len(check(compute, world.event_lines)["story"]) >= 2, seed


def statistics(waiting, data=(0.0, 0.0, 0.0), seconds=3.0):
    more = {name: [0.1] * 3 for name in ("p50", "p99", "computing", "checkpoint")}
    return {"event": "rank_statistics", "seconds": seconds, "waiting": waiting, "data": list(data), **more}


def test_page_says_of_rare_events_what_explain_says(compute):
    """Events that no simulated job has, and chapters that the next event decides on."""
    late = [0.5, 0.01, 0.6]
    events = [
        {"event": "log_began", "version": 1, "job": "j", "ms_kungfu": "0"},
        {"event": "job_started", "workers": 3, "hosts": ["a", "b"], "command": "x"},
        *[{"event": "statistics", "seconds": 1.0, "steps": 3, "samples": 96, "committed": 0.9, "step": 3 * n}
          for n in range(1, 4)],
        *[statistics(late, (0.0, 0.4, 0.0)) for _ in range(5)],
        {"event": "version_committed", "version": 0, "workers": 3, "workers_before": 3, "seconds": 0.1, "step": 5},
        *[statistics(late, (0.0, 0.4, 0.0)) for _ in range(4)],
        statistics([0.0, 0.0, 0.0]),
        *[statistics(late, (0.0, 0.0, 0.0), 7.0) for _ in range(20)],
        {"event": "stall_began", "rank": 1, "waiting": [0], "seconds": 2.5, "step": 9},
        {"event": "runtime_message", "rank": 0, "reason": "all_reduce waits for rank 1"},
        {"event": "stall_ended", "rank": 1, "seconds": 62.5},
        {"event": "step_delayed", "step": 10, "seconds": 60.5},
        {"event": "stall_began", "rank": 0, "waiting": [1], "seconds": 2.5, "step": 10},
        {"event": "stall_ended", "rank": 0, "seconds": 19.0}, {"event": "step_delayed", "step": 11, "seconds": 2.0},
        {"event": "stall_began", "rank": 2, "waiting": [0, 1], "seconds": 2.0, "reason": "stopped by a signal"},
        {"event": "statistics", "seconds": 0.001, "steps": 1, "loss": "nan"},
        {"event": "step_delayed", "step": 12, "seconds": 2.25},
        {"event": "step_delayed", "step": 13, "seconds": 3.5, "reason": "MindSpore compiled for 3.4 s"},
        {"event": "leader_changed", "host": "b", "before": "a"},
        {"event": "stall_began", "rank": 2, "waiting": [0], "seconds": 2.0},
        {"event": "stall_ended", "rank": 2, "seconds": 7.0},
        {"event": "runtime_message", "rank": 0, "reason": "all_reduce waited for rank 2"},
        {"event": "worker_failed", "rank": 2, "host": "b", "exit_code": 1, "reason": "exited", "decision": "replace"},
        {"event": "worker_failed", "host": "b", "signal": 9, "reason": "was killed", "standing": "standby"},
        {"event": "worker_failed", "rank": 1, "host": "b", "signal": 9, "reason": "was killed by SIGKILL", "step": 11},
        {"event": "failure_seen", "rank": 1, "step": 12, "seconds": 0.5, "survivors": [0, 2, 3, 4, 5, 7]},
        {"event": "worker_failed", "signal": 9, "reason": "was killed by SIGKILL", "standing": "standby"},
        {"event": "step_undone", "step": 12, "reason": "rank 1 failed"},
        {"event": "resize_requested", "version": 1, "workers": 2, "workers_before": 3, "by": "client", "reason": "r"},
        {"event": "resize_requested", "version": 2, "workers": 1, "workers_before": 3, "by": "client", "reason": "r"},
        {"event": "version_committed", "version": 2, "workers": 1, "workers_before": 3, "seconds": 1.2e-5, "step": 13},
        {"event": "resized", "version": 2, "workers": 1, "workers_before": 3, "seconds": 3725.0},
        {"event": "resize_rejected", "version": 3, "workers": 5, "reason": "too many"},
        {"event": "worker_draining", "rank": 0, "peer": "a:1", "reason": "it got a SIGTERM"},
        {"event": "host_joined", "host": "c", "slots": 2}, {"event": "host_draining", "host": "c"},
        {"event": "host_left", "host": "c"},
        {"event": "hosts_disconnected", "host": "a", "other": "b", "reason": "cut"},
        {"event": "store_lost", "reason": "refused"}, {"event": "store_restored"},
        {"event": "store_lost", "reason": "again"}, {"event": "store_lost", "reason": "after a takeover"},
        {"event": "checkpoint_failed", "step": 20, "rank": 0, "reason": "No space left on device"},
        {"event": "resumed", "path": "/c"}, {"event": "evaluated", "seconds": 0.5},
        {"event": "evaluated", "seconds": 12.5},
        {"event": "policy_decided", "step": 20, "changes": "size=3", "reason": "it is time"},
        {"event": "leader_changed", "host": "b", "before": "a"}, {"event": "leader_lost", "host": "b", "reason": "cut"},
        {"event": "job_ended", "exit_code": 1, "reason": "rank 0 failed"},
    ]  # fmt: skip
    timed = [{**event, "time": 1_700_000_000.0 + 3.125 * place} for place, event in enumerate(events)]
    found = check(compute, [json.dumps(event).encode() for event in timed])
    assert {chapter["kind"] for chapter in found["story"]} >= {
        "job", "failure", "resize", "stall", "straggler", "host", "store", "checkpoint", "evaluation", "policy",
        "controller",
    }  # fmt: skip


def test_only_rank_left_after_a_change_has_its_shares_of_time(page):
    """A job with one worker logs no `rank_statistics`."""
    events = [
        {"event": "job_started", "time": 0.0, "workers": 2, "hosts": ["a"], "command": "x"},
        {"event": "statistics", "time": 1.0, "seconds": 1.0, "steps": 1, "p50": 0.4, "computing": 0.7, "waiting": 0.0},
        {"event": "version_committed", "time": 1.5, "version": 1, "workers": 1, "workers_before": 2, "seconds": 0.1},
        {"event": "statistics", "time": 2.0, "seconds": 1.0, "steps": 1, "p50": 0.4, "computing": 0.7, "waiting": 0.0},
    ]
    compute = (
        "(events) => { const job = new Job(); for (const event of events) job.feed(event); return job.rankPoints; }"
    )
    (only,) = page.evaluate(compute, events)
    assert (only["time"], only["seconds"], only["computing"], only["data"]) == (2.0, 0.5, [0.7], [None])


def test_page_spells_durations_as_explain_does(page):
    seconds = [0.25, 59.94, 59.95, 59.96, 60.5, 61.5, 119.4, 119.5, 119.7, 3599.4, 3599.5, 3599.7, 7199.4, 7199.7]
    assert page.evaluate("(seconds) => seconds.map(spell)", seconds) == [spell(each) for each in seconds]
