"""Hosts that leave a training and join it, on networks of their own."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import long
from tests.hosts.namespaces import PORT

EXAMPLE = Path(__file__).parents[2] / "examples" / "lenet-elastic"
HEAVY = Path(__file__).with_name("programs") / "heavy.py"
MIB = 1 << 20


def join(jobs, job, number, *words):
    """A new launcher there, in the place of the one that has ended."""
    job.launchers[number] = jobs.start(job.network.hosts[number], "ms_kungfu.launcher", "-join", job.url, *words)
    job.launchers[0].wait_for(rf"host joined: host={job.network.hosts[number].address} ")


def resize(job, size):
    """Typed at the head; tried again, because hosts that have just come may not be known to the store yet."""
    for _ in range(100):
        command = job.command(0, "resize", size)
        if command.wait() == 0:
            return
        assert " workers: the job's hosts have " in command.output
    raise AssertionError(command.output)


def test_host_leaves_and_returns_without_naming_itself(jobs, network):
    job = jobs.over(network(3), 6)
    before = job.in_version(0, 6)
    leaver = job.launchers[2]
    leaver.signal(signal.SIGTERM)
    leaver.assert_exit(0)
    assert len(leaver.wait_for(r"^left pid \d+ step \d+", 2)) == 2
    left = job.newest(1, 4)
    assert {*left.values()} == {who for who in before.values() if who[0] != 2}
    assert "host lost: " not in job.output
    join(jobs, job, 2)  # with one slot: no flag says more
    resize(job, 5)
    there = job.newest(2, 5)
    assert [who[0] for who in there.values()].count(2) == 1
    assert len(job.finish()) == 5


def test_a_host_that_was_cut_off_comes_back_when_its_cable_does(jobs, network):
    job = jobs.over(network(3), 6, "-host-timeout", "3s")
    before = job.in_version(0, 6)
    lost = job.network.hosts[1]
    with lost.cut():
        job.newest(1, 4)
        job.launchers[1].assert_exit(1)
    join(jobs, job, 1, "-self", f"{lost.address}:2")
    resize(job, 6)
    there = job.newest(2, 6)
    assert {who for who in before.values() if who[0] != 1} < {*there.values()}
    assert len(job.finish()) == 6


@pytest.mark.parametrize("size", [1, long(2)])
def test_the_state_crosses_the_network_only_to_a_host_without_it(size, jobs, network):
    pytest.importorskip("mindspore")
    state = 64
    job = jobs.over(network(2), size, worker=HEAVY, program=[state])
    job.in_version(0, size)
    there = job.network.hosts[1]
    before = there.received()
    job.command(0, "resize", 2 * size).assert_exit(0)
    job.newest(1, 2 * size)
    received = (there.received() - before) / MIB
    assert state <= received < 1.25 * state if size == 1 else received < 0.1 * state
    told = job.launchers[1].wait_for(r"^in version 1 .* with (\d+)", size)
    assert {int(line[1]) for line in told} == {sum(range(8)) * (state * MIB // 4 // 8)}
    job.launchers[0].signal(signal.SIGINT)
    job.launchers[0].assert_exit(130)


ONE_CHANGE = """
import time, ms_kungfu as kf
from ms_kungfu import membership
kf.init()
while not (change := membership.step()).changed:
    time.sleep(0.01)
print("changed", change.is_of_the_same_workers, change.hosts_joined, change.hosts_left, flush=True)
"""


def test_members_know_of_a_change_by_a_host_alone_that_it_is_that(jobs, network):
    hosts = network(3).hosts
    listed = ",".join(f"{host.address}:1" for host in hosts[:2])
    url = f"http://{hosts[0].address}:{PORT}/config"
    words = ["-np", 2, "-H", listed, "-w", "-config-server", url, "-builtin-config-port", PORT]
    words += [sys.executable, "-c", ONE_CHANGE]
    launchers = [jobs.start(host, "ms_kungfu.launcher", *words) for host in hosts[:2]]
    launchers[0].wait_for("worker started: worker . .*", 2)
    launchers.append(jobs.start(hosts[2], "ms_kungfu.launcher", "-join", url))
    for launcher in launchers:
        launcher.assert_exit(0)
    for launcher in launchers[:2]:
        launcher.wait_for(rf"^changed True \['{hosts[2].address}'\] \[\]", timeout=0)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_each_sample_is_trained_once_while_hosts_leave_and_join(jobs, network, tmp_path):
    for module in ("mindspore", "sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(module)
    hosts = network(3).hosts
    listed = ",".join(f"{host.address}:1" for host in hosts[:2])
    url = f"http://{hosts[0].address}:{PORT}/config"
    ledger = tmp_path / "ledger"  # of a disk that the hosts share
    words = ["-np", 2, "-H", listed, "-w", "-config-server", url, "-builtin-config-port", PORT]
    words += [sys.executable, EXAMPLE / "train.py", "--epochs", 8, "--schedule", "none"]
    words += ["--ledger", ledger, "--out", tmp_path / "out"]
    launchers = [jobs.start(host, "ms_kungfu.launcher", *words) for host in hosts[:2]]
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in ledger.rglob("*") if path.is_file()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    launchers.append(jobs.start(hosts[2], "ms_kungfu.launcher", "-join", url))
    launchers[0].wait_for("host joined: ", timeout=60)
    while (command := jobs.start(hosts[0], "ms_kungfu.launcher", "resize", 3, "-config-server", url)).wait() != 0:
        assert " workers: the job's hosts have " in command.output
    launchers[0].wait_for(r"cluster committed: .*workers=3 step=\d", timeout=120)
    launchers[1].signal(signal.SIGTERM)
    launchers[1].assert_exit(0, 60)
    for launcher in (launchers[0], launchers[2]):
        launcher.assert_exit(0, 300)
    audit = jobs.start(hosts[0], "ms_kungfu.dataset.audit", ledger)
    audit.assert_exit(0, 60)
    assert "ledger of 3 workers in 1 job" in audit.output
    assert "exact: each sample was trained once" in audit.output
