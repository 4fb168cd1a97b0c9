"""The order of ranks, the ports of newcomers, and KungFu's JSON: what is accepted and what is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from ms_kungfu.cluster import Cluster, PeerID


def cluster_of(size: int, version: int = 0) -> Cluster:
    workers = tuple(PeerID("127.0.0.1", 10000 + i) for i in range(size))
    return Cluster(workers, (PeerID("127.0.0.1", 38080),), version)


@pytest.mark.parametrize("text", ["127.0.0.1:10000", "host-1:1", "::1:65535"])
def test_a_peer_is_written_as_it_is_read(text: str) -> None:
    assert str(PeerID.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "host",
        ":1",
        "host:",
        "host:0",
        "host:65536",
        "host:-1",
        "host:1.5",
        "host:\u0663",
        "a b:1",
        "a\n:1",
        "\x1b[31m:1",
    ],
)
def test_a_wrong_peer_is_refused_with_its_text(text: str) -> None:
    with pytest.raises(ValueError, match="host:port") as error:
        PeerID.parse(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize("value", [None, 7, ["127.0.0.1:1"]])
def test_a_peer_that_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match="host:port"):
        PeerID.parse(value)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("new_size", [1, 2, 3, 4, 7])
def test_a_resize_keeps_the_first_ranks_and_counts_the_version(size: int, new_size: int) -> None:
    old = cluster_of(size, version=4)
    new = old.resized(new_size, range(10000, 10100))
    assert new.size == new_size
    assert new.version == 5
    assert new.runners == old.runners
    kept = min(size, new_size)
    assert new.workers[:kept] == old.workers[:kept]
    assert len(set(new.workers)) == new_size
    assert old == cluster_of(size, version=4)


def test_joining_workers_take_the_lowest_free_ports() -> None:
    start = Cluster(tuple(PeerID("h", p) for p in (10000, 10003)))
    grown = start.resized(4, range(10000, 10100))
    assert [w.port for w in grown.workers] == [10000, 10003, 10001, 10002]
    assert {w.host for w in grown.workers} == {"h"}


def hosts_of(cluster: Cluster) -> str:
    return "".join(worker.host for worker in cluster.workers)


def test_joining_workers_go_to_the_emptiest_hosts_with_a_free_slot() -> None:
    start = Cluster((PeerID("a", 10000), PeerID("b", 10000)))
    slots = {"a": 2, "b": 3, "c": 1}
    grown = start.resized(6, range(10000, 10100), slots=slots)
    assert hosts_of(grown) == "abcabb"
    assert [w.port for w in grown.workers] == [10000, 10000, 10000, 10001, 10001, 10002]  # a port is a host's own
    with pytest.raises(ValueError, match="7 workers: the job's hosts have 6 slots"):
        start.resized(7, range(10000, 10100), slots=slots)
    leaving = grown.resized(6, range(10000, 10100), without=[PeerID("a", 10000)], slots=slots)
    assert hosts_of(leaving) == "bcabba"  # the leaver's slot is free, its port is not
    assert leaving.workers[-1].port == 10002


def test_joining_workers_with_fill_placement_fill_the_hosts_in_order() -> None:
    start = Cluster((PeerID("b", 10000),), slots={"a": 2, "b": 3, "c": 1}, placement="fill")
    assert hosts_of(start.resized(6, range(10000, 10100))) == "baabbc"
    assert hosts_of(start.resized(6, range(10000, 10100)).resized(3, ()).resized(4, range(10000, 10100))) == "baab"


def test_slots_and_placement_go_with_the_cluster() -> None:
    start = Cluster((PeerID("a", 1),), (), 3, slots={"a": 1, "b": 2}, placement="fill")
    for cluster in (start, start.following(start.workers), Cluster.from_json(json.loads(start.dumps()))):
        assert hosts_of(cluster.resized(3, range(1, 9))) == "abb"
    plain = Cluster((PeerID("a", 1),))
    assert {*plain.to_json()} == {"Runners", "Workers", "Version"}


def test_joining_workers_without_slots_go_to_the_emptiest_hosts() -> None:
    start = Cluster((PeerID("a", 10000), PeerID("a", 10001), PeerID("b", 10000)))
    assert hosts_of(start.resized(6, range(10000, 10100))) == "aabbab"


def test_a_port_range_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="-port-range"):
        cluster_of(2).resized(4, range(10000, 10003))


@pytest.mark.parametrize("size", [0, -1])
def test_cluster_without_workers_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"size {size}"):
        cluster_of(2).resized(size, range(10000, 10100))


def test_ranks_follow_the_order_of_workers() -> None:
    cluster = cluster_of(3)
    assert [cluster.rank_of(w) for w in cluster.workers] == [0, 1, 2]
    assert cluster.rank_of(PeerID("127.0.0.1", 9)) is None


def test_json_is_read_as_it_was_written() -> None:
    cluster = cluster_of(3, version=7)
    assert Cluster.from_json(json.loads(cluster.dumps())) == cluster


def test_writer_of_a_cluster_is_not_compared_and_not_inherited() -> None:
    cluster = Cluster.from_json(cluster_of(2).to_json(), writer="me")
    assert cluster.writer == "me"
    assert cluster == cluster_of(2)
    assert "me" not in cluster.dumps()
    assert cluster.resized(1, ()).writer == cluster.without(cluster.workers[:1]).writer == ""


def test_runners_and_version_may_be_left_out() -> None:
    assert Cluster.from_json({"Workers": ["h:1"]}) == Cluster((PeerID("h", 1),))


@pytest.mark.parametrize(
    ("document", "named"),
    [
        (None, "NoneType"),
        ([], "list"),
        ({}, "Workers"),
        ({"Workers": []}, "at least 1"),
        ({"Workers": "h:1"}, "Workers"),
        ({"Workers": [1]}, "1"),
        ({"Workers": ["h:1", "h:1"]}, "h:1 twice"),
        ({"Workers": ["h:1"], "Runners": ["r:1", "r:1"]}, '"Runners" contains r:1 twice'),
        ({"Workers": ["h:1"], "Runners": None}, "Runners"),
        ({"Workers": ["h:1"], "workers": ["h:2"]}, "'workers'"),
        ({"Workers": ["h:1"], "Version": -1}, "-1"),
        ({"Workers": ["h:1"], "Slots": ["h"]}, "Slots must map each host"),
        ({"Workers": ["h:1"], "Slots": {}}, "Slots must map each host"),
        ({"Workers": ["h:1"], "Slots": {"h": -1}}, "Slots must map each host"),
        ({"Workers": ["h:1"], "Slots": {"h": True}}, "Slots must map each host"),
        ({"Workers": ["h:1"], "Slots": {"a\n": 1}}, "Slots must map each host"),
        ({"Workers": ["h:1"], "Placement": "odd"}, "Placement must be even or fill, got 'odd'"),
        ({"Workers": ["h:1"], "Placement": ["even"]}, "Placement must be even or fill"),
        ({"Workers": ["h:1"], "Version": "1"}, "'1'"),
        ({"Workers": ["h:1"], "Version": True}, "True"),
        ({"Workers": ["h:1"], "Version": 1.0}, "1.0"),
    ],
)
def test_a_wrong_document_is_refused_and_says_why(document: Any, named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        Cluster.from_json(document)


def test_a_worker_in_the_middle_may_be_left_out():
    cluster = Cluster(tuple(PeerID("127.0.0.1", port) for port in (1, 2, 3)), (), 7)
    assert cluster.without([PeerID("127.0.0.1", 2)]) == Cluster((PeerID("127.0.0.1", 1), PeerID("127.0.0.1", 3)), (), 8)
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1 can't leave: it is the last worker"):
        cluster.without(cluster.workers)


def test_when_resized_the_dead_go_first():
    cluster = Cluster(tuple(PeerID("127.0.0.1", port) for port in (1, 2, 3)), (), 7)
    failed = [PeerID("127.0.0.1", 1)]
    assert [w.port for w in cluster.resized(2, range(1, 9), without=failed).workers] == [2, 3]
    assert [w.port for w in cluster.resized(3, range(1, 9), without=failed).workers] == [2, 3, 4]


def test_written_cluster_is_checked_in_linear_time(monkeypatch):
    compared = []
    real = PeerID.__eq__
    monkeypatch.setattr(PeerID, "__eq__", lambda one, other: compared.append(1) or real(one, other))
    names = [f"10.0.{n // 250}.{n % 250}:10000" for n in range(1024)]
    assert Cluster.from_json({"Workers": names, "Runners": names}).size == 1024
    assert len(compared) < 10_000
    with pytest.raises(ValueError, match=r'"Workers" contains 10\.0\.0\.7:10000 twice'):
        Cluster.from_json({"Workers": [*names[:-1], names[7]]})
    assert len(compared) < 20_000


def test_written_cluster_has_no_more_workers_than_a_job():
    names = [f"127.0.0.1:{1 + n}" for n in range(8000)]
    with pytest.raises(ValueError, match='"Workers" has 8000 entries; the limit is 1024'):
        Cluster.from_json({"Workers": names})


def test_rank_is_found_without_a_search_of_the_workers():
    compared = []

    class Worker(PeerID):
        def __eq__(self, other):
            compared.append(1)
            return super().__eq__(other)

        __hash__ = PeerID.__hash__

    cluster = Cluster(tuple(Worker("a", 10000 + i) for i in range(1000)))
    assert cluster.rank_of(Worker("a", 10999)) == 999
    assert cluster.rank_of(Worker("b", 10999)) is None
    assert len(compared) < 100
