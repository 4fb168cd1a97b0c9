import pytest

from ms_kungfu.cluster import WORKER_PORTS, Cluster, PeerID
from ms_kungfu.launcher.hosts import Host, HostError, Hosts, parse_hosts


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
    with pytest.raises(HostError, match=f"-np {most + 1} is more than the {most} workers that one host can have"):
        Hosts().first_cluster(most + 1, WORKER_PORTS, 1, 0)


def test_growing_past_the_slots_is_refused():
    hosts = Hosts(parse_hosts("127.0.0.1:2"))
    hosts.check(cluster_of(1, 2), ())
    with pytest.raises(HostError, match=r"3 workers are more than the 2 slots that -H 127\.0\.0\.1:2 gives"):
        hosts.check(cluster_of(1, 2, 3), ())


def test_workers_on_other_hosts_are_refused():
    with pytest.raises(HostError, match=r"worker 10\.0\.0\.1:7 is on none of the job's hosts: 127\.0\.0\.1$"):
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
