"""Jobs on hosts that are network namespaces."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from ms_kungfu import _core

# Until the runtime has it there is nothing between hosts that could be tested.
over_hosts = pytest.mark.skipif(not hasattr(_core, "Link"), reason="this build of the runtime has no _core.Link")
PROGRAM = """
import os, numpy as np, ms_kungfu as kf
from ms_kungfu import comm
kf.init()
total = comm.all_reduce(np.arange(3.0) + kf.current_rank(), name="total")
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
print("worker", *total, os.environ["KUNGFU_SELF"], *(os.environ[name] for name in names), flush=True)
"""


def test_a_job_on_one_host_of_several_has_its_address(jobs, network):
    hosts = network(2).hosts
    for host in hosts:  # the same names and ports on both, at the same time
        words = ["-np", 2, "-nic", "eth0", "-w", "-builtin-config-port", 9100, sys.executable, "-c", PROGRAM]
        host.job = jobs.start(host, "ms_kungfu.launcher", *words)
    for host in hosts:
        host.job.assert_exit(0, 60)
        host.job.assert_gone(time.monotonic())
        told = sorted(line for line in host.job.stdout if line.startswith("worker"))
        expected = [f"worker 1.0 3.0 5.0 {host.address}:{10000 + rank} {rank} {rank} 2 2" for rank in range(2)]
        assert told == expected


def hosts_of(members):
    return [members[rank][0] for rank in sorted(members)]


@over_hosts
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_job_over_hosts_reduces_and_ends_everywhere(count, jobs, network):
    job = jobs.over(network(count), 2 * count, watch=False)
    members = job.in_version(0, 2 * count)
    assert hosts_of(members) == [rank // 2 for rank in range(2 * count)]
    assert len(job.finish()) == 2 * count


@over_hosts
def test_a_job_over_ipv6(jobs, network):
    hosts = network(2).hosts
    listed = ",".join(f"[{host.address6}]:1" for host in hosts)
    words = ["-np", 2, "-H", listed, sys.executable, "-c", PROGRAM]
    launchers = [jobs.start(host, "ms_kungfu.launcher", *words) for host in hosts]
    for rank, (host, launcher) in enumerate(zip(hosts, launchers)):
        launcher.assert_exit(0, 60)
        told = [line for line in launcher.stdout if line.startswith("worker")]
        assert told == [f"worker 1.0 3.0 5.0 [{host.address6}]:10000 {rank} 0 2 1"]


@over_hosts
@pytest.mark.parametrize("victim", [0, 3])
def test_a_dead_worker_costs_the_others_nothing(victim, jobs, network):
    job = jobs.over(network(2), 4)
    before = job.in_version(0, 4)
    os.kill(before[victim][1], signal.SIGKILL)
    after = job.newest(1, 3)
    assert {*after.values()} == {*before.values()} - {before[victim]}  # the same processes
    assert len(job.finish()) == 3


@over_hosts
def test_a_job_grows_onto_other_hosts_and_shrinks(jobs, network):
    job = jobs.over(network(2), 1)
    first = job.in_version(0, 1)
    assert hosts_of(first) == [0]
    command = job.command(1, "resize", 4)  # from whichever host
    command.assert_exit(0)
    grown = job.newest(1, 4)
    assert hosts_of(grown) == [0, 1, 0, 1]
    assert grown[0] == first[0]
    job.command(0, "resize", 2).assert_exit(0)
    shrunk = job.newest(2, 2)
    assert shrunk == {rank: grown[rank] for rank in (0, 1)}
    assert len(job.finish()) == 2


@over_hosts
def test_growing_past_the_slots_is_refused_wherever_it_is_asked_for(jobs, network):
    job = jobs.over(network(2), 2)
    job.in_version(0, 2)
    command = job.command(1, "resize", 5)
    command.assert_exit(1)
    assert "5 workers are more than the 4 slots that -H gives" in command.output
    assert len(job.finish()) == 2


@over_hosts
@pytest.mark.parametrize("lost", [0, 1])
def test_a_launcher_that_is_killed_ends_the_job_on_all_hosts(lost, jobs, network):
    job = jobs.over(network(2), 4)
    job.in_version(0, 4)
    job.launchers[lost].process.kill()
    other = job.launchers[1 - lost]
    assert other.wait(20) != 0
    assert job.network.hosts[lost].address in other.stderr[-1]
    for launcher in job.launchers:
        launcher.assert_gone(time.monotonic(), within=5)


@over_hosts
@pytest.mark.long
def test_a_host_that_is_cut_off_ends_the_job_on_all_hosts(jobs, network):
    job = jobs.over(network(2), 4)
    job.in_version(0, 4)
    with job.network.hosts[1].cut():
        for launcher in job.launchers:
            assert launcher.wait(40) != 0
            assert "10.77.0." in launcher.stderr[-1]
            launcher.assert_gone(time.monotonic(), within=5)


@over_hosts
@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_on_any_host_ends_the_job_on_all(number, jobs, network):
    job = jobs.over(network(2), 4)
    job.in_version(0, 4)
    job.launchers[number].signal(signal.SIGINT)
    job.end(130)


@over_hosts
def test_a_workers_failure_is_the_exit_code_on_all_hosts(jobs, network):
    hosts = network(2).hosts
    listed = ",".join(f"{host.address}:1" for host in hosts)
    program = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(7)\ntime.sleep(600)"
    words = ["-np", 2, "-H", listed, sys.executable, "-c", program]
    for launcher in [jobs.start(host, "ms_kungfu.launcher", *words) for host in hosts]:
        launcher.assert_exit(7, 30)
        launcher.assert_gone(time.monotonic())


def test_a_launcher_with_another_secret_is_refused(jobs, network):
    hosts = network(2).hosts
    listed = ",".join(f"{host.address}:1" for host in hosts)
    words = ["-np", 2, "-H", listed, "true"]
    head = jobs.start(hosts[0], "ms_kungfu.launcher", *words, environment={"KUNGFU_JOIN_TIMEOUT": "5"})
    stranger = jobs.start(hosts[1], "ms_kungfu.launcher", *words, environment={"KUNGFU_JOB_SECRET": "ab" * 32})
    stranger.assert_exit(1)
    assert "secret" in stranger.stderr[-1]
    head.assert_exit(1)
    assert hosts[1].address in head.stderr[-1]
