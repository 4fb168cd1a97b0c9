"""The lines that tell of a training's changes."""

import logging

import pytest

from ms_kungfu import membership
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.elastic import event_log, program
from ms_kungfu.membership import Change


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
    assert lines() == [
        "step 20: 3 workers wanted, 2 starting; training goes on meanwhile, and wait=True would have it wait for them"
    ]
    cluster(monkeypatch, size=3, version=1)
    event_log.changed(45, Change(True, False, 1, 3))
    assert lines() == ["step 45: 1 -> 3 workers, cluster version 1, as the schedule has it from step 20 on"]
    event_log._at_exit()
    assert lines() == []


def test_size_that_was_never_reached_is_logged_at_the_end_with_the_remedy(lines):
    event_log.scheduled(20, 3, wait=False)
    lines()
    event_log._at_exit()
    (line,) = lines()
    assert line.startswith("size 3 of the schedule at step 20 was never reached: ")
    assert "wait=True" in line


def test_size_superseded_by_another_is_logged_then(lines):
    event_log.scheduled(20, 3, wait=True)
    assert lines() == ["step 20: 3 workers wanted, 2 starting"]
    event_log.scheduled(30, 1, wait=True)
    assert lines() == ["size 3 of the schedule at step 20 was never reached: the entry of step 30 came first"]
    event_log._at_exit()
    assert lines() == []


def test_one_worker_speaks_of_the_schedule(lines, monkeypatch):
    cluster(monkeypatch, size=1, speaks=False)
    event_log.scheduled(20, 3, wait=False)
    event_log._at_exit()
    assert lines() == []


def test_failure_is_logged_once_as_the_reason_of_the_next_change(lines, monkeypatch):
    cluster(monkeypatch, size=4, version=2, lost=[1])
    event_log.deaths(7)
    event_log.deaths(8)
    assert lines() == ["step 7: rank 1 (host:1) has died; the others go on"]
    cluster(monkeypatch, size=4, version=2, lost=[1, 3])
    event_log.deaths(9)
    assert lines() == ["step 9: rank 3 (host:3) has died; the others go on"]
    cluster(monkeypatch, size=2, version=3)
    event_log.changed(9, Change(True, False, 4, 2, (1, 3)))
    assert lines() == ["step 9: 4 -> 2 workers, cluster version 3, without rank 1, rank 3, dead"]


def test_failed_worker_in_the_new_version_is_logged_once_and_when_removed(lines, monkeypatch):
    cluster(monkeypatch, size=3, lost=[0, 1])
    event_log.deaths(2)
    assert len(lines()) == 2
    cluster(monkeypatch, size=2, version=1, lost=[0])
    monkeypatch.setattr(membership, "peer_of", lambda rank: f"host:{rank + 1}")
    event_log.changed(2, Change(True, False, 3, 2, (0, 1)))
    assert lines() == ["step 2: 3 -> 2 workers, cluster version 1, without rank 0, dead"]
    event_log.deaths(3)
    assert lines() == []
    cluster(monkeypatch, size=1, version=2)
    monkeypatch.setattr(membership, "peer_of", lambda rank: f"host:{rank + 2}")
    event_log.changed(3, Change(True, False, 2, 1, (0,)))
    assert lines() == ["step 3: 2 -> 1 worker, cluster version 2, without rank 0, dead"]


def test_a_replacement_is_not_called_asked_for(lines, monkeypatch):
    cluster(monkeypatch, size=3, version=5)
    event_log.changed(15, Change(True, False, 2, 3))
    cluster(monkeypatch, size=2, version=6)
    event_log.changed(16, Change(True, False, 3, 2))
    assert lines() == [
        "step 15: 2 -> 3 workers, cluster version 5, as its new workers are ready",
        "step 16: 3 -> 2 workers, cluster version 6, as asked for",
    ]


def test_worker_that_leaves_by_the_schedule_logs_it(lines, monkeypatch):
    cluster(monkeypatch, size=3)
    event_log.scheduled(8, 1, wait=False)
    event_log.changed(9, Change(True, True, 3, 3))
    assert lines()[-1] == "step 9: left the cluster of 3 workers, as the schedule has it from step 8 on"


def test_leaving_worker_and_joining_worker_log_it(lines, monkeypatch):
    event_log.changed(12, Change(True, True, 2, 2))
    assert lines() == ["step 12: left the cluster of 2 workers, as asked for"]
    monkeypatch.setattr(membership, "was_evicted", lambda: True)
    event_log.changed(13, Change(True, True, 2, 2))
    assert lines() == ["step 13: left the cluster of 2 workers, evicted"]
    monkeypatch.setattr(membership, "rank", lambda: 0)
    event_log.joined(30)
    assert lines() == ["step 30: joined as rank 0 of 1 worker"]


def over(hosts, workers):
    return Cluster(tuple(PeerID.parse(w) for w in workers), tuple(PeerID(host, 38080) for host in hosts))


@pytest.mark.parametrize(
    ("hosts", "workers", "reason"),
    [
        ("abc", ["a:1", "b:1"], "with the same workers: c joined the job"),
        ("a", ["a:1", "b:1"], "with the same workers: b left the job"),
        ("acd", ["a:1", "b:1"], "with the same workers: c, d joined the job and b left the job"),
        ("ab", ["a:1", "b:1"], "with the same workers"),
        ("abc", ["a:1", "c:1"], "with other workers"),
    ],
)
def test_a_change_to_the_same_size_says_what_is_another_one(hosts, workers, reason, lines, monkeypatch):
    cluster(monkeypatch, size=2, version=1)
    event_log.changed(4, Change(True, False, 2, 2, (), over("ab", ["a:1", "b:1"]), over(hosts, workers)))
    assert lines() == [f"step 4: 2 -> 2 workers, cluster version 1, {reason}"]
