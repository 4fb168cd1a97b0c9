from __future__ import annotations

import functools

import pytest

from tests.hosts.jobs import Jobs
from tests.hosts.namespaces import Network, why_not

_why_not = functools.cache(why_not)


@pytest.fixture
def network():
    """Makes a network of so many hosts; all of it is gone after the test."""
    reason = _why_not()
    if reason is not None:
        pytest.skip(reason)
    made = []

    def make(count):
        made.append(Network(count))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def jobs(network, tmp_path):
    """Starts programs and jobs on hosts; whatever is left of them is killed after the test."""
    started = Jobs(tmp_path)
    yield started
    started.kill_all()
