"""The lines that tell of a training's changes."""

import logging
from types import SimpleNamespace

import pytest

from ms_kungfu import membership
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.elastic import event_log, program
from ms_kungfu.membership import Change
from ms_kungfu.membership.member import EndedSteps


@pytest.fixture
def lines(monkeypatch, caplog):
    """What is told; a cluster of one."""
    caplog.set_level(logging.INFO, "ms_kungfu")
    monkeypatch.setattr(program.current(), "told", program.Told(at_exit=True))
    cluster(monkeypatch, size=1)

    def take():
        found = caplog.messages[:]
        caplog.clear()
        return found

    return take


def cluster(monkeypatch, *, size, version=0, lost=(), speaks=True):
    monkeypatch.setattr(membership, "size", lambda: size)
    monkeypatch.setattr(membership, "cluster_version", lambda: version)
    monkeypatch.setattr(membership, "lost_ranks", lambda: list(lost))
    monkeypatch.setattr(membership, "peer_of", lambda rank: f"host:{rank}")
    monkeypatch.setattr(membership, "speaks_for_all", lambda: speaks)


def test_reached_size_is_logged_when_requested_and_when_reached(lines, monkeypatch):
    event_log.scheduled(20, 3, wait=False)
    assert lines() == ["resize requested: 1 -> 3 workers step=20 reason=schedule wait=False"]
    cluster(monkeypatch, size=3, version=1)
    event_log.changed(45, Change(True, False, 1, 3))
    assert lines() == ["resize: 1 -> 3 workers version=1 step=45 reason=schedule"]
    event_log._at_exit()
    assert lines() == []


@pytest.mark.parametrize("speaks", [True, False])
def test_deferred_version_is_logged_once_by_the_lowest_rank(lines, monkeypatch, speaks):
    cluster(monkeypatch, size=1, version=1, speaks=speaks)
    announced = [1]
    core = SimpleNamespace(announced_version=lambda: announced[0])
    monkeypatch.setattr(membership, "current", lambda: SimpleNamespace(core=core))
    event_log.deferred(6, "the pass ends")
    assert lines() == []
    for version in (2, 2, 3):
        announced[0] = version
        event_log.deferred(5 + version, "the pass ends")
    told = [f'resize deferred: version={version} step={5 + version} until="the pass ends"' for version in (2, 3)]
    assert lines() == (told if speaks else [])


def test_size_that_was_never_reached_is_logged_at_the_end_with_the_remedy(lines):
    event_log.scheduled(20, 3, wait=False)
    lines()
    event_log._at_exit()
    (line,) = lines()
    assert line.startswith("resize missed: workers=3 step=20 ")
    assert "wait=True" in line


def test_size_superseded_by_another_is_logged_then(lines):
    event_log.scheduled(20, 3, wait=True)
    assert lines() == ["resize requested: 1 -> 3 workers step=20 reason=schedule wait=True"]
    event_log.scheduled(30, 1, wait=True)
    assert lines() == ['resize missed: workers=3 step=20 reason="the entry of step 30 was due first"']
    event_log._at_exit()
    assert lines() == []


def test_one_worker_speaks_of_the_schedule(lines, monkeypatch):
    cluster(monkeypatch, size=1, speaks=False)
    event_log.scheduled(20, 3, wait=False)
    event_log._at_exit()
    assert lines() == []


def test_failure_is_logged_once_as_the_reason_of_the_next_change(lines, monkeypatch):
    cluster(monkeypatch, size=4, version=2, lost=[1])
    event_log.deaths(7, 0.0)
    event_log.deaths(8, 0.0)
    assert lines() == ["rank failed: rank=1 peer=host:1 step=7"]
    cluster(monkeypatch, size=4, version=2, lost=[1, 3])
    event_log.deaths(9, 0.0)
    assert lines() == ["rank failed: rank=3 peer=host:3 step=9"]
    cluster(monkeypatch, size=2, version=3)
    event_log.changed(9, Change(True, False, 4, 2, (1, 3)))
    assert lines() == ["resize: 4 -> 2 workers version=3 step=9 reason=failed ranks=1,3"]


def test_failed_worker_in_the_new_version_is_logged_once_and_when_removed(lines, monkeypatch):
    cluster(monkeypatch, size=3, lost=[0, 1])
    event_log.deaths(2, 0.0)
    assert len(lines()) == 2
    cluster(monkeypatch, size=2, version=1, lost=[0])
    monkeypatch.setattr(membership, "peer_of", lambda rank: f"host:{rank + 1}")
    event_log.changed(2, Change(True, False, 3, 2, (0, 1)))
    assert lines() == ["resize: 3 -> 2 workers version=1 step=2 reason=failed ranks=0"]
    event_log.deaths(3, 0.0)
    assert lines() == []
    cluster(monkeypatch, size=1, version=2)
    monkeypatch.setattr(membership, "peer_of", lambda rank: f"host:{rank + 2}")
    event_log.changed(3, Change(True, False, 2, 1, (0,)))
    assert lines() == ["resize: 2 -> 1 workers version=2 step=3 reason=failed ranks=0"]


def test_a_replacement_is_not_called_asked_for(lines, monkeypatch):
    cluster(monkeypatch, size=3, version=5)
    event_log.changed(15, Change(True, False, 2, 3))
    cluster(monkeypatch, size=2, version=6)
    event_log.changed(16, Change(True, False, 3, 2))
    assert lines() == [
        "resize: 2 -> 3 workers version=5 step=15 reason=joined",
        "resize: 3 -> 2 workers version=6 step=16 reason=request",
    ]


def test_worker_that_leaves_by_the_schedule_logs_it(lines, monkeypatch):
    cluster(monkeypatch, size=3)
    event_log.scheduled(8, 1, wait=False)
    event_log.changed(9, Change(True, True, 3, 3))
    assert lines()[-1] == "left: size=3 step=9 reason=schedule"


def test_leaving_worker_and_joining_worker_log_it(lines, monkeypatch):
    event_log.changed(12, Change(True, True, 2, 2))
    assert lines() == ["left: size=2 step=12 reason=request"]
    monkeypatch.setattr(membership, "was_terminated", lambda: True)
    event_log.changed(12, Change(True, True, 2, 2))
    assert lines() == ["left: size=2 step=12 reason=SIGTERM"]
    monkeypatch.setattr(membership, "was_evicted", lambda: True)
    event_log.changed(13, Change(True, True, 2, 2))
    assert lines() == ["left: size=2 step=13 reason=evicted"]
    monkeypatch.setattr(membership, "rank", lambda: 0)
    event_log.joined(30)
    assert lines() == ["joined: rank=0 size=1 step=30"]


def over(hosts, workers):
    return Cluster(tuple(PeerID.parse(w) for w in workers), tuple(PeerID(host, 38080) for host in hosts))


@pytest.mark.parametrize(
    ("hosts", "workers", "reason"),
    [
        ("abc", ["a:1", "b:1"], "hosts joined=c"),
        ("a", ["a:1", "b:1"], "hosts left=b"),
        ("acd", ["a:1", "b:1"], "hosts joined=c,d left=b"),
        ("ab", ["a:1", "b:1"], '"same workers"'),
        ("abc", ["a:1", "c:1"], "replaced"),
    ],
)
def test_a_change_to_the_same_size_says_what_is_another_one(hosts, workers, reason, lines, monkeypatch):
    cluster(monkeypatch, size=2, version=1)
    event_log.changed(4, Change(True, False, 2, 2, (), over("ab", ["a:1", "b:1"]), over(hosts, workers)))
    assert lines() == [f"resize: 2 -> 2 workers version=1 step=4 reason={reason}"]


def test_step_that_compiled_long_is_logged_and_its_report_says_so(lines, monkeypatch):
    own, told = membership.current(), []
    monkeypatch.setattr(own, "spent", {})
    monkeypatch.setattr(own, "ended_steps", EndedSteps())
    monkeypatch.setattr(membership, "report", lambda event, **values: told.append((event, values)))
    now = [0.0]

    def step(number, seconds, compiled_s=0.0):
        if compiled_s:
            membership.count_spent("compilation", compiled_s)
        now[0] += seconds
        own.ended_steps.ended(number, now[0])
        event_log.step_ended(number)
        return lines()

    assert step(1, 9.0, 8.0) == []  # every program's first step compiles
    assert [step(number, 0.1) for number in (2, 3)] == [[], []]
    assert step(4, 1.2, 0.99) == []
    assert step(5, 3.2, 3.0) == ["compiled: step=5 seconds=3.0"]
    assert step(6, 3.75) == []
    assert step(7, 9.1, 1.0) == ["compiled: step=7 seconds=1.0"]
    cluster(monkeypatch, size=2, speaks=False)
    assert step(8, 9.0, 8.9) == ["compiled: step=8 seconds=8.9"]
    cluster(monkeypatch, size=2)
    monkeypatch.setattr(own, "core", SimpleNamespace(living=lambda: [0]))
    monkeypatch.setattr(membership, "lost_ranks", lambda: [1])
    failed = "rank failed: rank=1 peer=host:1 step="
    assert step(9, 12.5, 8.9) == [f"{failed}9", "compiled: step=9 seconds=8.9"]
    program.current().told.reported_failed = (-1, {})
    assert step(10, 12.85, 0.5) == [f"{failed}10"]
    found = [(event, values["step"], round(values["seconds"], 1), values.get("reason")) for event, values in told]
    assert found == [
        ("step_delayed", 5, 3.1, "MindSpore compiled for 3.0 s"),
        ("step_delayed", 6, 3.1, ""),
        ("step_delayed", 7, 7.9, ""),  # something else took most of the time
        ("failure_seen", 9, 0.4, None),
        ("step_delayed", 9, 9.3, "MindSpore compiled for 8.9 s"),
        ("failure_seen", 10, 9.1, None),
    ]
