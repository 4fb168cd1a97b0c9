"""To which workers a data set assigns its steps, and when it asks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ms_kungfu.dataset import dealing, shares


@pytest.fixture
def cluster(monkeypatch):
    """Of three, of which the first has died in a step of shards."""
    found = SimpleNamespace(deferred=False, asked=0)

    def sharded_members():
        found.asked += 1
        return [1, 2]

    core = SimpleNamespace(sharded_members=sharded_members)
    member = SimpleNamespace(core=core, outcomes=SimpleNamespace(owners=set()))
    monkeypatch.setattr(dealing.runtime, "cluster_version", lambda: 5)
    monkeypatch.setattr(dealing.runtime, "current_cluster_size", lambda: 3)
    monkeypatch.setattr(dealing.runtime, "current_rank", lambda: 1)
    monkeypatch.setattr(dealing.membership, "current", lambda: member)
    monkeypatch.setattr(dealing.membership, "is_deferred", lambda: found.deferred)
    return found


def test_dataset_that_begins_after_a_failure_is_split_among_survivors(cluster):
    assert shares.Shares(64, global_batch_size=8, shards=4).members == (1, 2)
    assert shares.Shares(64, global_batch_size=8).members == (0, 1, 2)


def test_batch_size_before_the_join_is_known_without_the_cluster(cluster):
    """MindSpore asks for it before it compiles, and the others wait for a worker that has joined."""
    cluster.deferred = True
    data = shares.Shares(64, global_batch_size=8, shards=4)
    assert data.global_batch_size == 8
    assert cluster.asked == 0


@pytest.mark.parametrize(
    ("epochs", "passes", "drop", "expected"),
    [(1, 1, False, 3), (2, 1, False, 6), (2, 1, True, 4), (1, 2, False, 6), (3, 2, False, 18), (0, 1, False, 0)],
)
def test_steps_left_count_the_last_smaller_batch_of_each_pass(cluster, epochs, passes, drop, expected):
    data = shares.Shares(20, global_batch_size=8, passes=passes, drop_remainder=drop)
    assert shares.steps_left(data, epochs) == expected
