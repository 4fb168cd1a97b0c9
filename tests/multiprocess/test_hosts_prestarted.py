"""Prestarted workers of jobs on several hosts. Addresses of this machine's loopback play them, as in test_hosts.py."""

from __future__ import annotations

import os
import signal
import sys

import pytest
from launching import RECOVERY_PROGRAM
from test_hosts import A, B, all_in_version, embedded, hosts  # noqa: F401

pytestmark = pytest.mark.timeout(240)
STARTED = r"worker started: standby {} \(pid (\d+)\)"


def start(hosts, size, *flags, program=()):  # noqa: F811
    watching, _ = embedded(A)
    return hosts([sys.executable, RECOVERY_PROGRAM, *program], *watching, "-np", size, *flags)


def end(job, sizes):
    job[A].signal(signal.SIGUSR1)
    job.assert_exit(0)
    ends = job.wait_for(r"^finished pid \d+ step (\d+) weights \w+", sizes)
    assert len({match[1] for match in ends}) == 1
    assert "Traceback" not in job.output


def test_resize_by_a_schedule_takes_the_prestarted_workers_of_each_host(hosts, tmp_path):  # noqa: F811
    ready = tmp_path / "ready"
    job = start(hosts, 2, program=["schedule=20:4", "wait", "ahead", f"hold=20:{ready}"])
    before = all_in_version(job, 0, {A: 1, B: 1})
    started = {int(job[A].wait_for(STARTED.format(number))[0][1]) for number in (1, 2)}
    job[A].wait_for(r"worker ready: standby [12]", 2)
    ready.touch()
    after = all_in_version(job, 1, {A: 2, B: 2})
    assert set(after.values()) == {*before.values(), *started}
    for host, rank in ((A, 2), (B, 3)):  # they have prepared for that, and print where they run
        job[host].wait_for(rf"^parked pid \d+ rank {rank} of 4$")
    end(job, {A: 2, B: 2})


def test_failed_worker_is_replaced_by_a_standby_of_its_host(hosts):  # noqa: F811
    job = start(hosts, 4, "-recover", "replace", "-standby", 2)
    before = all_in_version(job, 0, {A: 2, B: 2})
    job[A].wait_for(r"worker ready: standby [12]", 2)
    started = {int(job[A].wait_for(STARTED.format(number))[0][1]) for number in (1, 2)}
    os.kill(before[3], signal.SIGKILL)
    job[A].wait_for(r"standby used: standby=\d rank=3 peer=127.0.0.2:\d+ pid=\d+")
    after = all_in_version(job, 2, {A: 2, B: 2})
    assert [after[rank] for rank in range(3)] == [before[rank] for rank in range(3)]
    assert after[3] in started
    job[B].wait_for(rf"^parked pid {after[3]} ")
    job[A].wait_for(STARTED.format(3))  # in its place
    end(job, {A: 2, B: 2})
