"""Trainings that lose a host and go on. Addresses of this machine's loopback play the hosts, as in test_hosts.py."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time

import pytest
from test_hosts import GONE_WITHIN_S, PROGRAMS, A, B, C, all_in_version, embedded, hosts, put, reading  # noqa: F401

pytestmark = pytest.mark.timeout(240)
SURVIVOR = [sys.executable, PROGRAMS / "survivor.py"]


def start(hosts, size=6, *flags, head=A, slots=2, **environment):  # noqa: F811
    watching, url = embedded(head)
    job = hosts(
        SURVIVOR, *watching, "-np", size, *flags,
        slots=dict.fromkeys((A, B, C), slots), environments=dict.fromkeys((A, B, C), environment),
    )  # fmt: skip
    job.url = url
    return job


def lose(job, host):
    """Its launcher is killed, and with it all that it has started."""
    begin = time.monotonic()
    job[host].signal(signal.SIGKILL)
    job[host].wait()
    while job[host].processes():
        assert time.monotonic() < begin + GONE_WITHIN_S, job[host].processes()
        time.sleep(0.01)
    del job.runs[host]


def end(job):
    """All workers that are left end at the same step, having seen the same."""
    next(iter(job.runs.values())).signal(signal.SIGUSR1)
    job.assert_exit(0)
    ends = [m for run in job.runs.values() for m in run.wait_for(r"^finished pid \d+ (step \d+ weights \w+)", 0)]
    assert len({match[1] for match in ends}) == 1
    assert "Traceback" not in job.output
    return ends


@pytest.mark.parametrize(("head", "lost"), [(A, B), pytest.param(A, C, marks=pytest.mark.long), (B, A)])
def test_the_others_go_on_in_the_same_processes(hosts, head, lost):  # noqa: F811
    job = start(hosts, head=head)
    before = all_in_version(job, 0, {A: 2, B: 2, C: 2})
    lose(job, lost)
    left = dict.fromkeys(job.runs, 2)
    after = all_in_version(job, 1, left)
    lost_ranks = {A: (0, 1), B: (2, 3), C: (4, 5)}[lost]
    assert set(after.values()) == {pid for rank, pid in before.items() if rank not in lost_ranks}
    # At once, by the end of its connection, not by its silence.
    job[head].wait_for(rf"host lost: host={lost} reason=.kungfu-run on host {lost} has ended")
    job[head].wait_for(rf"worker {lost_ranks[0]} .* was on host {lost}, which was lost: .*; the others go on")
    assert len(end(job)) == 4


@pytest.mark.parametrize("rank", [0, 2])
def test_stuck_worker_of_any_host_is_ended(hosts, rank):  # noqa: F811
    """The only one of its host, so that none there waits for it; at the head's host and at another one."""
    job = start(hosts, 3, slots=1, SURVIVOR_LOOPS=str(rank), KUNGFU_COLLECTIVE_TIMEOUT="20")
    before = all_in_version(job, 0, {A: 1, B: 1, C: 1})
    stuck = {0: A, 2: C}[rank]
    others = ",".join(f"rank {each}" for each in range(3) if each != rank)
    job[A].wait_for(rf"stuck worker: worker {rank} .* awaited_by={others} .* action=end it", timeout=60)
    job[stuck].wait_for(r"File .*survivor.py\"?, line \d+ in <module>")
    job[A].wait_for(
        rf"worker {rank} .* did not reach the collective in which .* and was killed .*; the others go on without it"
    )
    left = {A: 1, B: 1, C: 1}
    left[stuck] = 0
    after = all_in_version(job, 1, left)
    assert set(after.values()) == {pid for each, pid in before.items() if each != rank}
    job[B].signal(signal.SIGUSR1)
    job.assert_exit(0)


@pytest.mark.parametrize("stops", [pytest.param(False, marks=pytest.mark.long), True])
def test_models_are_read_on_while_a_host_is_lost(hosts, stops):  # noqa: F811
    flags = ["-host-timeout", 2] if stops else []
    job = start(hosts, 6, *flags, SURVIVOR_MODEL="300000")
    before = all_in_version(job, 0, {A: 2, B: 2, C: 2})
    reading(job, 0, {A: 2, B: 2, C: 2})
    if stops:  # its launcher, and with it the link that answers: nothing comes, and no connection ends
        job[C].signal(signal.SIGSTOP)
        all_in_version(job, 1, {A: 2, B: 2})
    lose(job, C)
    after = all_in_version(job, 1, {A: 2, B: 2})
    assert set(after.values()) == {before[rank] for rank in range(4)}
    reading(job, 1, {A: 2, B: 2}, "[0-3]")
    end(job)


def test_two_hosts_lost_one_after_another(hosts):  # noqa: F811
    job = start(hosts)
    before = all_in_version(job, 0, {A: 2, B: 2, C: 2})
    lose(job, C)
    all_in_version(job, 1, {A: 2, B: 2})
    lose(job, B)
    assert set(all_in_version(job, 2, {A: 2}).values()) == {before[0], before[1]}
    end(job)


def test_two_hosts_lost_at_once(hosts):  # noqa: F811
    job = start(hosts)
    before = all_in_version(job, 0, {A: 2, B: 2, C: 2})
    for host in (B, C):
        job[host].signal(signal.SIGKILL)
    for host in (B, C):
        lose(job, host)
    for rank in (0, 1):
        job[A].wait_for(rf"^in version [12] rank {rank} of 2 ")
    last = [line for line in job[A].stdout if " of 2 pid " in line]
    assert {int(re.search(r"pid (\d+)", line)[1]) for line in last} == {before[0], before[1]}
    end(job)


def test_the_lost_are_replaced_where_there_are_slots(hosts):  # noqa: F811
    job = start(hosts, 6, "-recover", "replace", slots=3)
    before = all_in_version(job, 0, {A: 2, B: 2, C: 2})
    lose(job, C)
    left = all_in_version(job, 1, {A: 2, B: 2})
    after = all_in_version(job, 2, {A: 3, B: 3})
    assert set(left.values()) == {before[rank] for rank in range(4)} < set(after.values())
    end(job)


def test_no_more_are_replaced_than_there_are_slots_for(hosts, start_module):  # noqa: F811
    job = start(hosts, 5, "-recover", "replace")
    all_in_version(job, 0, {A: 2, B: 2, C: 1})
    lose(job, B)
    all_in_version(job, 1, {A: 2, C: 1})
    all_in_version(job, 2, {A: 2, C: 2})
    command = start_module(
        "ms_kungfu.launcher", "resize", "5", "-config-server", job.url,
        environment={"KUNGFU_JOB_SECRET": job[A].environment["KUNGFU_JOB_SECRET"]},
    )  # fmt: skip
    assert command.wait() == 1
    assert "5 workers: the job's hosts have 4 slots" in command.output
    end(job)


def test_joining_workers_on_a_lost_host_are_removed(hosts):  # noqa: F811
    job = start(hosts, 4, slots=2)
    before = all_in_version(job, 0, {A: 2, B: 1, C: 1})
    put(job.url, 1, f"{A}:10000", f"{A}:10001", f"{B}:10000", f"{C}:10000", f"{B}:10001")
    lose(job, B)
    job[A].wait_for(r"^in version \d+ rank 0 of 3 ")
    job[C].wait_for(rf"^in version \d+ rank 2 of 3 pid {before[3]} ")
    end(job)


def test_a_host_without_workers_is_not_missed(hosts):  # noqa: F811
    job = start(hosts, 2)
    all_in_version(job, 0, {A: 1, B: 1})
    lose(job, C)
    all_in_version(job, 1, {A: 1, B: 1})  # the same workers: a client that resizes hears that C's slots are lost
    put(job.url, 2, f"{A}:10000", f"{B}:10000", f"{B}:10001")
    all_in_version(job, 2, {A: 1, B: 2})
    end(job)


def test_loss_of_all_hosts_with_the_state_ends_the_job(hosts):  # noqa: F811
    job = start(hosts, 1, head=B)
    all_in_version(job, 0, {A: 1})
    lose(job, A)
    for run in job.runs.values():
        run.assert_exit(1)
        assert re.search(rf"worker 0 .* was on host {A}, which was lost: ", run.stderr[-1])


def test_too_few_are_left(hosts):  # noqa: F811
    job = start(hosts, 6, "-min-np", 5)
    all_in_version(job, 0, {A: 2, B: 2, C: 2})
    lose(job, B)
    for run in job.runs.values():
        run.assert_exit(1)
        assert run.stderr[-1].endswith("only 4 workers would be left, but -min-np is 5")


def test_without_watch_mode_all_name_the_host_that_is_silent(hosts):  # noqa: F811
    job = hosts(SURVIVOR, "-np", 4, "-host-timeout", "2s")
    all_in_version(job, 0, {A: 2, B: 2})
    stopped = job[B].processes()
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    job[A].assert_exit(1)
    for pid in stopped:
        with contextlib.suppress(ProcessLookupError):  # the one that wakes first ends the others
            os.kill(pid, signal.SIGCONT)
    job[B].assert_exit(1)
    silent = f"kungfu-run: host {B} is lost: no message came from it for 2 s (-host-timeout)"
    assert job[A].stderr[-1] == silent
    # It may see first how long it has heard nothing itself.
    assert job[B].stderr[-1] == silent or f"no message came from {A}, the head node" in job[B].stderr[-1]
    assert "goes on without" not in job.output
