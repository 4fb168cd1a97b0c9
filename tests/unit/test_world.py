"""Which worker stands for which rank of a virtual world."""

from types import SimpleNamespace

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.msrun import world


@pytest.fixture
def of(monkeypatch):
    """Workers by the ports of their places, which are not in the order of their ranks: one worker was replaced."""

    def make(ports, lives, size, hosts=("h",)):
        workers = tuple(PeerID(*where) if isinstance(where, tuple) else PeerID("h", where) for where in ports)
        core = SimpleNamespace(living=lambda: lives, rank=lambda: lives[0])
        member = SimpleNamespace(cluster=Cluster(workers, (), 0, ""), core=core)
        monkeypatch.setattr(world.membership, "current", lambda: member)
        monkeypatch.setenv("KUNGFU_MSRUN_SIZE", str(size))
        monkeypatch.setattr(world.env, "HOSTS", SimpleNamespace(get=lambda: list(hosts)))

    return make


def test_workers_stand_for_the_ranks_in_the_order_of_their_places(of):
    of([10001, 10002, 10000], [0, 1, 2], 3)
    assert [world.player_of(rank) for rank in range(3)] == [2, 0, 1]
    assert not world.writes()
    of([10001, 10000], [0, 1], 4)
    assert [world.player_of(rank) for rank in range(4)] == [1, 1, 0, 0]


def test_the_dead_stand_for_none_and_a_list_of_the_living_may_be_given(of):
    of([10001, 10002, 10000], [0, 1], 3)
    assert [world.player_of(rank) for rank in range(3)] == [0, 0, 1]
    assert world.writes()
    assert [world.player_of(rank, [1, 2]) for rank in range(3)] == [2, 2, 1]


def test_hosts_come_first(of):
    of([("b", 10000), ("a", 10001), ("a", 10000)], [0, 1, 2], 3, hosts=("a", "b"))
    assert [world.player_of(rank) for rank in range(3)] == [2, 1, 0]
