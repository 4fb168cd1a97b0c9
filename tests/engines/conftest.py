from __future__ import annotations

import pytest

from tests.engines import members


@pytest.fixture
def etcd_of(tmp_path):
    """Starts an etcd; nothing of it is left after the test."""
    reason = members.why_not()
    if reason is not None:
        pytest.skip(reason)
    made = []

    def make(count=3, **options):
        made.append(members.Etcd(tmp_path / f"etcd{len(made)}", count, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory):
    """One of three members, for all tests of a file: a job's name is its own."""
    reason = members.why_not()
    if reason is not None:
        pytest.skip(reason)
    made = members.Etcd(tmp_path_factory.mktemp("etcd"))
    yield made
    made.close()
