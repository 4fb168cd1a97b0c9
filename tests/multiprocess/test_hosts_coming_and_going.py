"""Hosts that leave a training, and join one, while it runs. Addresses of this machine's loopback play the hosts."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import sys
import time

import pytest
from launching import IN_VERSION, RECOVERY_PROGRAM
from test_hosts import GONE_WITHIN_S, SECRET, A, B, C, all_in_version, embedded, finish, hosts, put  # noqa: F401
from test_hosts_loss import lose

from ms_kungfu._version import VERSION
from ms_kungfu.cluster_store import open_store

pytestmark = pytest.mark.timeout(120)
TRAINS = [sys.executable, RECOVERY_PROGRAM]
LEFT = "host left: host=this"


def start(hosts, size, *flags, head=A, slots=None, program=()):  # noqa: F811
    watching, url = embedded(head)
    words = [*TRAINS, *program]
    job = hosts(words, *watching, "-np", size, *flags, slots=slots or dict.fromkeys((A, B, C), 2))
    job.url = url
    return job


def send_away(job, host):
    """It ends well, and nothing of it is left. What it printed stays."""
    job[host].signal(signal.SIGTERM)
    job[host].assert_exit(0)
    deadline = time.monotonic() + GONE_WITHIN_S
    while job[host].processes():
        assert time.monotonic() < deadline, job[host].processes()
        time.sleep(0.01)
    assert LEFT in job[host].output
    return job.runs.pop(host)


def join(job, start_module, host, slots=2):
    words = ["-join", job.url, "-self", f"{host}:{slots}"]
    return start_module("ms_kungfu.launcher", *words, environment={"KUNGFU_JOB_SECRET": SECRET})


def join_well(job, start_module, host, slots=2):
    job.runs[host] = join(job, start_module, host, slots)
    wait_until_it_is_there(job, host)


def wait_until_it_is_there(job, host):
    job[host].wait_for("host registered: head_node=", timeout=60)
    deadline = time.monotonic() + 30
    while host not in (open_store(job.url).get().slots or {}):
        assert time.monotonic() < deadline, job.output
        time.sleep(0.01)


def resize(job, start_module, size, code=0):
    command = start_module(
        "ms_kungfu.launcher", "resize", size, "-config-server", job.url, environment={"KUNGFU_JOB_SECRET": SECRET}
    )
    assert command.wait() == code, command.output
    return command.output


def newest(job, counts):
    """Rank -> process ID of the workers in the newest version that the store has, of which each host shows so many."""
    deadline = time.monotonic() + 60
    while True:
        cluster = open_store(job.url).get()
        if {host: sum(w.host == host for w in cluster.workers) for host in cluster.hosts} == counts:
            pattern = re.compile(IN_VERSION.format(cluster.version, cluster.size))
            found = [m for host in counts for m in filter(None, map(pattern.search, list(job[host].lines)))]
            if len(found) == cluster.size and open_store(job.url).get().version == cluster.version:
                return {int(match[1]): int(match[2]) for match in found}
        assert time.monotonic() < deadline, f"{cluster}\n{job.output}"
        time.sleep(0.02)


# ---- leaving ----


@pytest.mark.parametrize(("head", "leaver"), [(A, C), pytest.param(B, A, marks=pytest.mark.long)])
def test_host_with_sigterm_leaves_after_a_step_and_the_others_continue(hosts, head, leaver):  # noqa: F811
    job = start(hosts, 6, head=head)
    before = all_in_version(job, 0, {A: 2, B: 2, C: 2})
    gone = send_away(job, leaver)
    left = gone.wait_for(r"^left pid (\d+) step (\d+)", 2)
    after = newest(job, dict.fromkeys(job.runs, 2))
    assert {*after.values()} | {int(match[1]) for match in left} == {*before.values()}
    assert f"host left: host={leaver}" in job[head].output
    assert "the others go on without it" not in job.output
    assert leaver not in open_store(job.url).get().slots
    job[head].signal(signal.SIGUSR1)
    job.assert_exit(0)
    ends = job.wait_for(r"^finished pid \d+ (step \d+ weights \w+)", dict.fromkeys(job.runs, 2))
    assert len({match[1] for match in ends}) == 1


@pytest.mark.long
def test_leaving_host_of_a_job_without_recovery_causes_no_failure(hosts):  # noqa: F811
    job = start(hosts, 4, "-recover", "fail", slots={A: 2, B: 2})
    all_in_version(job, 0, {A: 2, B: 2})
    send_away(job, B)
    newest(job, {A: 2})
    finish(job, {A: 2})


def test_a_host_without_workers_leaves_at_once(hosts, start_module):  # noqa: F811
    job = start(hosts, 2)
    all_in_version(job, 0, {A: 1, B: 1})
    send_away(job, C)
    newest(job, {A: 1, B: 1})
    assert "5 workers: the job's hosts have 4 slots" in resize(job, start_module, 5, code=1)
    finish(job, {A: 1, B: 1})


@pytest.mark.long
def test_two_hosts_leave_at_once(hosts):  # noqa: F811
    job = start(hosts, 6)
    all_in_version(job, 0, {A: 2, B: 2, C: 2})
    for host in (B, C):
        job[host].signal(signal.SIGTERM)
    for host in (B, C):
        job[host].assert_exit(0)
        job[host].wait_for("^left pid", 2)
        del job.runs[host]
    newest(job, {A: 2})
    finish(job, {A: 2})


@pytest.mark.long
def test_host_leaving_during_growth_takes_its_joining_workers_along(hosts, start_module):  # noqa: F811
    job = start(hosts, 3, program=["slow=2"])
    before = all_in_version(job, 0, {A: 1, B: 1, C: 1})
    resize(job, start_module, 6)
    job[B].wait_for("^parked")
    send_away(job, B)
    after = newest(job, {A: 2, C: 2})
    assert {before[0], before[2]} < {*after.values()}
    finish(job, {A: 2, C: 2})


@pytest.mark.long
def test_request_for_workers_on_a_leaving_host_is_answered_with_the_reason(hosts):  # noqa: F811
    job = start(hosts, 2, "-leave-grace", "20s", slots={A: 1, B: 2}, program=["hold=400:go"])
    all_in_version(job, 0, {A: 1, B: 1})
    # They wait before the 400th step's end, so no worker can leave.
    deadline = time.monotonic() + 60
    job[B].signal(signal.SIGTERM)
    job[A].wait_for(f"host leaving: host={B}")
    version = open_store(job.url).get().version
    while version == 0:
        assert time.monotonic() < deadline
        version = open_store(job.url).get().version
    with pytest.raises(
        Exception, match=f"{B}:10001 is on host {B}, which is (leaving the job|lost); remove the worker"
    ):
        put(job.url, version + 1, f"{A}:10000", f"{B}:10001")
    job[B].assert_exit(0)
    del job.runs[B]
    finish(job, {A: 1})


def test_too_few_would_be_left(hosts):  # noqa: F811
    job = start(hosts, 4, "-min-np", 3, slots={A: 2, B: 2})
    all_in_version(job, 0, {A: 2, B: 2})
    job[B].signal(signal.SIGTERM)
    job.assert_exit(143)
    sentence = (
        f"kungfu-run: interrupted by SIGTERM on host {B}, without which only 2 workers would be left, but -min-np is 3"
    )
    assert {run.stderr[-1] for run in job.runs.values()} == {sentence}


@pytest.mark.long
def test_host_with_all_workers_does_not_leave_and_ends_the_job(hosts):  # noqa: F811
    job = start(hosts, 1, head=B, slots={A: 1, B: 1})
    all_in_version(job, 0, {A: 1})
    job[A].signal(signal.SIGTERM)
    job.assert_exit(143)
    assert "without which only 0 workers would be left" in job[B].stderr[-1]


def test_the_others_die_before_a_host_has_left(hosts):  # noqa: F811
    """The last workers are on a host that wants to go: the job ends, as where all of one host's workers are told to."""
    job = start(hosts, 2, slots={A: 1, B: 1}, program=["hold=1:never"])
    before = all_in_version(job, 0, {A: 1, B: 1})
    job[B].signal(signal.SIGTERM)
    job[A].wait_for(f"host leaving: host={B}")
    os.kill(before[0], signal.SIGKILL)
    job.assert_exit(143)
    assert "without which only 0 workers would be left" in job[A].stderr[-1]


def test_a_host_that_is_killed_while_it_leaves_is_lost(hosts):  # noqa: F811
    job = start(hosts, 3, slots={A: 2, B: 1}, program=["hold=1:go"])
    all_in_version(job, 0, {A: 2, B: 1})
    job[B].signal(signal.SIGTERM)
    job[A].wait_for(f"host leaving: host={B}")
    lose(job, B)
    job[A].wait_for(f"host lost: host={B}")
    (job[A].runtime_dir.parent / "go").touch()
    assert len(newest(job, {A: 2})) == 2
    finish(job, {A: 2})


@pytest.mark.long
def test_a_second_sigterm_ends_a_host_at_once(hosts):  # noqa: F811
    job = start(hosts, 3, slots={A: 2, B: 1}, program=["hold=1:go"])
    all_in_version(job, 0, {A: 2, B: 1})
    job[B].signal(signal.SIGTERM)
    job[A].wait_for(f"host leaving: host={B}")
    job[B].signal(signal.SIGTERM)
    job[B].assert_exit(143)
    (job[A].runtime_dir.parent / "go").touch()
    del job.runs[B]
    newest(job, {A: 2})
    finish(job, {A: 2})


def test_worker_that_exceeds_the_grace_is_killed_and_the_others_continue(hosts):  # noqa: F811
    job = start(hosts, 3, "-leave-grace", "1s", slots={A: 2, B: 1}, program=["hold=1:go"])
    before = all_in_version(job, 0, {A: 2, B: 1})
    job[B].signal(signal.SIGTERM)
    job[B].assert_exit(0)
    job[A].wait_for(rf"worker 2 .* was on host {B}, which leaves, for more than 1 s \(-leave-grace\) and was killed")
    (job[A].runtime_dir.parent / "go").touch()
    del job.runs[B]
    assert newest(job, {A: 2}) == {0: before[0], 1: before[1]}
    finish(job, {A: 2})


def test_a_sigint_ends_the_job_also_while_a_host_leaves(hosts):  # noqa: F811
    job = start(hosts, 2, slots={A: 1, B: 1}, program=["hold=1:never"])
    all_in_version(job, 0, {A: 1, B: 1})
    job[B].signal(signal.SIGTERM)
    job[A].wait_for(f"host leaving: host={B}")
    job[B].signal(signal.SIGINT)
    job.assert_exit(130)


# ---- joining ----


@pytest.mark.parametrize(
    "flags",
    [pytest.param((), marks=pytest.mark.long), pytest.param(("-strategy", "BINARY_TREE"), id="as-the-others-reduce")],
)
def test_a_host_joins_and_is_given_workers(hosts, start_module, flags):  # noqa: F811
    job = start(hosts, 4, *flags, slots={A: 2, B: 2})
    before = all_in_version(job, 0, {A: 2, B: 2})
    join_well(job, start_module, C, 3)
    assert before == newest(job, {A: 2, B: 2})
    assert "8 workers: the job's hosts have 7 slots" in resize(job, start_module, 8, code=1)
    resize(job, start_module, 7)
    after = newest(job, {A: 2, B: 2, C: 3})
    assert {*before.values()} < {*after.values()}
    os.kill(after[6], signal.SIGKILL)
    newest(job, {A: 2, B: 2, C: 2})
    finish(job, {A: 2, B: 2, C: 2})


def test_a_job_that_begins_on_one_host_is_joined(hosts, start_module):  # noqa: F811
    job = start(hosts, 1, "-joinable", slots={A: 1})
    before = all_in_version(job, 0, {A: 1})
    join_well(job, start_module, B)
    resize(job, start_module, 3)
    assert newest(job, {A: 1, B: 2})[0] == before[0]
    lose(job, B)
    assert newest(job, {A: 1}) == before
    finish(job, {A: 1})


def test_head_node_without_slots_survives_each_host_that_has_workers(hosts, start_module):  # noqa: F811
    job = start(hosts, 1, slots={A: 0, B: 1})
    before = all_in_version(job, 0, {B: 1})
    join_well(job, start_module, C, 1)
    assert "3 workers: the job's hosts have 2 slots" in resize(job, start_module, 3, code=1)
    resize(job, start_module, 2)
    after = newest(job, {B: 1, C: 1})
    assert after[0] == before[0]
    lose(job, B)
    assert newest(job, {C: 1})[0] == after[1]
    job[C].signal(signal.SIGUSR1)
    job.assert_exit(0)
    assert len(job[C].wait_for(r"^finished pid \d+ step", 1)) == 1


@pytest.mark.long  # tests/hosts has one that is not
@pytest.mark.parametrize("how", ["left", "lost"])
def test_a_host_comes_back(hosts, start_module, how):  # noqa: F811
    job = start(hosts, 6)
    before = all_in_version(job, 0, {A: 2, B: 2, C: 2})
    for _ in range(2):
        send_away(job, B) if how == "left" else lose(job, B)
        there = newest(job, {A: 2, C: 2})
        join_well(job, start_module, B)
        resize(job, start_module, 6)
        again = newest(job, {A: 2, B: 2, C: 2})
        assert {*there.values()} == {before[0], before[1], before[4], before[5]} < {*again.values()}
        assert not {before[2], before[3]} & {*again.values()}
    finish(job, {A: 2, B: 2, C: 2})


@pytest.mark.long
def test_the_replaced_find_a_host_that_joins(hosts, start_module):  # noqa: F811
    """Placement fills hosts evenly, whichever host has come last."""
    job = start(hosts, 4, "-recover", "replace", slots={A: 2, B: 2})
    before = all_in_version(job, 0, {A: 2, B: 2})
    join_well(job, start_module, C, 2)
    os.kill(before[3], signal.SIGKILL)
    newest(job, {A: 2, B: 1, C: 1})
    finish(job, {A: 2, B: 1, C: 1})


@pytest.mark.long
def test_a_joined_host_is_lost_like_any_other(hosts, start_module):  # noqa: F811
    job = start(hosts, 2, slots={A: 1, B: 1})
    before = all_in_version(job, 0, {A: 1, B: 1})
    join_well(job, start_module, C, 1)
    resize(job, start_module, 3)
    newest(job, {A: 1, B: 1, C: 1})
    lose(job, C)
    assert newest(job, {A: 1, B: 1}) == before
    finish(job, {A: 1, B: 1})


@pytest.mark.long
def test_a_host_joins_while_another_one_dies_and_one_leaves(hosts, start_module):  # noqa: F811
    job = start(hosts, 5, slots={A: 2, B: 2, C: 1})
    before = all_in_version(job, 0, {A: 2, B: 2, C: 1})
    lose(job, C)
    job[B].signal(signal.SIGTERM)
    coming = join(job, start_module, C)  # refused for as long as the head hasn't missed the former one
    job[B].assert_exit(0)
    del job.runs[B]
    if coming.process.poll() is None:
        job.runs[C] = coming
    else:
        assert "is a host of the job already" in coming.output
        join_well(job, start_module, C)
    wait_until_it_is_there(job, C)
    resize(job, start_module, 3)
    after = newest(job, {A: 2, C: 1})
    assert {before[0], before[1]} < {*after.values()}
    finish(job, {A: 2, C: 1})


@pytest.mark.long
def test_of_two_that_join_as_one_host_one_does(hosts, start_module):  # noqa: F811
    job = start(hosts, 2, slots={A: 1, B: 1})
    all_in_version(job, 0, {A: 1, B: 1})
    both = [join(job, start_module, C) for _ in range(2)]
    deadline = time.monotonic() + 60
    while all(each.process.poll() is None for each in both):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (refused,) = [each for each in both if each.process.poll() is not None]
    (job.runs[C],) = [each for each in both if each is not refused]
    refused.assert_exit(1)
    # Its port is the other one's, if it comes so far.
    assert re.search(
        "is a host of the job already|, the address that the other hosts call, can't be used", refused.stderr[-1]
    )
    wait_until_it_is_there(job, C)
    resize(job, start_module, 3)
    newest(job, {A: 1, B: 1, C: 1})
    finish(job, {A: 1, B: 1, C: 1})


def test_end_of_the_head_node_ends_a_joined_host(hosts, start_module):  # noqa: F811
    job = start(hosts, 2, slots={A: 1, B: 1})
    all_in_version(job, 0, {A: 1, B: 1})
    join_well(job, start_module, C)
    job[A].signal(signal.SIGKILL)
    for host in (B, C):
        job[host].assert_exit(1)
        assert f"kungfu-run on {A}, the head node, has ended" in job[host].stderr[-1]
    late = join(job, start_module, C)
    late.assert_exit(1)
    assert "is the job running" in late.stderr[-1]


REFUSED = {
    "secret": ({"KUNGFU_JOB_SECRET": "ff" * 16}, f"{C}:1", "the called launcher has another secret"),
    "present": ({}, f"{B}:1", f"kungfu-run: {B} is a host of the job already$"),
    "head": ({}, f"{A}:1", f"kungfu-run: {A} is a host of the job already$"),
    "many": ({}, f"{C}:1021", rf"with {C}:1021 the job's hosts would have 1025 slots, but a job can have at most 1024"),
    "version": (
        {"PYTHONPATH": "."},
        f"{C}:1",
        f"kungfu-run: ms_kungfu is 9.9 on {C}, but {VERSION} on {A}; install the same",
    ),
    "stranger": ({}, "10.1.2.3:1", f"{A} is a loopback address"),
}


def test_rejected_host_gets_the_reason_and_the_job_continues(hosts, start_module, tmp_path):  # noqa: F811
    (tmp_path / "sitecustomize.py").write_text("import ms_kungfu._version\nms_kungfu._version.VERSION = '9.9'\n")
    job = start(hosts, 2)
    all_in_version(job, 0, {A: 1, B: 1})
    send_away(job, C)
    for environment, own, sentence in REFUSED.values():
        run = start_module(
            "ms_kungfu.launcher", "-join", job.url, "-self", own,
            environment={"KUNGFU_JOB_SECRET": SECRET, **environment},
        )  # fmt: skip
        assert run.wait() in (1, 2)
        assert re.search(sentence, run.stderr[-1]), run.output
        assert len(run.stderr) <= 2
    finish(job, {A: 1, B: 1})


def test_job_without_watch_accepts_no_joining_host(hosts, start_module):  # noqa: F811
    flags, url = embedded(A)
    job = hosts(TRAINS, *(word for word in flags if word != "-w"), "-np", 2, slots={A: 1, B: 1})
    job.url = url
    all_in_version(job, 0, {A: 1, B: 1})
    run = join(job, start_module, C)
    run.assert_exit(1)
    assert run.stderr[-1] == "kungfu-run: the job was started without -w, so no host can join it"
    finish(job, {A: 1, B: 1})


def test_job_on_one_host_accepts_no_joining_host(job, start_module):
    alone = job("-np", "1")
    alone.in_version(0, 1)
    url = alone.wait_for(r"config server: url=(http://\S+/config)")[0][1]
    run = start_module("ms_kungfu.launcher", "-join", url, environment={"KUNGFU_JOB_SECRET": SECRET})
    run.assert_exit(1)
    assert "was started on one host and accepts no other hosts" in run.stderr[-1]
    alone.finish(1)


@pytest.mark.long
def test_a_program_that_is_not_there_is_said_before_the_host_joins(hosts, start_module, tmp_path):  # noqa: F811
    (tmp_path / "train.py").write_text(RECOVERY_PROGRAM.read_text())
    watching, url = embedded(A)
    job = hosts([sys.executable, "train.py"], *watching, "-np", 2, slots={A: 1, B: 1})
    job.url = url
    all_in_version(job, 0, {A: 1, B: 1})
    (tmp_path / "train.py").rename(tmp_path / "elsewhere.py")
    run = join(job, start_module, C)
    run.assert_exit(1)
    assert "the job's program can't be run here: script 'train.py'" in run.stderr[-1]
    finish(job, {A: 1, B: 1})


def settled(job):
    """The store's newest cluster, once all of its workers are in it, on hosts that are there."""
    deadline = time.monotonic() + 60
    while True:
        cluster = open_store(job.url).get()
        pattern = re.compile(IN_VERSION.format(cluster.version, cluster.size))
        there = [run for host, run in job.runs.items() if host in cluster.hosts]
        if len(there) == len(cluster.hosts) and set(cluster.slots) == set(job.runs):
            found = [m for run in there for m in filter(None, map(pattern.search, list(run.lines)))]
            if len(found) == cluster.size and open_store(job.url).get().version == cluster.version:
                return {int(match[1]): int(match[2]) for match in found}, cluster
        assert time.monotonic() < deadline, f"{cluster}\n{job.output}"
        time.sleep(0.02)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_hosts_come_and_go_at_random_among_deaths_and_resizes(hosts, start_module):  # noqa: F811
    """Two things at once each time; the head stays, and with it a worker of its own. Other seeds: ``python -m
    tests.campaigns host-changes``."""
    seed = int(os.environ.get("KUNGFU_TEST_SEED", 1))
    print(f"KUNGFU_TEST_SEED={seed}")  # shown where it fails
    choose = random.Random(seed)
    job = start(hosts, 6)
    all_in_version(job, 0, {A: 2, B: 2, C: 2})
    pids, cluster = settled(job)
    for _ in range(12):
        joining, leaving = [], []
        away = [host for host in (B, C) if host not in job.runs]
        there = [host for host in (B, C) if host in job.runs]
        for event in choose.sample(["leave", "lose", "join", "join", "kill", "resize", "resize"], 2):
            if event in ("leave", "lose") and there:
                host = there.pop()
                run = job.runs.pop(host)
                run.signal(signal.SIGTERM if event == "leave" else signal.SIGKILL)
                leaving.append((run, 0 if event == "leave" else -signal.SIGKILL))
            elif event == "join" and away:
                host = away.pop()
                joining.append((host, join(job, start_module, host)))
            elif event == "kill":
                spare = [rank for rank, worker in enumerate(cluster.workers) if worker != cluster.workers[0]]
                if spare:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pids[choose.choice(spare)], signal.SIGKILL)
            elif event == "resize":
                # More than there are slots, or on a host that goes: then it is refused.
                start_module(
                    "ms_kungfu.launcher", "resize", choose.randrange(1, 7), "-config-server", job.url,
                    environment={"KUNGFU_JOB_SECRET": SECRET},
                ).wait()  # fmt: skip
        for run, code in leaving:
            assert run.wait() == code, run.output
        for host, run in joining:
            run.wait_for("host registered: head_node=", timeout=60)
            job.runs[host] = run
        pids, cluster = settled(job)
        assert cluster.workers[0].host == A
    job[A].signal(signal.SIGUSR1)
    job.assert_exit(0, 60)
    ends = [m for run in job.runs.values() for m in run.wait_for(r"^finished pid \d+ (step \d+ weights \w+)", 0)]
    assert len(ends) == cluster.size
    assert len({match[1] for match in ends}) == 1
