"""Workers die, hang, are evicted and replaced under kungfu-run; the others go on in the same processes."""

import contextlib
import os
import re
import resource
import signal
import sys
import time
from pathlib import Path

import pytest
from launching import IN_VERSION, RECOVERY_PROGRAM, Job
from test_watch import ExternalServer

from ms_kungfu._processes import descendants
from ms_kungfu.broker_protocol import BrokerClient
from ms_kungfu.errors import KungFuError
from tests.ports import free_port

pytestmark = pytest.mark.timeout(240)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_survivors_go_on_without_a_killed_rank(job, rank):
    one = job("-np", 3)
    pids = one.in_version(0, 3)
    killed = pids.pop(rank)
    os.kill(killed, signal.SIGKILL)
    one.wait_for(rf"worker {rank} .* was killed by SIGKILL; the others go on without it")
    assert sorted(one.in_version(1, 2).values()) == sorted(pids.values())
    assert one.finish(2) == set(pids.values())


def test_prefix_is_the_rank_of_the_version_that_the_worker_is_in(job):
    one = job("-np", 3, "-prefix", "rank")
    line = r"^\[(.+?)\] in version {} rank (\d) of {} pid (\d+)"
    first = one.wait_for(line.format(0, 3), 3)
    pids = {int(match[2]): int(match[3]) for match in first}
    os.kill(pids[0], signal.SIGKILL)
    second = one.wait_for(line.format(1, 2), 2)
    assert all(match[1] == match[2] for match in [*first, *second])
    assert one.command("resize", 1)[0] == 0
    (left,) = one.wait_for(r"^\[(.+?)\] left pid (\d+)")
    assert (left[1], int(left[2])) == ("was 1", pids[2])
    one.program.signal(signal.SIGUSR1)
    one.program.assert_exit(0)


def test_two_die_at_once_and_later_another_one(job):
    one = job("-np", 4)
    pids = one.in_version(0, 4)
    for rank in (0, 2):
        os.kill(pids.pop(rank), signal.SIGKILL)
    one.wait_for("cluster committed: version=2|cluster committed: version=1 workers=2")
    one.wait_for(r"^in version \d+ rank \d of 2 ", 2)
    os.kill(pids.pop(1), signal.SIGKILL)
    one.wait_for(r"^in version \d+ rank 0 of 1 ")
    assert one.finish(1) == {pids[3]}


def test_a_dead_worker_is_replaced_and_the_replacement_gets_the_state(job):
    one = job("-np", 2, "-recover", "replace")
    pids = one.in_version(0, 2)
    os.kill(pids[0], signal.SIGKILL)
    one.wait_for("the others go on, and a new worker is started")
    assert one.in_version(1, 1) == {0: pids[1]}
    found = one.in_version(2, 2)
    assert found[0] == pids[1]
    assert found[1] not in pids.values()
    # A member that trains on does not wait for the joining worker.
    steps = [int(m[3]) for m in one.wait_for(r"^in version (\d) rank (\d) of \d pid \d+ step (\d+)", 5)]
    assert one.finish(2) == {pids[1], found[1]}
    assert steps[-1] > steps[2]


def test_joining_worker_may_fail_before_it_joins(job):
    one = job("-np", 2, program=["fail=2"])
    pids = one.in_version(0, 2)
    assert one.command("resize", "4")[0] == 0
    one.wait_for(r"worker 2 .* exited with code 5; the others go on without it")
    found = one.in_version(2, 3)
    assert {found[0], found[1]} == set(pids.values())
    # A program that fails isn't ignored, though the others go on.
    one.finish(3, code=5)
    assert re.search(r"program failed: worker 2 .* exit_code=5\b", one.program.output, re.M)
    assert re.search(r"the other workers have finished, but worker 2 .* exited with code 5$", one.program.output, re.M)


def test_member_may_fail_while_a_joining_worker_gets_ready(job):
    one = job("-np", 2, program=["slow=1"])
    pids = one.in_version(0, 2)
    one.command("resize", "3")
    one.wait_for("^parked")
    os.kill(pids[0], signal.SIGKILL)
    found = one.in_version(2, 2)
    assert found[0] == pids[1]
    one.finish(2)


def test_members_train_until_the_joining_workers_are_ready(job):
    one = job("-np", 1, program=["slow=1"])
    one.in_version(0, 1)
    one.command("resize", "2")
    one.wait_for("^parked .* rank 1 of 2")
    begin = time.monotonic()
    one.in_version(1, 2)
    steps = sorted(int(m[1]) for m in one.wait_for(r"^in version .* step (\d+)", 3))
    assert steps[-1] > 20  # of 5 ms and more each; the newcomer took a second
    assert time.monotonic() - begin < 30
    one.finish(2)


def test_joining_worker_that_does_not_get_ready_is_removed(job):
    one = job("-np", 1, program=["slow=1000"], environment={"KUNGFU_JOIN_TIMEOUT": "2"})
    pids = one.in_version(0, 1)
    one.command("resize", "2")
    one.wait_for(
        r"worker 1 .* was not ready to join cluster version 1 within 2 s \(KUNGFU_JOIN_TIMEOUT\) and was killed"
    )
    assert one.in_version(2, 1) == {0: pids[0]}
    one.finish(1)


def test_slot_stays_empty_after_two_late_joining_workers(job):
    one = job("-np", 1, "-recover", "replace", program=["slow=1000"], environment={"KUNGFU_JOIN_TIMEOUT": "1"})
    one.in_version(0, 1)
    one.command("resize", "2")
    one.wait_for(
        r"was killed, like the previous worker in its slot; the others go on without it: raise "
        "KUNGFU_JOIN_TIMEOUT above"
    )
    one.in_version(4, 1)
    one.finish(1)


def test_the_job_ends_below_its_smallest_size(job):
    one = job("-np", 3, "-min-np", 2)
    pids = one.in_version(0, 3)
    code, output = one.command("resize", "1")
    assert code == 1
    assert "size 1 is less than -min-np 2" in output
    os.kill(pids[1], signal.SIGKILL)
    one.in_version(1, 2)
    os.kill(pids[2], signal.SIGKILL)
    one.program.assert_exit(137)
    one.program.assert_gone(time.monotonic())
    assert one.program.stderr[-1].endswith("was killed by SIGKILL; only 1 worker would be left, but -min-np is 2")


def test_when_all_die_the_first_is_named(job):
    one = job("-np", 2)
    pids = one.in_version(0, 2)
    os.kill(pids[1], signal.SIGSEGV)
    one.in_version(1, 1)
    os.kill(pids[0], signal.SIGKILL)
    one.program.assert_exit(139)
    one.program.assert_gone(time.monotonic())
    assert re.search(
        r"worker 0 .* was killed by SIGKILL; no worker is left; the first failure: worker 1 .* by SIGSEGV$",
        one.program.stderr[-1],
    )


def test_with_recover_fail_the_first_death_ends_the_job(job):
    one = job("-np", 2, "-recover", "fail")
    pids = one.in_version(0, 2)
    os.kill(pids[1], signal.SIGKILL)
    one.program.assert_exit(137)
    assert re.search(r"worker 1 \(.*\) was killed by SIGKILL$", one.program.stderr[-1])


def test_a_worker_that_keeps_dying_is_started_only_so_often(job, tmp_path):
    flags = ["-recover", "replace", "-max-restarts", 2, "-logdir", tmp_path / "logs"]
    one = job("-np", 2, *flags, program=["fail=1"])
    pids = one.in_version(0, 2)
    os.kill(pids[1], signal.SIGKILL)
    told = one.wait_for(r"its slot was refilled 2 times recently \(-max-restarts 2\), see (\S+), (\S+)$", timeout=60)[0]
    assert Path(told[1]).exists()
    assert len(one.wait_for(r"exited with code 5", 2)) == 2
    one.wait_for(r"^in version \d+ rank 0 of 1")
    one.finish(1, code=5)


def test_a_rank_is_evicted_by_hand(job):
    one = job("-np", 3)
    pids = one.in_version(0, 3)
    code, output = one.command("evict", "0")
    assert code == 0
    assert output == "cluster version 1: 3 -> 2 workers without 127.0.0.1:10000; the job follows at its next step"
    assert one.in_version(1, 2) == {0: pids[1], 1: pids[2]}
    one.wait_for(rf"^left pid {pids[0]} step \d+ evicted$")
    assert one.command("evict", "2") == (
        1,
        "kungfu-run evict: there is no rank 2: cluster version 1 has 2 workers",
    )
    assert one.finish(2) == {pids[1], pids[2]}


def test_a_policy_evicts_a_rank(job):
    one = job("-np", 3, program=["evict=5:1"])
    pids = one.in_version(0, 3)
    assert one.in_version(1, 2) == {0: pids[0], 1: pids[2]}
    told = one.wait_for(r"cluster committed: version=1 workers=2 step=(\d+)$")[0]
    assert one.wait_for(rf"^left pid {pids[1]} step (\d+) evicted$")[0][1] == told[1]
    assert one.finish(2) == {pids[0], pids[2]}


def test_a_worker_that_gets_sigterm_leaves_and_exits_with_0(job):
    one = job("-np", 2)
    pids = one.in_version(0, 2)
    os.kill(pids[0], signal.SIGTERM)
    assert one.in_version(1, 1) == {0: pids[1]}
    one.wait_for(rf"^left pid {pids[0]} step \d+$")
    one.wait_for(r"worker exited: worker 0 .* code=0")
    os.kill(pids[1], signal.SIGTERM)  # no worker is left to go on
    one.program.assert_exit(143)
    one.program.assert_gone(time.monotonic())


def test_starts_without_descriptors_are_retried_and_can_be_canceled(kungfu_run, start_module):
    def few_descriptors():
        resource.setrlimit(resource.RLIMIT_NOFILE, (48, 48))

    flags = ["-np", 1, "-w", "-recover", "replace", "-max-restarts", 100]
    one = Job(kungfu_run(*flags, sys.executable, RECOVERY_PROGRAM, preexec_fn=few_descriptors), start_module)
    one.in_version(0, 1)
    assert one.command("resize", "16")[0] == 0
    one.wait_for(r"worker 15 .* was not started, .*Too many open files; the others go on, and a new worker is started")
    joined = one.wait_for(r"^in version (\d+) rank 1 of (\d+) pid", timeout=60)[0]
    assert 1 < int(joined[2]) < 16
    code, output = one.command("resize", "1")
    assert code == 0, output
    # Also in version 0. A start that fails just now may have written one version more than the command's.
    one.wait_for(r"^in version \d+ rank 0 of 1 ", 2)
    assert "-max-restarts" not in one.program.output  # 100 pauses of up to 5 s take 8 minutes
    assert "was killed" not in one.program.output
    one.finish(1)


@pytest.mark.parametrize("flags", [(), ("-recover", "replace")], ids=["shrink", "replace"])
def test_when_all_workers_get_sigterm_the_job_ends_in_one_way(job, flags):
    one = job("-np", 3, *flags)
    for pid in one.in_version(0, 3).values():
        os.kill(pid, signal.SIGTERM)
    one.program.assert_exit(143)
    one.program.assert_gone(time.monotonic())
    assert "interrupted by SIGTERM at worker " in one.program.stderr[-1]


def test_sigterm_to_all_ends_the_job_though_one_dies_otherwise(job):
    """Both that can leave are granted it while the third is thought to go on."""
    one = job("-np", 3, "-peer-timeout", "1s")
    pids = one.in_version(0, 3)
    os.kill(pids[2], signal.SIGSTOP)
    for pid in pids.values():
        os.kill(pid, signal.SIGTERM)
    one.program.assert_exit(137)
    one.program.assert_gone(time.monotonic())
    assert any("it got SIGTERM, and no other worker remains that could go on" in line for line in one.program.stderr)


def test_sigterm_ends_a_worker_that_was_evicted_and_is_needed_again(job):
    one = job("-np", 2)
    pids = one.in_version(0, 2)
    os.kill(pids[1], signal.SIGSTOP)  # so the step doesn't end
    assert one.command("evict", "0")[0] == 0
    one.wait_for("cluster desired: version=1 workers=1")
    os.kill(pids[0], signal.SIGTERM)
    os.kill(pids[1], signal.SIGKILL)  # before or after the other one has asked to leave
    # If the launcher knows of the SIGKILL when worker 0 asks, the SIGTERM ends the job; else the SIGKILL does.
    code = one.program.wait(60.0)
    assert code in (137, 143), one.program.output
    one.program.assert_gone(time.monotonic())


def test_policy_that_evicts_too_many_is_refused_and_the_job_continues(job):
    one = job("-np", 2, "-min-np", 2, program=["evict=5:1"])
    pids = one.in_version(0, 2)
    one.wait_for(r"not evicted: \S+ can't leave: only 1 worker would be left, but -min-np is 2$")
    assert one.finish(2) == {pids[0], pids[1]}


def test_the_launchers_own_signal_still_ends_the_job_at_once(job):
    one = job("-np", 2)
    one.in_version(0, 2)
    begin = time.monotonic()
    one.program.signal(signal.SIGTERM)
    one.program.assert_exit(143)
    one.program.assert_gone(begin)
    assert "left pid" not in one.program.output


@pytest.mark.parametrize("rank", [0, 1])
def test_stopped_worker_is_killed_and_removed(job, rank):
    one = job("-np", 2, "-peer-timeout", "1s")
    pids = one.in_version(0, 2)
    os.kill(pids[rank], signal.SIGSTOP)
    one.wait_for(rf"worker {rank} .* hung for 1 s \(-peer-timeout\) and was killed; the others go on without it")
    assert one.in_version(1, 1) == {0: pids[1 - rank]}
    assert one.finish(1) == {pids[1 - rank]}


@pytest.mark.parametrize("rank", [0, 1])
def test_stuck_worker_is_ended_and_its_stack_is_shown(job, tmp_path, rank):
    """Its heart beats; the others don't give up meanwhile."""
    limits = {"KUNGFU_COLLECTIVE_TIMEOUT": "12"}  # of which the launcher has 5 s, enough on a busy machine, too
    one = job("-np", 3, program=[f"loop=5:{rank}:{tmp_path / 'never'}"], environment=limits)
    pids = one.in_version(0, 3)
    one.wait_for(rf"stuck worker: worker {rank} .* awaited_by=rank \d,rank \d .* stack=requested action=end it")
    one.wait_for(r"File .*recovery.py\"?, line \d+ in loop_alone")
    one.wait_for(
        rf"worker {rank} .* did not reach the collective in which ranks \d, \d wait and was killed .*; "
        "the others go on without it"
    )
    assert one.finish(2) == {pid for each, pid in pids.items() if each != rank}
    assert "CollectiveTimeoutError" not in one.program.output


def test_stuck_worker_without_watch_ends_the_job_with_its_stack(job, tmp_path):
    one = job(
        "-np", 2, watch=False, program=[f"loop=5:1:{tmp_path / 'never'}"],
        environment={"KUNGFU_COLLECTIVE_TIMEOUT": "12"},
    )  # fmt: skip
    one.wait_for(r"stuck worker: worker 1 .* stack=requested action=none")
    one.wait_for(r"File .*recovery.py\"?, line \d+ in loop_alone")
    one.program.assert_exit(1)
    one.program.assert_gone(time.monotonic())
    assert re.search(r"CollectiveTimeoutError: .*no data from rank 1 ", one.program.output)


def test_job_that_is_frozen_goes_on_as_if_nothing_had_been(job, tmp_path):
    """All of its processes, for longer than any of its deadlines, while one rank waits for the other."""
    told = tmp_path / "go on"
    limits = {"KUNGFU_COLLECTIVE_TIMEOUT": "6", "KUNGFU_JOIN_TIMEOUT": "6"}
    one = job("-np", 2, "-peer-timeout", "5s", program=[f"loop=5:1:{told}"], environment=limits)
    pids = one.in_version(0, 2)
    one.wait_for("^loops")
    everybody = [one.program.process.pid, *descendants(one.program.process.pid)]
    for pid in everybody:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(8)
    for pid in everybody:
        os.kill(pid, signal.SIGCONT)
    told.touch()
    assert one.finish(2) == set(pids.values())


def test_stopped_joining_worker_and_standby_are_killed(job):
    one = job("-np", 1, "-recover", "replace", "-standby", 1, "-peer-timeout", "1s", program=["slow=1000"])
    pids = one.in_version(0, 1)
    standby = int(one.wait_for(r"worker started: standby 1 \(pid (\d+)\)")[0][1])
    os.kill(standby, signal.SIGSTOP)
    one.wait_for(r"standby 1 .* hung for 1 s \(-peer-timeout\) and was killed before it was needed")
    one.wait_for(r"worker started: standby 2 \(pid (\d+)\)")
    one.command("resize", "3")
    joining_worker = int(one.wait_for(r"worker started: worker 2 \(.*, pid (\d+)\)")[0][1])
    os.kill(joining_worker, signal.SIGSTOP)
    one.wait_for(r"worker 2 .* hung for 1 s \(-peer-timeout\) and was killed; the others go on")
    assert one.finish(1) == set(pids.values())


def test_joining_workers_that_end_with_the_job_are_not_reported(job, tmp_path):
    one = job("-np", 1, "-logdir", tmp_path / "logs", program=["slow=1000"])
    pids = one.in_version(0, 1)
    one.command("resize", "2")
    one.wait_for(r"worker started: worker 1 \(.*, pid \d+\)")
    assert one.finish(1) == set(pids.values())
    assert "worker logs: " not in one.program.output


def test_a_fixed_number_of_cores_also_for_standbys_and_after_deaths(job):
    one = job("-np", 2, "-recover", "replace", "-standby", 1, "-cores-per-worker", 1)
    pids = one.in_version(0, 2)
    standby = int(one.wait_for(r"worker started: standby 1 \(pid (\d+)\)")[0][1])
    one.wait_for("worker ready: standby 1")
    living = [pids[0], pids[1], standby]
    assert [len(mask) for pid in living for mask in masks_of(pid)] == [1] * 3
    os.kill(pids[0], signal.SIGKILL)
    after = one.in_version(2, 2)
    assert standby in after.values()
    assert [len(mask) for pid in after.values() for mask in masks_of(pid)] == [1] * 2
    assert one.finish(2) == set(after.values())


def test_worker_started_with_more_cores_gets_the_common_number_on_request(job):
    one = job("-np", 1, "-standby", 1)
    pids = one.in_version(0, 1)
    standby = int(one.wait_for(r"worker started: standby 1 \(pid (\d+)\)")[0][1])
    one.wait_for("worker ready: standby 1")
    cores = len(os.sched_getaffinity(0))
    assert {len(mask) for pid in (pids[0], standby) for mask in masks_of(pid)} == {cores}
    environment = Path(f"/proc/{pids[0]}/environ").read_text()
    given = dict(line.partition("=")[::2] for line in environment.split("\0"))
    broker = BrokerClient(given["KUNGFU_BROKER"], bytes.fromhex(given["KUNGFU_JOB_SECRET"]))
    assert broker.fix_cores(1, 30) == 1
    assert {len(mask) for pid in (pids[0], standby) for mask in masks_of(pid)} == {1}
    assert broker.fix_cores(cores + 1, 30) == 1  # it is fixed already
    with pytest.raises(KungFuError, match="a message is malformed: .*>= 1"):
        broker.fix_cores(0, 30)
    assert one.finish(1) == set(pids.values())


def masks_of(pid):
    """Return the sets of cores that the threads of a process may run on."""
    found = set()
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(ProcessLookupError):  # this thread has ended
            found.add(frozenset(os.sched_getaffinity(int(task))))
    return found


def test_a_standby_takes_the_place_of_the_dead(job):
    one = job("-np", 2, "-recover", "replace", "-standby", 1)
    pids = one.in_version(0, 2)
    standby = int(one.wait_for(r"worker started: standby 1 \(pid (\d+)\)")[0][1])
    one.wait_for("worker ready: standby 1")
    assert "parked" not in one.program.output  # what a standby prints is shown when it is needed
    os.kill(pids[1], signal.SIGKILL)
    one.wait_for(rf"standby used: standby=1 rank=1 peer=127.0.0.1:10001 pid={standby}")
    assert one.in_version(2, 2) == {0: pids[0], 1: standby}
    one.wait_for(f"^parked pid {standby}")
    one.wait_for(r"worker started: standby 2 \(pid (\d+)\)")
    uids = {m[4] for m in one.wait_for(IN_VERSION.format(2, 2), 2)}
    host = 0x7F000001 << 16  # 127.0.0.1
    assert uids == {str(host | 10000), str(2 << 48 | host | 10001)}
    assert one.finish(2) == {pids[0], standby}


def test_schedule_is_followed_once_the_joining_workers_are_ready(job):
    one = job("-np", 1, program=["schedule=10:3"])
    one.in_version(0, 1)
    steps = [int(m[3]) for m in one.wait_for(IN_VERSION.format(1, 3), 3)]
    assert len(set(steps)) == 1
    assert steps[0] > 10
    one.finish(3)


def test_a_schedule_may_be_waited_for(job):
    one = job("-np", 1, program=["schedule=10:3,15:2", "wait"])
    assert {m[3] for m in one.wait_for(IN_VERSION.format(1, 3), 3)} == {"10"}
    assert {m[3] for m in one.wait_for(IN_VERSION.format(2, 2), 2)} == {"15"}
    one.finish(2)


# ---- a config server of its own that goes away ----


@pytest.fixture
def external(start_module, tmp_path):
    return ExternalServer(start_module, tmp_path / "run", free_port())


def test_failures_are_survived_and_resizes_wait_without_the_config_server(job, external):
    # The schedule's wish comes when the server is gone.
    one = job("-np", 3, "-config-server", external.url, program=["schedule=300:1"])
    pids = one.in_version(0, 3)
    external.program.kill_all()
    one.wait_for("The job goes on; changes of the cluster wait")
    os.kill(pids[0], signal.SIGKILL)
    one.wait_for("the store receives the change later")
    one.wait_for("resize waits: workers=1 .* Training continues", timeout=60)
    external.start()
    one.wait_for(r"^in version \d+ rank 0 of 1 ", timeout=60)
    one.program.signal(signal.SIGUSR1)
    one.program.assert_exit(0)


IN_CONTEXT = """
import sys
import numpy as np
import ms_kungfu as kf
with kf.KungFuContext(device="CPU"):
    for step in range(10):
        if step == 5 and kf.current_rank() == 1:
            raise RuntimeError("of the program's own")
        total = kf.comm.all_reduce(np.ones(3))
    print("finished with", int(total[0]), flush=True)
print("beyond", kf.using_kungfu(), flush=True)
"""


def test_worker_that_fails_inside_a_context_is_removed(kungfu_run, script):
    job = kungfu_run("-np", 3, "-w", *script(IN_CONTEXT))
    job.wait_for(r"worker 1 .* exited with code 1; the others go on without it")
    assert len(job.wait_for(r"^finished with 2$", 2)) == 2
    job.wait()
    assert "has finished and left" not in job.output


TWICE = """
import sys
import numpy as np
import ms_kungfu as kf
print(sys.argv[1], int(kf.comm.all_reduce(np.ones(1))[0]), flush=True)
"""


def test_two_programs_in_one_worker_raise_stale_cluster_error(kungfu_run, script):
    python, program = script(TWICE)
    job = kungfu_run("-np", 2, "sh", "-c", f"{python} {program} first && {python} {program} second")
    assert len(job.wait_for(r"^first 2$", 2)) == 2
    job.wait_for(
        r"StaleClusterError: rank \d of cluster version 0 has joined already, in another program of this worker"
    )
    job.assert_exit(1)


EARLY = """
import sys
import numpy as np
import ms_kungfu as kf
for step in range(9):
    kf.comm.all_reduce(np.ones(1))
    if step == 4 and kf.current_rank() == 1:
        sys.exit()
"""


@pytest.mark.parametrize("flags", [(), ("-w",)], ids=["fixed", "watch"])
def test_worker_that_left_early_is_named_at_the_end(kungfu_run, script, flags):
    job = kungfu_run("-np", 3, *flags, *script(EARLY))
    job.assert_exit(1)
    assert re.search(r"exited with code 1; worker 1 \(.*\) was the first to end, with code 0$", job.stderr[-1])


ALONE = """
import signal
import ms_kungfu as kf
if kf.current_rank() == 0:
    kf.resize(1)
while True:  # its own wait would end at the same deadline, and the first rank to say so is heard by all
    signal.pause()
"""


def test_worker_that_resizes_alone_learns_that_all_have_to(kungfu_run, script):
    """Without recovery: with it the launcher ends the rank that doesn't come."""
    flags = ["-np", 2, "-w", "-recover", "fail"]
    job = kungfu_run(*flags, *script(ALONE), environment={"KUNGFU_COLLECTIVE_TIMEOUT": "2"})
    job.wait_for(r"CollectiveTimeoutError: .*kungfu/resize \(all ranks must call it\)")
    job.signal(signal.SIGTERM)
    assert job.wait() != 0


BY_HAND = """
import os, signal
import numpy as np
import ms_kungfu as kf
from ms_kungfu import membership
kf.init()
for step in range(3):
    if step == 2 and kf.current_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    kf.comm.all_reduce(np.ones(3))
assert kf.cluster_version() == 0
kf.resize(2)
assert kf.cluster_version() > 0
print("of version 0:", membership.participants_of(0), "since then:", membership.take_participants(), flush=True)
"""


def test_manual_resize_keeps_the_participants_of_the_step(kungfu_run, script):
    job = kungfu_run("-np", 3, "-w", *script(BY_HAND))
    assert len(job.wait_for(r"^of version 0: \[0, 1\] since then: \[0, 1\]$", 2)) == 2
    job.assert_exit(0)


def test_worker_that_crashes_at_exit_is_not_replaced(kungfu_run, script, tmp_path):
    program = script(f"""
import atexit, os, signal, time
import ms_kungfu as kf
kf.init()
rank = kf.current_rank()
kf.comm.barrier()
if rank == 1:
    atexit.register(os.kill, os.getpid(), signal.SIGSEGV)
else:
    while not os.path.exists({str(tmp_path / "go")!r}):
        time.sleep(0.01)
""")
    job = kungfu_run("-np", 3, "-w", "-recover", "replace", *program)
    job.wait_for("was killed by SIGSEGV after its program had ended; no worker replaces it")
    job.wait_for("cluster desired: version=1 workers=2")
    (tmp_path / "go").touch()
    job.assert_exit(0)
    assert len(re.findall("worker started: ", job.output)) == 3
