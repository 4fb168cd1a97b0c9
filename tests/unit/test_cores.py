"""What a worker does about its cores."""

from __future__ import annotations

import os
import threading

import pytest

from ms_kungfu import membership


def policy_on(cores: set[int]) -> int:
    """Of a thread that has had itself be polite."""
    found = []

    def ask() -> None:
        os.sched_setaffinity(0, cores)
        membership.let_wakers_go_on()
        found.append(os.sched_getscheduler(0))

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return found[0]


def test_thread_on_one_core_gets_batch_scheduling() -> None:
    before = os.sched_getscheduler(0)
    assert policy_on({min(os.sched_getaffinity(0))}) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == before  # the thread that asks alone


def test_on_several_cores_nothing_changes() -> None:
    if len(os.sched_getaffinity(0)) == 1:
        pytest.skip("there is one core")
    assert policy_on(os.sched_getaffinity(0)) == os.sched_getscheduler(0)
