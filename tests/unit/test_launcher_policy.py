import signal

import pytest

from ms_kungfu.elastic.cluster import Cluster, PeerID
from ms_kungfu.launcher.policy import (
    Decision,
    GuardLost,
    Interrupted,
    JobState,
    Standing,
    TimedOut,
    WorkerExited,
    decide,
    peers_to_start,
)

RUNNING = JobState(members=1, leaving=0, keep=False)
DONE = JobState(members=0, leaving=0, keep=False)


def exited(code, standing=Standing.MEMBER, error=""):
    return WorkerExited("worker 2 (127.0.0.1:10002, pid 7)", standing, code, error)


def test_the_job_ends_well_when_its_last_worker_has():
    assert decide(exited(0), RUNNING).decision is Decision.CONTINUE
    verdict = decide(exited(0), DONE)
    assert (verdict.decision, verdict.exit_code) == (Decision.FINISH, 0)


def test_a_detached_worker_is_waited_for():
    assert decide(exited(0), JobState(members=0, leaving=1, keep=False)).decision is Decision.CONTINUE
    assert decide(exited(0, Standing.LEAVING), DONE).decision is Decision.FINISH


def test_keep_waits_for_the_next_cluster():
    assert decide(exited(0), JobState(members=0, leaving=0, keep=True)).decision is Decision.REST


@pytest.mark.parametrize("standing", [Standing.MEMBER, Standing.JOINING])
@pytest.mark.parametrize(
    ("code", "exit_code", "how"),
    [(3, 3, "exited with code 3"), (-9, 137, "was killed by SIGKILL"), (-11, 139, "was killed by SIGSEGV")],
)
def test_a_failing_worker_ends_the_job_with_its_code_and_its_name(standing, code, exit_code, how):
    verdict = decide(exited(code, standing), RUNNING)
    assert (verdict.decision, verdict.exit_code) == (Decision.FAIL, exit_code)
    assert verdict.reason == f"worker 2 (127.0.0.1:10002, pid 7) {how}"


def test_a_worker_that_has_left_may_fail_without_harm():
    verdict = decide(exited(-9, Standing.LEAVING), RUNNING)
    assert verdict.decision is Decision.CONTINUE
    assert "had left the cluster and then was killed by SIGKILL" in verdict.reason


def test_a_program_that_cannot_be_run_says_so():
    verdict = decide(exited(127, error="can't run 'x': No such file or directory"), RUNNING)
    assert (verdict.decision, verdict.exit_code) == (Decision.FAIL, 127)
    assert "can't run 'x'" in verdict.reason


def test_a_newcomer_that_never_joined_is_told_about():
    assert "does the program call ms_kungfu.init()" in decide(exited(0, Standing.JOINING), RUNNING).reason


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_goes_on_to_the_workers(number):
    verdict = decide(Interrupted(number), RUNNING)
    assert (verdict.decision, verdict.exit_code) == (Decision.FAIL, 128 + number)
    assert verdict.signal_to_workers == number
    assert signal.Signals(number).name in verdict.reason


def test_other_ends_name_their_cause():
    assert decide(TimedOut(5), RUNNING).exit_code == 124
    assert "-timeout 5 s" in decide(TimedOut(5), RUNNING).reason
    assert decide(GuardLost(), RUNNING).decision is Decision.FAIL


def test_newcomers_are_started_unless_the_job_is_ending():
    old, new = PeerID("127.0.0.1", 10000), PeerID("127.0.0.1", 10001)
    cluster = Cluster((old, new), (), 1)
    assert peers_to_start(cluster, {old}, ending=False) == [new]
    assert peers_to_start(cluster, {old, new}, ending=False) == []
    assert peers_to_start(cluster, {old}, ending=True) == []
