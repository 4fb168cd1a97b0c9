import signal

import pytest

from ms_kungfu.cluster import WRITER_WHO_EVICTS, Cluster, PeerID
from ms_kungfu.launcher.state.policy import (
    Action,
    Failure,
    Recover,
    Situation,
    Standing,
    WorkerExited,
    bug,
    decide,
    fails_by_itself,
    interrupted,
    leaves,
    peers_to_start,
    revised,
    timed_out,
)

RUNNING = Situation(members=1, leaving=0)
DONE = Situation(members=0, leaving=0)


def exited(code, standing=Standing.MEMBER, error=""):
    return WorkerExited("worker 2 (127.0.0.1:10002, pid 7)", standing, code, error)


def test_the_job_ends_well_when_its_last_worker_has():
    assert decide(exited(0), RUNNING).action is Action.CONTINUE
    verdict = decide(exited(0), DONE)
    assert (verdict.action, verdict.exit_code) == (Action.FINISH, 0)


def test_a_detached_worker_is_waited_for():
    assert decide(exited(0), Situation(members=0, leaving=1)).action is Action.CONTINUE
    assert decide(exited(0, Standing.LEAVING), DONE).action is Action.FINISH


@pytest.mark.parametrize("standing", [Standing.MEMBER, Standing.JOINING])
@pytest.mark.parametrize(
    ("code", "exit_code", "how"),
    [(3, 3, "exited with code 3"), (-9, 137, "was killed by SIGKILL"), (-11, 139, "was killed by SIGSEGV")],
)
def test_a_failing_worker_ends_the_job_with_its_code_and_its_name(standing, code, exit_code, how):
    verdict = decide(exited(code, standing), RUNNING)
    assert (verdict.action, verdict.exit_code) == (Action.FAIL, exit_code)
    assert verdict.reason == f"worker 2 (127.0.0.1:10002, pid 7) {how}"


def test_a_worker_that_has_left_may_fail_without_harm():
    verdict = decide(exited(-9, Standing.LEAVING), RUNNING)
    assert verdict.action is Action.CONTINUE
    assert "had left the cluster and then was killed by SIGKILL" in verdict.reason


def test_a_program_that_cannot_be_run_says_so():
    verdict = decide(exited(127, error="can't run 'x': No such file or directory"), RUNNING)
    assert (verdict.action, verdict.exit_code) == (Action.FAIL, 127)
    assert "can't run 'x'" in verdict.reason


def test_joining_worker_that_never_joined_is_reported():
    assert "does the program call ms_kungfu.init()" in decide(exited(0, Standing.JOINING), RUNNING).reason


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_goes_on_to_the_workers(number):
    verdict = interrupted(number)
    assert (verdict.action, verdict.exit_code) == (Action.FAIL, 128 + number)
    assert verdict.interrupted_by == number
    assert signal.Signals(number).name in verdict.reason


def test_other_ends_name_their_cause():
    assert timed_out(5).exit_code == 124
    assert "-timeout 5 s" in timed_out(5).reason


def test_joining_workers_are_started_unless_the_job_is_ending():
    old, new = PeerID("127.0.0.1", 10000), PeerID("127.0.0.1", 10001)
    cluster = Cluster((old, new), (), 1)
    assert peers_to_start(cluster, {old}, (), finishing=False) == [new]
    assert peers_to_start(cluster, {old, new}, (), finishing=False) == []
    assert peers_to_start(cluster, {old}, (), finishing=True) == []
    assert peers_to_start(cluster, {old}, [new], finishing=False) == []


# ---- deaths that the job survives ----


def surviving(recover, members=2, **more):
    return Situation(members=members, leaving=0, recover=recover, max_restarts=3, **more)


@pytest.mark.parametrize("standing", [Standing.MEMBER, Standing.JOINING])
def test_the_others_go_on_without_a_worker_that_died(standing):
    verdict = decide(exited(-9, standing), surviving(Recover.SHRINK))
    assert verdict.action is Action.SHRINK
    assert verdict.reason == "worker 2 (127.0.0.1:10002, pid 7) was killed by SIGKILL; the others go on without it"
    verdict = decide(exited(1, standing), surviving(Recover.REPLACE))
    assert verdict.action is Action.REPLACE
    assert "a new worker is started" in verdict.reason
    verdict = decide(exited(1, Standing.MEMBER), surviving(Recover.REPLACE, finished=True))  # it would find no member
    assert verdict.action is Action.SHRINK
    assert verdict.reason.endswith("the others go on without it")


def test_joining_worker_that_exits_early_is_not_waited_for():
    for recover in Recover:
        assert decide(exited(0, Standing.JOINING), surviving(recover)).action is Action.SHRINK


def test_a_place_is_filled_anew_only_so_often():
    died = WorkerExited("worker 1", Standing.MEMBER, 3, logs="a.stdout.log, a.stderr.log", restarts=3)
    verdict = decide(died, surviving(Recover.REPLACE))
    assert verdict.action is Action.SHRINK
    assert "refilled 3 times recently (-max-restarts 3), see a.stdout.log, a.stderr.log" in verdict.reason


@pytest.mark.parametrize(("late", "action"), [(1, Action.REPLACE), (2, Action.SHRINK), (3, Action.SHRINK)])
def test_slot_stays_empty_after_two_late_joining_workers(late, action):
    ended = WorkerExited("worker 1", Standing.JOINING, -9, "was not ready to join in time", late=late)
    verdict = decide(ended, surviving(Recover.REPLACE))
    assert verdict.action is action
    assert ("raise KUNGFU_JOIN_TIMEOUT above" in verdict.reason) == (action is Action.SHRINK)


@pytest.mark.parametrize("recover", [Recover.SHRINK, Recover.REPLACE])
def test_first_failure_of_a_failed_job_is_named_and_sets_the_exit_code(recover):
    first = Failure("worker 0 exited with code 7", 7)
    verdict = decide(exited(-9), surviving(recover, members=0, first_failure=first))
    assert (verdict.action, verdict.exit_code) == (Action.FAIL, 7)
    assert verdict.reason == (
        "worker 2 (127.0.0.1:10002, pid 7) was killed by SIGKILL; no worker is left; the first failure: "
        "worker 0 exited with code 7"
    )
    alone = decide(exited(-9), surviving(recover, members=0))
    assert alone.exit_code == 137
    assert alone.reason == "worker 2 (127.0.0.1:10002, pid 7) was killed by SIGKILL"


@pytest.mark.parametrize(
    ("code", "failed"),
    [(1, True), (128, True), (0, False), (-9, False), (128 + 9, False), (128 + 15, False), (255, True)],
)
def test_an_exit_status_that_tells_no_signal_is_the_program_s_failure(code, failed):
    assert fails_by_itself(code) == failed


def test_failed_program_is_reported_once_the_others_have_finished():
    failed = Failure("worker 0 exited with code 3, see w.stderr.log", 3)
    state = Situation(members=0, leaving=0, program_failure=failed, first_failure=failed, finished=True)
    verdict = decide(exited(0), state)
    assert (verdict.action, verdict.exit_code) == (Action.FAIL, 3)
    assert verdict.reason == "the other workers have finished, but worker 0 exited with code 3, see w.stderr.log"


def test_the_job_ends_below_its_smallest_size():
    assert decide(exited(-9), surviving(Recover.SHRINK, min_size=2)).action is Action.SHRINK
    verdict = decide(exited(-9), surviving(Recover.REPLACE, members=1, min_size=2))
    assert (verdict.action, verdict.exit_code) == (Action.FAIL, 137)
    assert verdict.reason.endswith("was killed by SIGKILL; only 1 worker would be left, but -min-np is 2")
    stays = leaves("worker 0", "it got a SIGTERM", True, left=1, min_size=2)
    assert stays.action is Action.CONTINUE  # it was granted, and others have died since
    assert stays.reason == "worker 0 stays: only 1 worker would be left, but -min-np is 2"
    assert leaves("worker 0", "it got a SIGTERM", True, left=2, min_size=2).action is Action.SHRINK


@pytest.mark.parametrize("has_steps", [True, False])
def test_leaving_worker_is_logged_with_its_reason(has_steps):
    reason = leaves("worker 1", "it got a SIGTERM", has_steps, left=1, min_size=1).reason
    said, _, forgotten = reason.partition(". ")
    assert said == "worker 1 is leaving: it got a SIGTERM; the others go on"
    assert forgotten.startswith("Did you forget KungFuElasticCallback") == (not has_steps)


def test_job_ends_once_all_workers_were_terminated():
    """The last to ask may not leave and ends by the signal; those before are still on their way out, or out already."""
    for recover in (Recover.SHRINK, Recover.REPLACE):
        for members, code in ((0, -15), (1, -15), (2, 128 + 15)):
            verdict = decide(exited(code), surviving(recover, members=members, terminated=members))
            assert (verdict.action, verdict.exit_code) == (Action.FAIL, 143)
            assert verdict.reason.endswith("; all remaining workers got a SIGTERM")
        # A worker that stays has the state. Nor is a death of another kind the end: a leaving worker stays then.
        assert decide(exited(-15), surviving(recover, members=2, terminated=1)).action is not Action.FAIL
        assert decide(exited(-9), surviving(recover, members=1, terminated=1)).action is not Action.FAIL
    few = decide(exited(-15), surviving(Recover.REPLACE, members=2, terminated=1, min_size=2))
    assert few.reason.endswith("was killed by SIGTERM; only 1 worker would be left, but -min-np is 2")


def test_worker_that_left_the_others_alone_is_named():
    for recover, members in ((Recover.FAIL, 1), (Recover.SHRINK, 0)):
        state = surviving(recover, members=members, finished=True, first_to_finish="worker 0 (a:1)")
        assert decide(exited(1), state).reason.endswith(
            "exited with code 1; worker 0 (a:1) was the first to end, with code 0"
        )


def test_standbys_are_kept_up_but_not_for_ever():
    for code in (0, 1, -9):
        died = WorkerExited("standby 1 (pid 8)", Standing.STANDBY, code, restarts=2)
        assert decide(died, surviving(Recover.SHRINK)).action is Action.REPLACE
    died = WorkerExited("standby 4 (pid 8)", Standing.STANDBY, 1, logs="s.log", restarts=3)
    verdict = decide(died, surviving(Recover.SHRINK))
    assert verdict.action is Action.SHRINK
    assert verdict.reason.endswith("like 3 others recently; it isn't replaced, see s.log")


# ---- what the launcher writes to the config server ----

A, B, C, D = (PeerID("127.0.0.1", 10000 + i) for i in range(4))
PORTS = range(10000, 10010)


def test_nothing_is_written_without_a_failed_worker():
    assert revised(Cluster((A, B), (), 4), 4, (), [A, B], 0, PORTS) is None


def test_first_the_dead_are_left_out_and_then_their_places_are_filled():
    newest = Cluster((A, B, C), (), 4)
    shrunk = revised(newest, 4, {B}, [A, C], 1, PORTS)
    assert shrunk == Cluster((A, C), (), 5)
    assert revised(shrunk, 5, set(), [A, C], 1, PORTS) == Cluster((A, C, B), (), 6)


@pytest.mark.parametrize("writer", ["jobworkers", WRITER_WHO_EVICTS])
def test_a_revision_has_not_the_writer_of_the_version_it_builds_on(writer):
    shrunk = revised(Cluster((A, B), (), 4, writer=writer), 4, {A}, [B], 1, PORTS)
    assert (shrunk, shrunk.writer) == (Cluster((B,), (), 5), "")


def test_written_cluster_that_cannot_run_is_overwritten():
    assert revised(Cluster((A, B), (), 4), 7, {A}, [B], 0, PORTS) == Cluster((B,), (), 8)
    assert revised(Cluster((A, B), (), 4), 7, (), [A, B], 0, PORTS) == Cluster((A, B), (), 8)


def test_member_with_the_state_is_kept_if_the_others_failed():
    # A wanted cluster kept only B of the members, and B has died before they went over to it.
    assert revised(Cluster((B, C), (), 4), 4, {B}, [A], 0, PORTS) == Cluster((A, C), (), 5)
    assert revised(Cluster((A, B), (), 4), 4, {A, B}, [], 0, PORTS) is None


def test_port_range_without_a_free_port_is_reported():
    with pytest.raises(ValueError, match="port range is too small"):
        revised(Cluster((A, B), (), 4), 4, (), [A, B], 1, range(10000, 10002))


def test_a_leaver_that_is_the_last_to_go_does_not_end_the_job_well():
    died = Failure("worker 0 was killed by SIGKILL", 137)
    state = Situation(members=0, leaving=0, recover=Recover.REPLACE, first_failure=died)
    verdict = decide(exited(0, Standing.LEAVING), state)
    assert (verdict.action, verdict.exit_code) == (Action.FAIL, 137)
    assert verdict.reason == f"no worker is left; the first failure: {died.reason}"
    finished = Situation(members=0, leaving=0, first_failure=died, finished=True)
    assert decide(exited(0), finished).action is Action.FINISH


def test_joining_worker_that_fails_after_a_member_finished_is_not_replaced():
    leavers = surviving(Recover.SHRINK, members=0, finished=True)
    leavers.leaving = 1
    below = surviving(Recover.SHRINK, members=2, finished=True, min_size=3)
    for state in (leavers, below):
        assert decide(exited(1, Standing.JOINING), state).action is Action.CONTINUE
    assert decide(exited(1, Standing.MEMBER), below).action is Action.FAIL


def test_bug_without_a_text_is_reported_by_its_type():
    assert bug(AssertionError()) == "AssertionError"
    assert bug(KeyError("x")) == "KeyError: 'x'"


@pytest.mark.parametrize(("code", "action"), [(-signal.SIGSEGV, Action.SHRINK), (1, Action.REPLACE)])
def test_crash_after_the_programs_end_needs_no_replacement(code, action):
    event = WorkerExited("worker 1", Standing.MEMBER, code, has_ended=True)
    verdict = decide(event, Situation(members=2, recover=Recover.REPLACE, max_restarts=3))
    assert verdict.action is action
    assert ("no worker replaces it" in verdict.reason) is (action is Action.SHRINK)
