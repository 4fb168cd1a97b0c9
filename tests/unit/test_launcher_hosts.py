from types import SimpleNamespace

import pytest

from ms_kungfu.cluster import WORKER_PORTS, Cluster, PeerID
from ms_kungfu.launcher.commands import _resized, write_size
from ms_kungfu.launcher.state.hosts import Host, HostError, Hosts, parse_hosts


def cluster_of(*ports, host="127.0.0.1"):
    return Cluster(tuple(PeerID(host, port) for port in ports))


def test_first_cluster_takes_the_first_ports():
    cluster = Hosts().first_cluster(3, WORKER_PORTS, 38080, 5)
    assert [str(w) for w in cluster.workers] == ["127.0.0.1:10000", "127.0.0.1:10001", "127.0.0.1:10002"]
    assert [str(r) for r in cluster.runners] == ["127.0.0.1:38080"]
    assert cluster.version == 5


def test_without_slots_a_host_takes_as_many_as_are_asked_for():
    assert Hosts().first_cluster(64, WORKER_PORTS, 1, 0).size == 64
    assert Hosts().limit is None
    Hosts().check(cluster_of(*range(10000, 10064)), ())


def test_more_workers_than_a_host_can_have_are_refused_before_any_starts():
    most = Hosts().max_workers
    assert Hosts().first_cluster(most, WORKER_PORTS, 1, 0).size == most
    with pytest.raises(HostError, match=f"-np {most + 1}: at most {most} workers per host; add hosts with -H"):
        Hosts().first_cluster(most + 1, WORKER_PORTS, 1, 0)


def test_growing_past_the_slots_is_refused():
    hosts = Hosts(parse_hosts("127.0.0.1:2"))
    hosts.check(cluster_of(1, 2), ())
    with pytest.raises(HostError, match=r"3 workers: -H 127\.0\.0\.1:2 has 2 slots"):
        hosts.check(cluster_of(1, 2, 3), ())


def test_workers_on_other_hosts_are_refused():
    with pytest.raises(
        HostError, match=r"worker 10\.0\.0\.1:7 is on a host that isn't in the job: the hosts are 127\.0\.0\.1$"
    ):
        Hosts().check(cluster_of(7, host="10.0.0.1"), ())


def test_a_cluster_that_keeps_no_worker_is_refused():
    with pytest.raises(HostError, match=r"keep one of 127\.0\.0\.1:1, 127\.0\.0\.1:2"):
        Hosts().check(cluster_of(3, 4), cluster_of(1, 2).workers)
    Hosts().check(cluster_of(4, 1), cluster_of(1, 2).workers)
    Hosts().check(cluster_of(3, 4), ())


def test_hosts_are_written_as_with_kungfu():
    assert parse_hosts("127.0.0.1") == (Host("127.0.0.1", 1),)
    assert parse_hosts("127.0.0.1:4:public.example") == (Host("127.0.0.1", 4, "public.example"),)
    assert parse_hosts("localhost:4") == (Host("localhost", 4),)
    assert parse_hosts("10.0.0.1:2,b,10.0.0.3:1:x") == (Host("10.0.0.1", 2), Host("b", 1), Host("10.0.0.3", 1, "x"))


# ---- several ----


def of(text, **more):
    return Hosts(parse_hosts(text), **more)


def spread(cluster):
    return " ".join(map(str, cluster.workers))


def test_workers_are_spread_evenly_and_ranks_go_from_host_to_host():
    hosts = of("a:2,b:4,c:1")
    assert spread(hosts.first_cluster(1, range(7, 12), 1, 0)) == "a:7"
    assert spread(hosts.first_cluster(4, range(7, 12), 1, 0)) == "a:7 a:8 b:7 c:7"
    assert spread(hosts.first_cluster(6, range(7, 12), 1, 0)) == "a:7 a:8 b:7 b:8 b:9 c:7"
    assert spread(hosts.first_cluster(7, range(7, 12), 1, 0)) == "a:7 a:8 b:7 b:8 b:9 b:10 c:7"


def test_hosts_are_filled_one_after_the_other_where_that_is_wanted():
    hosts = of("a:2,b:4,c:1", placement="fill")
    assert spread(hosts.first_cluster(3, range(7, 12), 1, 0)) == "a:7 a:8 b:7"
    assert spread(hosts.first_cluster(7, range(7, 12), 1, 0)) == spread(
        of("a:2,b:4,c:1").first_cluster(7, range(7, 12), 1, 0)
    )


@pytest.mark.parametrize("placement", ["even", "fill"])
def test_start_and_growth_place_workers_alike(placement):
    hosts = of("a:2,b:4,c:1", placement=placement)
    for size in range(1, 8):
        started = hosts.first_cluster(size, WORKER_PORTS, 1, 0)
        grown = hosts.first_cluster(1, WORKER_PORTS, 1, 0).resized(size, WORKER_PORTS)
        assert sorted(started.workers) == sorted(grown.workers)


def test_each_host_has_a_launcher_and_single_host_publishes_no_slots():
    cluster = of("a:2,b:4").first_cluster(1, WORKER_PORTS, 38080, 0)
    assert [str(runner) for runner in cluster.runners] == ["a:38080", "b:38080"]
    assert (cluster.slots, cluster.placement) == ({"a": 2, "b": 4}, "even")
    assert of("a:2").first_cluster(1, WORKER_PORTS, 38080, 0).slots is None


def test_one_slot_is_no_slots_and_one_worker_no_workers():
    with pytest.raises(HostError, match="-np 2: -H a:1 has 1 slot; request"):
        of("a:1").first_cluster(2, WORKER_PORTS, 38080, 0)
    with pytest.raises(HostError, match="2 workers: -H a:1 has 1 slot"):
        of("a:1").check(cluster_of(1, 2, host="a"), ())
    with pytest.raises(HostError, match="1 worker on b: that host has 0 slots"):
        of("a:1,b:0").check(cluster_of(1, host="b"), ())
    with pytest.raises(ValueError, match="2 workers: the job's hosts have 1 slot"):
        Cluster((PeerID("a", 1),), slots={"a": 1}).resized(2, WORKER_PORTS)
    one = cluster_of(1)
    assert _resized(one, 1, None) == "nothing to do: cluster version 0 has 1 worker already"
    held = SimpleNamespace(get=lambda: cluster_of(1, 2), put=lambda wanted: wanted, url="")
    assert write_size(held, 1).startswith("cluster version 1: 2 -> 1 worker without")


def test_cluster_that_one_host_cannot_run_is_refused_with_the_host_name():
    hosts = of("a:2,b:1")
    workers = tuple(PeerID(name, port) for name, port in (("a", 1), ("b", 1), ("b", 2)))
    with pytest.raises(HostError, match="2 workers on b: that host has 1 slot"):
        hosts.check(Cluster(workers), ())
    hosts.check(Cluster(workers[:2]), ())
    with pytest.raises(HostError, match="worker c:1 is on a host that isn't in the job: the hosts are a,b"):
        hosts.check(Cluster((PeerID("c", 1),)), ())
    many = of(",".join(f"{name}:250" for name in "abcde"))
    workers = tuple(PeerID("abcde"[i % 5], 1 + i) for i in range(1025))
    many.check(Cluster(workers[:1024]), ())
    with pytest.raises(HostError, match="1025 workers: at most 1024 workers in a job; request"):
        many.check(Cluster(workers), ())
    uneven = of("a:300,b:1")
    workers = (*(PeerID("a", 1 + i) for i in range(256)), PeerID("b", 1))
    with pytest.raises(HostError, match="256 workers on a: at most 255 per host in a job with several hosts; add"):
        uneven.check(Cluster(workers), ())
    with pytest.raises(HostError, match="256 workers on a: at most 255"):
        uneven.first_cluster(257, WORKER_PORTS, 38080, 0)


def test_where_ssh_finds_a_host():
    hosts = parse_hosts("a:1,b:1:x.y,[fd00::1]:1,c:1:[fd00::2]")
    assert [host.login for host in hosts] == ["a", "x.y", "fd00::1", "fd00::2"]


def test_lost_host_has_no_slots_and_no_joining_workers():
    hosts = of("a:2,b:2,c:2").without("b")
    assert (hosts.slots_by_host, hosts.slots) == ({"a": 2, "c": 2}, 4)
    assert hosts.has_room(4)
    assert not hosts.has_room(5)
    a, b, c = (PeerID(name, 7) for name in "abc")
    hosts.check(Cluster((a, c), (), 1), (a,))
    with pytest.raises(HostError, match="worker b:7 is on host b, which is lost"):
        hosts.check(Cluster((a, b), (), 1), (a,))
    hosts.check(Cluster((a, b), (), 1), (a,), ended=[b])  # its writer hadn't heard of the loss
    assert hosts.described(Cluster((a,), (), 1)).slots == {"a": 2, "c": 2}
