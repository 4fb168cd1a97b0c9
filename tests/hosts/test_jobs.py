"""Jobs on hosts that are network namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time

import pytest

from tests.hosts.jobs import SECRET

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


GET = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1]).read().decode())"


def hosts_of(members):
    return [members[rank][0] for rank in sorted(members)]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_job_over_hosts_reduces_and_ends_everywhere(count, jobs, network):
    job = jobs.over(network(count), 2 * count, watch=False)
    members = job.in_version(0, 2 * count)
    assert hosts_of(members) == [rank // 2 for rank in range(2 * count)]
    assert len(job.finish()) == 2 * count


def test_a_job_over_ipv6(jobs, network):
    hosts = network(2).hosts
    listed = ",".join(f"[{host.address6}]:1" for host in hosts)
    words = ["-np", 2, "-H", listed, sys.executable, "-c", PROGRAM]
    launchers = [jobs.start(host, "ms_kungfu.launcher", *words) for host in hosts]
    for rank, (host, launcher) in enumerate(zip(hosts, launchers)):
        launcher.assert_exit(0, 60)
        told = [line for line in launcher.stdout if line.startswith("worker")]
        assert told == [f"worker 1.0 3.0 5.0 [{host.address6}]:10000 {rank} 0 2 1"]


PAIRS = """
import numpy as np, mindspore as ms, ms_kungfu as kf
from mindspore import nn, ops
from ms_kungfu.optimizers import PairAveragingOptimizer
kf.init()
rank, size = kf.current_rank(), kf.current_cluster_size()
net = nn.Dense(300, 200, weight_init=float(2 ** rank), bias_init="zeros")
parameters = net.trainable_params()
optimizer = PairAveragingOptimizer(nn.SGD(parameters, 0.0), neighbour="round-robin", prefetch=False)
optimizer.publish()
expected, taken = [float(2 ** each) for each in range(size)], []
for step in range(size - 1):
    for one in range(size):  # one after another, so that it is known whose model has which value
        kf.comm.barrier()
        neighbour = (one + 1 + step) % size
        expected[one] = (expected[one] + expected[neighbour]) / 2
        if one == rank:
            optimizer(tuple(ops.zeros_like(each) for each in parameters))
            taken.append(optimizer.last_exchange()[0])
            assert (parameters[0].asnumpy() == expected[rank]).all(), (parameters[0].asnumpy(), expected)
kf.comm.barrier()
print("took", *taken, flush=True)
"""


def test_pairs_are_averaged_over_hosts(jobs, network):
    hosts = network(2).hosts
    listed = ",".join(f"{host.address}:2" for host in hosts)
    words = ["-np", 3, "-H", listed, sys.executable, "-c", PAIRS]
    launchers = [jobs.start(host, "ms_kungfu.launcher", *words) for host in hosts]
    for launcher in launchers:
        launcher.assert_exit(0, 100)
    told = [line for launcher in launchers for line in launcher.stdout if line.startswith("took")]
    assert sorted(told) == ["took 0 1", "took 1 2", "took 2 0"]


@pytest.mark.parametrize("victim", [0, 3])
def test_a_dead_worker_costs_the_others_nothing(victim, jobs, network):
    job = jobs.over(network(2), 4)
    before = job.in_version(0, 4)
    os.kill(before[victim][1], signal.SIGKILL)
    after = job.newest(1, 3)
    assert {*after.values()} == {*before.values()} - {before[victim]}  # the same processes
    assert len(job.finish()) == 3


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


@pytest.mark.parametrize("placement", ["even", "fill"])
def test_joining_workers_go_where_placement_puts_them(placement, jobs, network):
    job = jobs.over(network(2), 1, "-placement", placement, slots=3)
    job.in_version(0, 1)
    job.command(0, "resize", 3).assert_exit(0)
    assert hosts_of(job.newest(1, 3)) == ([0, 1, 0] if placement == "even" else [0, 0, 0])
    told = json.loads(job.network.hosts[1].run(sys.executable, "-c", GET, job.url))
    assert told["Slots"] == {host.address: 3 for host in job.network.hosts}
    assert told.get("Placement", "even") == placement
    assert len(job.finish()) == 3


def test_a_dead_worker_is_replaced_where_it_is_missing(jobs, network):
    job = jobs.over(network(2), 4, "-recover", "replace")
    before = job.in_version(0, 4)
    os.kill(before[3][1], signal.SIGKILL)
    after = job.newest(2, 4)
    assert sorted(hosts_of(after)) == [0, 0, 1, 1]
    assert len({*after.values()} - {*before.values()}) == 1
    assert len(job.finish()) == 4


def test_client_without_the_secret_cannot_resize_the_job(jobs, network, tmp_path):
    job = jobs.over(network(2), 2)
    job.in_version(0, 2)
    without = job.command(1, "resize", 3, environment={"KUNGFU_JOB_SECRET": ""})
    without.assert_exit(2)
    assert "give -secret-file or set KUNGFU_JOB_SECRET" in without.output
    wrong = job.command(1, "resize", 3, environment={"KUNGFU_JOB_SECRET": "ab" * 32})
    wrong.assert_exit(1)
    file = tmp_path / "job.secret"
    file.write_text(SECRET)
    assert "both set the job's secret" in _refused(job.command(1, "resize", 3, "-secret-file", file))
    words = ("resize", 3, "-secret-file", file)
    assert "chmod 600" in _refused(job.command(1, *words, environment={"KUNGFU_JOB_SECRET": ""}))
    file.chmod(0o600)
    job.command(1, *words, environment={"KUNGFU_JOB_SECRET": ""}).assert_exit(0)
    job.newest(1, 3)
    assert len(job.finish()) == 3


def _refused(command):
    command.assert_exit(2)
    assert len(command.lines) == 1
    return command.output


def test_growing_past_the_slots_is_refused_wherever_it_is_asked_for(jobs, network):
    job = jobs.over(network(2), 2)
    job.in_version(0, 2)
    command = job.command(1, "resize", 5)
    command.assert_exit(1)
    assert "5 workers: the job's hosts have 4 slots" in command.output
    assert len(job.finish()) == 2


@pytest.mark.parametrize("lost", [0, 1])
def test_killed_launcher_ends_the_job_without_recovery(lost, jobs, network):
    job = jobs.over(network(2), 4, watch=lost == 0)
    job.in_version(0, 4)
    job.launchers[lost].process.kill()
    other = job.launchers[1 - lost]
    assert other.wait(20) != 0
    assert job.network.hosts[lost].address in other.stderr[-1]
    for launcher in job.launchers:
        launcher.assert_gone(time.monotonic(), within=5)


@pytest.mark.long
def test_a_host_that_is_cut_off_ends_a_job_that_does_not_change(jobs, network):
    job = jobs.over(network(2), 4, watch=False)
    job.in_version(0, 4)
    with job.network.hosts[1].cut():
        for launcher in job.launchers:
            assert launcher.wait(40) != 0
            assert "10.77.0." in launcher.stderr[-1]
            launcher.assert_gone(time.monotonic(), within=5)


@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.long), 1])
def test_ctrl_c_on_any_host_ends_the_job_on_all(number, jobs, network):
    job = jobs.over(network(2), 4)
    job.in_version(0, 4)
    job.launchers[number].signal(signal.SIGINT)
    job.end(130)


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


def test_firewall_before_the_head_node_is_reported_at_both_ends(jobs, network):
    hosts = network(2).hosts
    listed = ",".join(f"{host.address}:1" for host in hosts)
    words, environment = ["-np", 2, "-H", listed, "true"], {"KUNGFU_JOIN_TIMEOUT": "12"}
    with hosts[0].deaf_to(hosts[1]):
        launchers = [jobs.start(host, "ms_kungfu.launcher", *words, environment=environment) for host in hosts]
        for launcher, other in zip(launchers, reversed(hosts)):
            silence = f"no answer from {other.address}:38080"
            why = "no reply within 5 s"
            remedy = "is kungfu-run running there, and is port 38080 open?"
            launcher.assert_exit(1)
            told = f'no answer: hosts={other.address}:38080 reason="{why}". Remedy: {remedy}'
            assert len([line for line in launcher.stderr if told in line]) == 1
        assert (
            f"Last result for {hosts[1].address}: no answer from {hosts[1].address}:38080: {why}"
            in launchers[0].stderr[-1]
        )
        assert f"{silence} within 12 s (KUNGFU_JOIN_TIMEOUT): {why}; {remedy}" in launchers[1].stderr[-1]


def test_foreign_server_at_a_hosts_port_is_reported_by_the_head_node(jobs, network):
    hosts = network(2).hosts
    listed = ",".join(f"{host.address}:1" for host in hosts)
    jobs.start(hosts[1], "http.server", 38080)  # which waits for a line to end
    head = jobs.start(hosts[0], "ms_kungfu.launcher", "-np", 2, "-H", listed, "true")
    head.wait_for(
        rf"no answer: hosts={hosts[1].address}:38080 reason=.another listener .* Remedy: does another program use port"
    )
    head.signal(signal.SIGINT)
    head.assert_exit(130)


@pytest.mark.long
@pytest.mark.parametrize("weather", ["loss", "slow", "pause", "a moment without a cable"])
def test_bad_network_costs_only_time(weather, jobs, network):
    job = jobs.over(network(2), 4)
    before = job.in_version(0, 4)
    a, b = job.network.hosts
    with contextlib.ExitStack() as stack:
        if weather == "loss":
            stack.enter_context(a.deaf_to(b, loss=0.1))
            stack.enter_context(b.deaf_to(a, loss=0.1))
        elif weather == "slow":
            stack.enter_context(b.slowed(1))
        else:
            stack.enter_context(b.paused() if weather == "pause" else b.cut())
        time.sleep(2)  # is what is tried here: it has to be survived
    ends = job.finish()
    assert len(ends) == 4
    assert "in version 1" not in job.output
    assert before == job.in_version(0, 4)


SSH = """#!/bin/sh
# Of this network's: the last two words are the address and the command.
while [ $# -gt 2 ]; do shift; done
export XDG_RUNTIME_DIR="$KUNGFU_TEST_RUN/$1"
mkdir -m 700 -p "$XDG_RUNTIME_DIR"
unset KUNGFU_JOB_SECRET
exec ip netns exec "$(cat "$KUNGFU_TEST_RUN/$1.namespace")" unshare --mount sh -c "$2"
"""


def test_one_kungfu_distribute_starts_the_job_on_all_hosts(jobs, network, tmp_path):
    hosts = network(3).hosts
    for host in hosts:
        (tmp_path / f"{host.address}.namespace").write_text(host.namespace)
    (tmp_path / "ssh").write_text(SSH)
    (tmp_path / "ssh").chmod(0o755)
    listed = ",".join(f"{host.address}:2" for host in hosts)
    job = ["kungfu-run", "-np", 6, "-H", listed, sys.executable, "-c", PROGRAM]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "KUNGFU_TEST_RUN": str(tmp_path)}
    started = jobs.start_here("ms_kungfu.launcher.distribute", "-H", listed, *job, environment=environment)
    started.assert_exit(0, 60)
    started.assert_gone(time.monotonic())
    told = sorted(line for line in started.stdout if "worker" in line)
    assert told == [
        f"[{hosts[rank // 2].address}] worker 15.0 21.0 27.0 {hosts[rank // 2].address}:{10000 + rank % 2} "
        f"{rank} {rank % 2} 6 2"
        for rank in range(6)
    ]
