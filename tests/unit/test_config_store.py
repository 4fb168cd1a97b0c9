import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import StaleVersionError
from ms_kungfu.cluster_store.store import ConfigStore


def document(size, **more):
    return {"Workers": [f"127.0.0.1:{10000 + i}" for i in range(size)], **more}


def test_first_document_is_version_0_unless_it_names_another():
    assert ConfigStore().put(document(2)).version == 0
    assert ConfigStore().put(document(2, Version=7)).version == 7


def test_of_two_writers_that_read_the_same_version_the_second_is_refused():
    store = ConfigStore(Cluster((PeerID("127.0.0.1", 10000),), (), 4))
    assert store.put(document(2, Version=5)).size == 2
    with pytest.raises(StaleVersionError, match="present version is 5; .* send the new one with Version 6, or omit"):
        store.put(document(3, Version=5))
    assert store.cluster.size == 2
    assert store.version == 5


@pytest.mark.parametrize("version", [0, 4, 6, 10**30])
def test_only_the_next_version_is_taken(version):
    store = ConfigStore(Cluster((PeerID("127.0.0.1", 10000),), (), 4))
    with pytest.raises(StaleVersionError):
        store.put(document(2, Version=version))
    assert store.version == 4


def test_document_without_version_becomes_the_next_one():
    store = ConfigStore(Cluster((PeerID("127.0.0.1", 10000),), (), 4))
    assert store.put(document(3)).version == 5


def test_runners_stay_where_the_document_has_none():
    runner = PeerID("127.0.0.1", 38080)
    store = ConfigStore(Cluster((PeerID("127.0.0.1", 10000),), (runner,), 0))
    assert store.put(document(3)).runners == (runner,)
    assert store.put(document(3, Runners=[])).runners == ()


def test_versions_are_not_used_again_after_the_cluster_is_forgotten():
    store = ConfigStore()
    store.put(document(1, Version=3))
    store.clear()
    assert store.cluster is None
    with pytest.raises(StaleVersionError, match="the next version is 4"):
        store.put(document(1, Version=3))
    assert store.put(document(1)).version == 4
    store.clear()
    assert store.put(document(1, Version=9)).version == 9


@pytest.mark.parametrize(
    ("garbage", "told"),
    [
        (None, "JSON object"),
        ([], "JSON object"),
        ({}, "Workers must be a list"),
        ({"Workers": []}, "Workers is empty"),
        ({"Workers": "127.0.0.1:1"}, "Workers must be a list"),
        ({"Workers": ["127.0.0.1"]}, "host:port"),
        ({"Workers": ["127.0.0.1:70000"]}, "70000"),
        ({"Workers": ["a:1", "a:1"]}, "twice"),
        ({"Workers": ["a:1"], "Wrokers": []}, "Wrokers"),
        ({"Workers": ["a:1"], "Version": "1"}, "Version"),
        ({"Workers": ["a:1"], "Version": True}, "Version"),
        ({"Workers": ["a:1"], "Version": -1}, "Version"),
    ],
)
def test_garbage_is_refused_and_changes_nothing(garbage, told):
    store = ConfigStore(Cluster((PeerID("127.0.0.1", 10000),), (), 4))
    with pytest.raises(ValueError, match=told):
        store.put(garbage)
    assert store.version == 4
    assert store.cluster.size == 1


def test_check_can_refuse_a_cluster():
    def at_most_2(cluster):
        if cluster.size > 2:
            raise ValueError("too many")

    store = ConfigStore(check=at_most_2)
    store.put(document(2))
    with pytest.raises(ValueError, match="too many"):
        store.put(document(3))
    assert store.version == 0
