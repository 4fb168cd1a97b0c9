from __future__ import annotations

import pytest

from tests.engines import members
from tests.multiprocess.launching import Program


@pytest.fixture
def start_module(tmp_path):
    """Starts ``python -m MODULE ARGUMENTS`` in the test's folder; whatever is left of it is killed after the test."""
    started = []

    def run(module, *arguments, **options):
        started.append(Program(module, arguments, tmp_path, **options))
        return started[-1]

    yield run
    for program in started:
        program.kill_all()


@pytest.fixture
def kungfu_run(start_module):
    return lambda *arguments, **options: start_module("ms_kungfu.launcher", *arguments, **options)


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
