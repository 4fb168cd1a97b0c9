"""Jobs on several hosts. Addresses of this machine's loopback play the hosts: each has a kungfu-run of its own."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from launching import GONE_WITHIN_S, IN_VERSION, RECOVERY_PROGRAM

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import open_store
from tests import ports

pytestmark = pytest.mark.timeout(240)

SECRET = "0123456789abcdef" * 2
PROGRAMS = Path(__file__).parent / "programs"
A, B, C = (f"127.0.0.{number}" for number in (1, 2, 3))
# A worker that says where it is, and stays.
STAYS = """
import os, signal, time
signal.signal(signal.SIGINT, signal.SIG_DFL)
e = os.environ
print("ready", e["RANK_ID"], e["RANK_SIZE"], e["KUNGFU_SELF"], e["KUNGFU_LOCAL_RANK"], e["KUNGFU_LOCAL_SIZE"],
      e["KUNGFU_HOSTS"], os.getpid(), flush=True)
time.sleep(1000)
"""
# Ends as its argument says where it is told by SIGUSR1, which each kungfu-run passes on to its own workers.
ENDS = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(int(sys.argv[1])))
print("ready", os.environ["KUNGFU_SELF"], os.getpid(), flush=True)
while True: signal.pause()
"""


def free_port():
    """One that no host uses."""
    return ports.free_port(A, B, C)


class Hosts:
    """A kungfu-run a host, all of one job. `environments`: what some of them have of their own."""

    def __init__(self, start, slots, flags, environments):
        self.port = free_port()
        self.names = list(slots)
        words = ["-H", ",".join(f"{host}:{count}" for host, count in slots.items()), "-port", self.port, *flags]
        self.start_one = lambda host, **environment: start(
            "-self", host, *words, environment={"KUNGFU_JOB_SECRET": SECRET, **environment}
        )
        self.runs = {host: self.start_one(host, **environments.get(host, {})) for host in slots}

    def __getitem__(self, host):
        return self.runs[host]

    def wait_for(self, pattern, counts, timeout=60):
        """The matches on all hosts, `counts` on each."""
        return [m for host, count in counts.items() for m in self[host].wait_for(pattern, count, timeout)]

    def assert_exit(self, code, timeout=60.0):
        """All with the same code, and nothing of them is left."""
        for run in self.runs.values():
            run.assert_exit(code, timeout)
        since = time.monotonic()
        for run in self.runs.values():
            run.assert_gone(since, GONE_WITHIN_S)
            assert "internal error" not in run.output

    @property
    def output(self):
        return "\n".join(f"--- {host}\n{run.output}" for host, run in self.runs.items())


@pytest.fixture
def hosts(kungfu_run):
    """Starts a job: hosts(program, *flags, slots={host: slots}, environments={host: {variable: value}})."""

    def start(program, *flags, slots=None, environments=None):
        return Hosts(kungfu_run, slots or {A: 2, B: 2}, [*flags, *program], environments or {})

    return start


def embedded(host):
    """Flags for a config server on that host, which is the head then, and its URL."""
    port = free_port()
    url = f"http://{host}:{port}/config"
    return ["-w", "-builtin-config-port", port, "-config-server", url], url


# ---- start and end ----


def test_workers_are_started_on_their_hosts_and_shown_by_those(hosts, script):
    job = hosts(script(STAYS), "-np", 3)
    found = job.wait_for(r"^ready (.*) \d+$", {A: 2, B: 1})
    limits = f"{A}:2,{B}:2"
    assert sorted(match[1] for match in found) == [
        f"0 3 {A}:10000 0 2 {limits}",
        f"1 3 {A}:10001 1 2 {limits}",
        f"2 3 {B}:10000 0 1 {limits}",
    ]
    job[A].signal(signal.SIGINT)
    job.assert_exit(130)
    assert job[B].stderr[-1] == "kungfu-run: interrupted by SIGINT"


CORES = """
import os, sys, time
import ms_kungfu as kf
from ms_kungfu import comm, membership
kf.init()
if len(sys.argv) > 1:
    print("each", membership.fix_cores(), flush=True)
    comm.barrier()
print("cores", len(os.sched_getaffinity(0)), flush=True)
comm.barrier()
"""


def test_the_cores_of_each_host_are_divided_among_its_own_workers(hosts, script):
    cores = len(os.sched_getaffinity(0))
    job = hosts(script(CORES), "-np", 3)
    job.assert_exit(0)
    assert [match[1] for match in job.wait_for(r"^cores (\d+)", {A: 2})] == 2 * [str(max(1, cores // 2))]
    assert [match[1] for match in job.wait_for(r"^cores (\d+)", {B: 1})] == [str(cores)]


@pytest.mark.parametrize(("flags", "program"), [(["-cores-per-worker", "1"], []), ([], ["fix"])])
def test_workers_of_all_hosts_have_one_number_of_cores_if_requested(hosts, script, flags, program):
    job = hosts((*script(CORES), *program), "-np", 3, *flags)
    job.assert_exit(0)
    assert {match[1] for match in job.wait_for(r"^cores (\d+)", {A: 2, B: 1})} == {"1"}
    if program:
        assert {match[1] for match in job.wait_for(r"^each (.*)", {A: 2, B: 1})} == {"None"}


STORES = """
import numpy as np
import ms_kungfu as kf
from ms_kungfu import comm
kf.init()
rank = kf.current_rank()
model = np.arange(100_000.0) + rank  # more than goes over at once
if rank != 1:
    assert comm.save("model", model) == 1
    assert comm.save("model", model) == 2
comm.barrier()
for other in range(3):
    saved = comm.request(other, "model")
    same = saved is not None and np.array_equal(saved.value, np.arange(100_000.0) + other)
    print("found", rank, other, saved and saved.version, same, comm.request(other, "nothing"), flush=True)
comm.barrier()
"""


def test_models_are_read_on_all_hosts(hosts, script):
    job = hosts(script(STORES), "-np", 3)
    job.assert_exit(0)
    found = {match[1] for match in job.wait_for(r"^found (.*)$", {A: 6, B: 3})}
    assert found == {
        f"{rank} {other} {'None False' if other == 1 else '2 True'} None" for rank in range(3) for other in range(3)
    }


def reading(job, version, counts, pattern=r"(\d+)"):
    """Once all members of a version have read models of workers on other hosts there: whose."""
    return job.wait_for(rf"^read in version {version} the model of rank {pattern} ", counts)


def test_models_of_other_hosts_while_workers_come_and_go(hosts):
    watching, url = embedded(A)
    model = {"SURVIVOR_MODEL": "20000"}
    program = [sys.executable, PROGRAMS / "survivor.py"]
    job = hosts(program, *watching, "-np", 2, slots={A: 2, B: 2}, environments={A: model, B: model})
    before = all_in_version(job, 0, {A: 1, B: 1})
    reading(job, 0, {A: 1, B: 1})
    put(url, 1, f"{A}:10000", f"{B}:10000", f"{A}:10001", f"{B}:10001")
    all_in_version(job, 1, {A: 2, B: 2})
    reading(job, 1, {A: 2, B: 2})
    os.kill(before[1], signal.SIGKILL)
    all_in_version(job, 2, {A: 2, B: 1})
    reading(job, 2, {A: 2, B: 1})
    put(url, 3, f"{A}:10000", f"{A}:10001")  # one host: they read each other's without a link
    all_in_version(job, 3, {A: 2})
    job[A].signal(signal.SIGUSR1)
    job.assert_exit(0)
    assert "Traceback" not in job.output


@pytest.mark.parametrize(("host", "code"), [(A, 0), (B, 3)])
def test_all_hosts_end_with_the_same_code(hosts, script, host, code):
    job = hosts((*script(ENDS), str(code)), "-np", 2)
    job.wait_for("^ready", {A: 1, B: 1})
    for run in job.runs.values() if code == 0 else [job[host]]:
        run.signal(signal.SIGUSR1)
    job.assert_exit(code)
    if code:
        assert f"worker 1 ({host}:10000" in job[A].stderr[-1]
        assert job[A].stderr[-1] == job[B].stderr[-1]


def test_program_that_cannot_run_on_another_host_ends_the_job_by_host_name(hosts, tmp_path):
    program = tmp_path / "program"
    program.write_text("#!/nowhere/interpreter\n")
    program.chmod(0o755)
    job = hosts([str(program)], "-np", 4)
    job.assert_exit(127)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_at_any_host_ends_the_job(hosts, script, number):
    job = hosts(script(STAYS), "-np", 2)
    job.wait_for("^ready", {A: 1, B: 1})
    job[B].signal(number)
    job.assert_exit(128 + number)
    assert f"interrupted by {signal.Signals(number).name} on host {B}" in job[A].output


def test_a_host_that_is_killed_ends_the_job_with_a_sentence_that_names_it(hosts, script):
    job = hosts(script(STAYS), "-np", 3, slots={A: 1, B: 1, C: 1})
    job.wait_for("^ready", {A: 1, B: 1, C: 1})
    begin = time.monotonic()
    job[B].signal(signal.SIGKILL)
    for host in (A, C):
        job[host].assert_exit(1)
        assert re.match(
            rf"kungfu-run: host {B} is lost: kungfu-run on host {B} has ended .*, and so have its workers$",
            job[host].stderr[-1],
        )
        job[host].assert_gone(begin, GONE_WITHIN_S)
    job[B].assert_gone(begin, GONE_WITHIN_S)


def test_workers_end_if_their_head_node_is_killed(hosts, script):
    job = hosts(script(STAYS), "-np", 2)
    job.wait_for("^ready", {A: 1, B: 1})
    begin = time.monotonic()
    job[A].signal(signal.SIGKILL)
    job[B].assert_exit(1)
    assert re.match(
        rf"kungfu-run: kungfu-run on {A}, the head node, has ended .*; the workers on this host are ended$",
        job[B].stderr[-1],
    )
    for run in job.runs.values():
        run.assert_gone(begin, GONE_WITHIN_S)


def test_signal_ends_a_host_also_while_the_controller_is_silent(hosts, script):
    job = hosts(script(STAYS), "-np", 2)
    job.wait_for("^ready", {A: 1, B: 1})
    job[A].signal(signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while job[B].process.poll() is None:  # twice means at once, and two at a time may be one
        assert time.monotonic() < deadline
        job[B].signal(signal.SIGTERM)
        time.sleep(0.1)
    job[B].assert_exit(143)
    assert job[B].stderr[-1] == "kungfu-run: interrupted by SIGTERM", "it has not waited for the head"
    job[B].assert_gone(time.monotonic(), GONE_WITHIN_S)
    job[A].signal(signal.SIGCONT)
    job[A].wait()  # it has heard of the signal, or of the end of the host
    assert job[A].process.returncode in (1, 143)


def test_the_guard_of_another_host_is_missed(hosts, script):
    job = hosts(script(STAYS), "-np", 2)
    job.wait_for("^ready", {A: 1, B: 1})
    (guard,) = [pid for pid in job[B].processes() if Path(f"/proc/{pid}/comm").read_text() == "kungfu-guard\n"]
    os.kill(guard, signal.SIGKILL)
    job.assert_exit(1)
    for run in job.runs.values():  # this job doesn't go on
        assert run.stderr[-1].startswith(f"kungfu-run: host {B} is lost: the guard process on host {B} was killed")


def test_a_timeout_ends_all_hosts(hosts, script):
    job = hosts(script(STAYS), "-np", 2, "-timeout", "20s")
    job.wait_for("^ready", {A: 1, B: 1})
    job.assert_exit(124)


def test_log_files_are_each_hosts_own(hosts, script, tmp_path):
    job = hosts((*script(ENDS), "4"), "-np", 2, "-logdir", "logs")
    job.wait_for("^ready", {A: 1, B: 1})
    job[B].signal(signal.SIGUSR1)
    job.assert_exit(4)
    logs = ", ".join(f"logs/{B}.10000.{what}.log" for what in ("stdout", "stderr"))
    assert f"worker logs: worker 1 ({B}:10000" in job[A].output
    assert f'files="{logs} on {B}"' in job[A].output
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted(
        f"{host}.10000.{what}.log" for host in (A, B) for what in ("stdout", "stderr")
    ) + ["events.jsonl", "report.html"]


# ---- the hosts that take part ----


def test_host_with_another_secret_is_rejected_and_the_right_one_awaited(hosts, script):
    job = hosts((*script(ENDS), "0"), "-np", 2, environments={B: {"KUNGFU_JOB_SECRET": "ff" * 16}})
    job[B].assert_exit(1)
    assert "the called launcher has another secret" in job[B].stderr[-1]
    job[A].wait_for(rf"connection rejected: from={B} reason=.the caller doesn't know the job's secret")
    job.runs[B] = job.start_one(B)
    job.wait_for("^ready", {A: 1, B: 1})
    for run in job.runs.values():
        run.signal(signal.SIGUSR1)
    job.assert_exit(0)


def test_without_a_secret_where_the_network_is_trusted(hosts, script):
    job = hosts(
        (*script(ENDS), "0"), "-np", 2, "-no-secret", environments={h: {"KUNGFU_JOB_SECRET": ""} for h in (A, B)}
    )
    job.wait_for("^ready", {A: 1, B: 1})
    for run in job.runs.values():
        run.signal(signal.SIGUSR1)
    job.assert_exit(0)


def test_flags_that_differ_are_refused_by_name(kungfu_run, script):
    words = ["-H", f"{A}:1,{B}:1", "-port", free_port()]
    head = kungfu_run("-self", A, "-np", 2, *words, *script(STAYS), environment={"KUNGFU_JOB_SECRET": SECRET})
    other = kungfu_run("-self", B, "-np", 1, *words, *script(STAYS), environment={"KUNGFU_JOB_SECRET": SECRET})
    other.assert_exit(1)
    assert other.stderr[-1] == f"kungfu-run: -np is 1 on {B}, but 2 on {A}; give the same flags on all hosts"
    head.signal(signal.SIGTERM)
    head.assert_exit(143)


def test_a_host_that_does_not_come_is_named(hosts, script, kungfu_run):
    words = ["-H", f"{A}:1,{B}:1", "-port", free_port(), "-np", 2]
    for host, sentence in (
        (A, f"no message came from {B} within 1 s (KUNGFU_JOIN_TIMEOUT); check that kungfu-run is running there"),
        (B, f"no answer from {A}:"),
    ):
        run = kungfu_run(
            "-self", host, *words, *script(STAYS), environment={"KUNGFU_JOB_SECRET": SECRET, "KUNGFU_JOIN_TIMEOUT": "1"}
        )
        run.assert_exit(1)
        assert sentence in run.stderr[-1]


def test_a_host_that_goes_before_the_start_may_come_again(hosts, script):
    job = hosts(
        (*script(ENDS), "0"), "-np", 3, slots={A: 1, B: 1, C: 1}, environments={C: {"KUNGFU_JOB_SECRET": "ff" * 16}}
    )
    job[C].assert_exit(1)
    job[A].wait_for(f"host registered: host={B} ")
    job[B].signal(signal.SIGKILL)
    job[A].wait_for(f"kungfu-run on host {B} has ended")
    for host in (B, C):
        job.runs[host] = job.start_one(host)
    job.wait_for("^ready", {A: 1, B: 1, C: 1})
    for run in job.runs.values():
        run.signal(signal.SIGUSR1)
    job.assert_exit(0)


# ---- versions whose workers are all on one host that isn't the head ----


def put(url, version, *workers):
    """The cluster that a client outside wants."""
    open_store(url, SECRET).put(Cluster(tuple(map(PeerID.parse, workers)), (), version))


def in_version(run, version, size):
    """Rank -> process ID of those that `run` shows."""
    found = run.wait_for(IN_VERSION.format(version, size), size, timeout=60)
    return {int(match[1]): int(match[2]) for match in found}


def test_job_with_all_workers_elsewhere_grows_and_survives_a_failure(hosts):
    flags, url = embedded(B)
    job = hosts([sys.executable, RECOVERY_PROGRAM], *flags, "-np", 1, slots={A: 3, B: 1})
    away = job[A]
    assert len(in_version(away, 0, 1)) == 1
    put(url, 1, f"{A}:10000", f"{A}:10001", f"{A}:10002")
    os.kill(in_version(away, 1, 3)[1], signal.SIGKILL)
    job[B].wait_for(rf"worker 1 \({A}:10001, pid \d+\) was killed by SIGKILL; the others go on")
    in_version(away, 2, 2)
    away.signal(signal.SIGUSR1)
    job.assert_exit(0)
    ends = away.wait_for(r"^finished pid \d+ (step \d+ weights \w+)", 2)
    assert len({match[1] for match in ends}) == 1


def test_a_worker_that_is_stopped_on_another_host_is_killed(hosts):
    flags, url = embedded(B)
    job = hosts([sys.executable, RECOVERY_PROGRAM], *flags, "-np", 1, "-peer-timeout", "3s", slots={A: 2, B: 1})
    in_version(job[A], 0, 1)
    put(url, 1, f"{A}:10000", f"{A}:10001")
    os.kill(in_version(job[A], 1, 2)[1], signal.SIGSTOP)
    job[B].wait_for(rf"worker 1 \({A}:10001, pid \d+\) hung for 3 s \(-peer-timeout\) and was killed")
    in_version(job[A], 2, 1)
    job[A].signal(signal.SIGUSR1)
    job.assert_exit(0)


def test_workers_of_a_stopped_launcher_do_not_count_as_hanging(hosts):
    flags, _ = embedded(B)
    job = hosts([sys.executable, RECOVERY_PROGRAM], *flags, "-np", 1, "-peer-timeout", "1s", slots={A: 1, B: 1})
    in_version(job[A], 0, 1)
    job[A].signal(signal.SIGSTOP)
    time.sleep(3)  # what must not happen takes a second
    job[A].signal(signal.SIGCONT)
    job[A].signal(signal.SIGUSR1)
    job.assert_exit(0)
    assert "hung for" not in job.output


# ---- versions over several hosts: what each host gets ----

PLACE = r"^in version {} rank (\d+) of {} pid (\d+) has {}$"
OVER_HOSTS, ON_ONE = "mmss", "m"  # segment, board, sockets to the link and for models; a segment


def places(job, version, counts, kinds=OVER_HOSTS):
    """Rank -> process ID in a version, of which each host shows so many."""
    found = job.wait_for(PLACE.format(version, sum(counts.values()), kinds), counts)
    assert len({match[1] for match in found}) == sum(counts.values())
    return {int(match[1]): int(match[2]) for match in found}


def command(job, start_module, host, *words):
    """One like `kungfu-run resize`, typed on that host."""
    environment = {"XDG_RUNTIME_DIR": str(job[host].runtime_dir), "KUNGFU_JOB_SECRET": SECRET}
    done = start_module("ms_kungfu.launcher", *words, environment=environment)
    done.assert_exit(0)


def end(job):
    for run in job.runs.values():
        run.signal(signal.SIGUSR1)
    job.assert_exit(0)


@pytest.mark.parametrize("head", [pytest.param(A, marks=pytest.mark.long), B])
def test_sizes_up_and_down_over_three_hosts(hosts, start_module, head):
    flags, url = embedded(head)
    job = hosts([sys.executable, PROGRAMS / "places.py"], *flags, "-np", 1, slots={A: 2, B: 2, C: 2})
    first = places(job, 0, {A: 1}, ON_ONE)
    command(job, start_module, C, "resize", "5", "-config-server", url)
    there = places(job, 1, {A: 2, B: 2, C: 1})
    assert there[0] == first[0]  # its process goes on
    put(url, 2, f"{A}:10000", f"{C}:10000")
    staying = places(job, 2, {A: 1, C: 1})
    assert set(staying.values()) < set(there.values())
    job[B].wait_for(f"^detached {B}:", 2)
    put(url, 3, f"{C}:10000")
    assert places(job, 3, {C: 1}, ON_ONE)[0] == staying[1]
    put(url, 4, f"{C}:10000", f"{B}:10000", f"{A}:10000")
    places(job, 4, {A: 1, B: 1, C: 1})
    end(job)


@pytest.mark.parametrize(("recover", "size"), [("shrink", 3), ("replace", 4)])
def test_worker_killed_on_any_host_is_removed_for_all(hosts, recover, size):
    flags, url = embedded(A)
    job = hosts([sys.executable, PROGRAMS / "places.py"], *flags, "-np", 4, "-recover", recover, slots={A: 2, B: 2})
    there = places(job, 0, {A: 2, B: 2})
    os.kill(there[3], signal.SIGKILL)
    job[A].wait_for(rf"worker 3 \({B}:10001, pid {there[3]}\) was killed by SIGKILL; the others go on")
    version = 1 if recover == "shrink" else 2
    after = places(job, version, {A: 2, B: size - 2})
    assert {pid for rank, pid in there.items() if rank != 3} <= set(after.values())
    os.kill(after[0], signal.SIGKILL)  # the lowest rank, at the head
    left = places(job, 2 * version, {A: size - 2, B: size - 2})
    assert after[0] not in left.values()
    end(job)


def test_remote_worker_with_sigterm_ends_and_the_others_continue(hosts):
    flags, url = embedded(A)
    job = hosts([sys.executable, PROGRAMS / "places.py"], *flags, "-np", 2)
    there = places(job, 0, {A: 1, B: 1})
    os.kill(there[1], signal.SIGTERM)
    places(job, 1, {A: 1}, ON_ONE)
    end(job)


# ---- trainings over several hosts ----


def all_in_version(job, version, counts):
    """Rank -> process ID, of which each host shows so many."""
    found = job.wait_for(IN_VERSION.format(version, sum(counts.values())), counts)
    assert len({match[1] for match in found}) == sum(counts.values())
    return {int(match[1]): int(match[2]) for match in found}


def finish(job, counts):
    """All that are left end at the same step with the same weights."""
    job[A].signal(signal.SIGUSR1)
    job.assert_exit(0)
    ends = job.wait_for(r"^finished pid \d+ (step \d+ weights \w+)", counts)
    assert len({match[1] for match in ends}) == 1
    assert "Traceback" not in job.output


def test_a_training_grows_and_shrinks_over_three_hosts(hosts, start_module):
    flags, url = embedded(A)
    job = hosts([sys.executable, RECOVERY_PROGRAM], *flags, "-np", 2, slots={A: 2, B: 2, C: 2})
    first = all_in_version(job, 0, {A: 1, B: 1})
    command(job, start_module, B, "resize", "6", "-config-server", url)
    grown = all_in_version(job, 1, {A: 2, B: 2, C: 2})
    assert set(first.values()) < set(grown.values())
    command(job, start_module, A, "resize", "3", "-config-server", url)
    url_store = open_store(url, SECRET)
    workers = url_store.get().workers
    assert len(workers) == 3
    all_in_version(job, 2, {host: sum(w.host == host for w in workers) for host in (A, B, C)})
    put(url, 3, *(str(worker) for worker in workers if worker.host == A))
    on_a = sum(worker.host == A for worker in workers)
    all_in_version(job, 3, {A: on_a})  # in plain shared memory again
    command(job, start_module, A, "resize", "4", "-config-server", url)
    workers = url_store.get().workers
    counts = {host: sum(w.host == host for w in workers) for host in (A, B, C)}
    all_in_version(job, 4, counts)
    finish(job, counts)


@pytest.mark.parametrize(
    ("recover", "rank"),
    [
        ("shrink", 0),
        ("replace", 3),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("shrink", 1), ("shrink", 3))),
        *(pytest.param("replace", rank, marks=pytest.mark.long) for rank in (0, 1)),
    ],
)
def test_survivors_on_all_hosts_go_on_when_a_rank_is_killed(hosts, recover, rank):
    flags, url = embedded(A)
    job = hosts([sys.executable, RECOVERY_PROGRAM], *flags, "-np", 4, "-recover", recover)
    there = all_in_version(job, 0, {A: 2, B: 2})
    os.kill(there[rank], signal.SIGKILL)
    on = {A: 2 - (rank < 2), B: 2 - (rank >= 2)}
    left = all_in_version(job, 1, on)
    assert set(left.values()) == set(there.values()) - {there[rank]}
    if recover == "replace":
        on = {A: 2, B: 2}
        assert set(left.values()) < set(all_in_version(job, 2, on).values())
    finish(job, on)


def test_a_host_may_lose_all_its_workers(hosts):
    flags, url = embedded(A)
    job = hosts([sys.executable, RECOVERY_PROGRAM], *flags, "-np", 3, "-recover", "replace")
    there = all_in_version(job, 0, {A: 2, B: 1})
    os.kill(there[2], signal.SIGKILL)
    all_in_version(job, 1, {A: 2})
    back = all_in_version(job, 2, {A: 2, B: 1})
    assert there[2] not in back.values()
    finish(job, {A: 2, B: 1})


def test_a_worker_that_is_stopped_is_killed_and_the_other_host_goes_on(hosts):
    flags, url = embedded(A)
    job = hosts([sys.executable, RECOVERY_PROGRAM], *flags, "-np", 3, "-peer-timeout", "3s")
    there = all_in_version(job, 0, {A: 2, B: 1})
    os.kill(there[2], signal.SIGSTOP)
    job[A].wait_for(r"hung for 3 s \(-peer-timeout\) and was killed; the others go on")
    all_in_version(job, 1, {A: 2})
    finish(job, {A: 2})


def test_remote_worker_with_sigterm_leaves_after_its_step(hosts):
    flags, url = embedded(A)
    job = hosts([sys.executable, RECOVERY_PROGRAM], *flags, "-np", 3)
    there = all_in_version(job, 0, {A: 2, B: 1})
    os.kill(there[2], signal.SIGTERM)
    job[B].wait_for(rf"^left pid {there[2]}")
    all_in_version(job, 1, {A: 2})
    finish(job, {A: 2})


def test_a_sync_point_that_one_host_asks_for_is_heard_of_on_all(hosts, script):
    program = """
import time
import ms_kungfu as kf
from ms_kungfu import _core, comm
kf.init()
rank, size = kf.current_rank(), kf.current_cluster_size()
for number in range(1, size + 1):
    if rank == size - number:
        _core.request_sync_point(number)
    while _core.sync_points() < number: time.sleep(0.01)
    assert _core.sync_points() == number
    comm.barrier()
print("heard", _core.sync_points(), flush=True)
"""
    job = hosts(script(program), "-np", 3, slots={A: 1, B: 1, C: 1})
    job.wait_for("^heard 3$", {A: 1, B: 1, C: 1})
    job.assert_exit(0)


@pytest.mark.long
def test_many_deaths_on_random_hosts(hosts):
    flags, url = embedded(A)
    job = hosts([sys.executable, RECOVERY_PROGRAM], *flags, "-np", 6, "-recover", "replace", "-max-restarts", "100",
                slots={A: 2, B: 2, C: 2})  # fmt: skip
    counts = {A: 2, B: 2, C: 2}
    choose = random.Random(14)

    def held():
        """What the launchers have open, and their threads."""
        pids = [run.process.pid for run in job.runs.values()]
        return [len(os.listdir(f"/proc/{pid}/{what}")) for what in ("fd", "task") for pid in pids]

    early = []
    for death in range(20):
        there = all_in_version(job, 2 * death, counts)
        if death == 2:
            early = held()
        os.kill(there[choose.randrange(6)], signal.SIGKILL)
    all_in_version(job, 40, counts)
    deadline = time.monotonic() + 20
    while any(now > before + 6 for now, before in zip(held(), early)):  # a version more or less is being made or closed
        assert time.monotonic() < deadline, (early, held())
        time.sleep(0.1)
    finish(job, counts)


# ---- strangers ----


def test_unauthenticated_clients_at_the_port_do_not_disturb_the_job(hosts, script):
    job = hosts((*script(ENDS), "0"), "-np", 2)
    job.wait_for("^ready", {A: 1, B: 1})
    pids = [run.process.pid for run in job.runs.values()]
    before = [len(os.listdir(f"/proc/{pid}/fd")) for pid in pids]
    words = [b"", b"\0\0\0\5{", b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\2[]" * 10,
             b'\0\0\0\x1e{"nonce": "00", "proof": "00"}']  # fmt: skip
    with contextlib.ExitStack() as stack:
        for number in range(300):
            for host in (A, B):
                stranger = stack.enter_context(socket.create_connection((host, job.port)))
                with contextlib.suppress(ConnectionError):  # it may have been sent away already
                    stranger.sendall(words[number % len(words)])
        assert all(len(os.listdir(f"/proc/{pid}/fd")) < count + 150 for pid, count in zip(pids, before))
    for pid, count in zip(pids, before):
        while len(os.listdir(f"/proc/{pid}/fd")) > count:
            time.sleep(0.05)
    for run in job.runs.values():
        run.signal(signal.SIGUSR1)
    job.assert_exit(0)
    for run in job.runs.values():
        assert run.output.count("connection rejected: ") == 1
