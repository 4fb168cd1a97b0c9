"""The controller's seat, in an etcd of three members: another host has it where the controller dies.

More at random: ``python -m tests.campaigns heads``.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import LeadershipLease, LeadershipLostError, open_leadership, open_store
from ms_kungfu.launcher.state.hosts import Host
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.launcher.status_command import status
from tests.campaigns.heads import ELECTION_MS, LEASE_S, ElectedJob
from tests.engines.members import Etcd
from tests.hosts.jobs import SECRET
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(300)
CLUSTER = Cluster((PeerID("one", 10000),), (), 0)


@pytest.fixture
def patient_etcd(etcd_of) -> Etcd:
    """Which elects no leader because the machine is busy."""
    return etcd_of(election_ms=ELECTION_MS)


@pytest.mark.parametrize("kind", ["agent", pytest.param("host", marks=pytest.mark.long), "rank 0"])
def test_training_continues_without_controller_head_node_or_rank_0(patient_etcd, tmp_path, kind) -> None:
    job = ElectedJob(patient_etcd, "job", tmp_path / "job")
    try:
        print(f"{kind}: the longest pause was {job.judge(kind, job.strike(kind)):.2f} s")
    finally:
        job.end()


@pytest.fixture
def asked_until(tmp_path, monkeypatch, capsys):
    """Asks as `kungfu-run status` does, in this process: what holds for a lease is over before many have started."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "job" / "host1" / "run"))
    monkeypatch.setenv("KUNGFU_JOB_SECRET", SECRET)

    def ask(told: str, *url: str) -> str:
        deadline = time.monotonic() + LEASE_S
        while True:
            status(url)
            text = capsys.readouterr().out
            if told in text or time.monotonic() > deadline:
                return text

    return ask


def test_joined_host_takes_the_leadership_lease(patient_etcd, tmp_path, asked_until) -> None:
    job = ElectedJob(patient_etcd, "joined", tmp_path / "job", "-joinable", begun=1)
    try:
        job.wait_until_all_train()
        job.join(1)
        left = job.strike("agent")
        told = "running: the controller on 127.0.0.1 has failed; this host waits for the next controller"
        assert told in asked_until(told)
        told = "if it has failed, 127.0.0.2 takes over when its lease expires"
        assert told in asked_until(told, patient_etcd.url("joined"))
        job.judge("agent", left)
        assert "leadership taken: host=" in job.launchers[1].output
    finally:
        job.end()


@pytest.mark.long
def test_standby_of_another_host_gets_a_slot_after_a_takeover(patient_etcd, tmp_path) -> None:
    job = ElectedJob(patient_etcd, "standbys", tmp_path / "job", "-standby", "3")  # all slots are taken: one a host
    try:
        job.launchers[0].wait_for(r"worker ready: standby \d", 3)
        started = {match[1] for match in job.launchers[0].wait_for(r"worker started: standby \d \(pid (\d+)\)", 3)}
        left = job.strike("agent")
        one = min(left & job.processes(2))
        job.await_more_steps(left, 20, LEASE_S + 60)
        job.kill([one])
        left.remove(one)
        job.await_more_steps(left, 20, 60)
        job.resize(4, by=1)
        (next_head,) = [each for each in job.launchers if "leadership taken: host=" in each.output]
        ((pid,),) = [
            match.groups()
            for match in next_head.wait_for(r"standby used: standby=\d+ rank=3 peer=127.0.0.3:\d+ pid=(\d+)")
        ]
        assert pid in started
        while int(pid) not in job.told("member"):
            time.sleep(0.05)
        job.judge("agent", {*left, int(pid)})
    finally:
        job.end()


def test_head_node_with_sigterm_leaves_and_another_host_leads_at_once(patient_etcd, tmp_path) -> None:
    job = ElectedJob(patient_etcd, "leaves", tmp_path / "job", lease_s=120)
    try:
        longest = job.judge("agent", job.let_the_head_leave())
        assert longest < 60, "nobody waits for the lease"
    finally:
        job.end()


def test_time_limit_holds_across_a_change_of_controller(patient_etcd, tmp_path) -> None:
    """From the job's start, and it ends with the limit that was given."""
    begun, limit_s = time.monotonic(), 60
    job = ElectedJob(patient_etcd, "limit", tmp_path / "job", "-timeout", f"{limit_s}s", begun=2)
    try:
        job.strike("agent")
        job.launchers[1].assert_exit(124, limit_s + 60)
        assert time.monotonic() - begun > limit_s - 3
        assert "leadership taken: host=" in job.launchers[1].output
        assert f"after -timeout {limit_s} s" in job.launchers[1].output
    finally:
        job.end()


@pytest.mark.long
def test_head_node_with_killed_supervisor_fails_alone_and_job_continues(patient_etcd, tmp_path) -> None:
    job = ElectedJob(patient_etcd, "guard", tmp_path / "job")
    try:
        workers = job.wait_until_all_train()
        (guard,) = set(job.launchers[0].processes()) - workers[0] - {job.launchers[0].process.pid}
        os.kill(guard, signal.SIGKILL)
        job.launchers[0].assert_exit(1, 60)
        assert "the guard process on host 127.0.0.1 was killed" in job.launchers[0].output
        job.judge("agent", workers[1] | workers[2])
    finally:
        job.end()


@pytest.mark.long
def test_restarted_head_node_leaves_the_job_to_its_leader_and_may_join(patient_etcd, tmp_path) -> None:
    job = ElectedJob(patient_etcd, "again", tmp_path / "job")
    try:
        left = job.strike("agent")
        again = job.over.begin(0)
        again.wait_for("waiting for the last job: ", timeout=60)
        again.assert_exit(1, 60)
        (line,) = [line for line in again.stderr if line.startswith("kungfu-run: ")]
        assert f"{patient_etcd.url('again')} is used by another kungfu-run; give this job another name" in line
        job.size -= 2
        job.join(0)
        job.size += 2  # the workers that have ended have been members, too
        back = set().union(*job.wait_until_all_train().values())
        assert len(back) == 6
        assert left < back
        job.judge("agent", back)
    finally:
        job.end()


def test_job_of_a_failed_head_node_is_kept_for_its_hosts_for_one_lease(etcd, start_module) -> None:
    url = etcd.url("dead")
    versions = ClusterVersions(clusters={0: CLUSTER}, committed=0)
    snapshot = LeaderSnapshot("job", "one", CLUSTER, (Host("one", 1), Host("other", 1)), versions).to_json()
    keys = open_leadership(url)
    dead = LeadershipLease(keys, "one", 60)
    dead.take(keys.look(), snapshot)
    words = ["-self", "127.0.0.1", "-H", "127.0.0.1:1,127.0.0.2:1", "-port", free_ports(1)[0], "-np", 2, "-w"]
    secret = {"KUNGFU_JOB_SECRET": SECRET}
    new = start_module(
        "ms_kungfu.launcher", *words, "-host-timeout", "5s", "-config-server", url, "true", environment=secret
    )
    new.wait_for("waiting for the last job: ", timeout=60)
    dead.leave()  # as when the lease is over
    LeadershipLease(keys, "other", 60).take(keys.look(), snapshot)
    new.assert_exit(1, 90)
    assert f"{url} is used by another kungfu-run" in new.output
    assert open_store(url).get() is None, "it has written nothing"


def test_two_hosts_that_take_the_lease_elect_one_leader(etcd) -> None:
    url = etcd.url("two")
    one, other = (LeadershipLease(open_leadership(url), host, 60) for host in ("one", "other"))
    seen = open_leadership(url).look()
    one.take(seen, {"step": 0})
    with pytest.raises(LeadershipLostError, match="one has the lease"):
        other.take(seen, {"step": 1})
    one.write({"step": 2})
    one.renew()
    found = open_leadership(url).look()
    assert found.snapshot is not None
    assert (found.holder, found.snapshot["step"], found.since) == ("one", 2, one.since)


def test_returning_host_leads_if_the_lease_is_free_and_not_if_it_is_held(etcd) -> None:
    url = etcd.url("back")
    keys = open_leadership(url)
    one, other = (LeadershipLease(open_leadership(url), host, 60) for host in ("one", "other"))
    one.take(keys.look(), {"step": 0})
    one.leave()  # as when the lease is over
    assert keys.look().holder == ""
    one.renew()
    assert keys.look().holder == "one"
    one.leave()
    one.write({"step": 1})
    assert keys.look().holder == "one"
    one.leave()
    other.take(keys.look(), {"step": 2})
    for act in (one.renew, lambda: one.write({"step": 3})):
        with pytest.raises(LeadershipLostError):
            act()
    found = keys.look()
    assert found.snapshot is not None
    assert (found.holder, found.snapshot["step"]) == ("other", 2)


def test_lost_answer_keeps_the_leadership_lease(etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    url = etcd.url("answers")
    keys = open_leadership(url)
    lease = LeadershipLease(keys, "one", 60)

    def lose_the_answer(act) -> None:
        with monkeypatch.context() as patched:
            real = type(keys).swap

            def swap(self, *arguments):
                real(self, *arguments)
                raise ConnectionError("the answer is lost")

            patched.setattr(type(keys), "swap", swap)
            with pytest.raises(ConnectionError):
                act()

    lose_the_answer(lambda: lease.take(keys.look(), {"step": 0}))
    lease.take(keys.look(), {"step": 0})
    lose_the_answer(lambda: lease.write({"step": 1}))
    lease.write({"step": 2})
    found = keys.look()
    assert found.snapshot is not None
    assert (found.holder, found.snapshot["step"], found.since) == ("one", 2, lease.since)
    lease.renew()
