"""Watch mode: the cluster changes while the job runs. Workers speak to the launcher as the runtime does, without it."""

import http.client
import json
import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from launching import ONE_FOLDER, ROOT

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import open_store
from tests.ports import free_port

pytestmark = pytest.mark.timeout(240)

WORKER = """
import contextlib, os, signal, sys, threading, time
from ms_kungfu.cluster_store import StoreUnreachableError, open_store
from ms_kungfu.cluster import PeerID
from ms_kungfu.broker_protocol import BrokerClient, Detached

me, secret = PeerID.parse(os.environ["KUNGFU_SELF"]), os.environ["KUNGFU_JOB_SECRET"]
incarnation = int(os.environ["KUNGFU_INCARNATION"])
signal.signal(signal.SIGUSR1, signal.SIG_IGN if "STAYS" in os.environ else lambda *_: os._exit(0))

def enter(member_of, version):
    broker = os.environ["KUNGFU_BROKER"]
    client = BrokerClient(broker, bytes.fromhex(secret))
    answer = client.request_segment(me, incarnation, member_of, version, 60)
    client.close()
    if isinstance(answer, Detached):
        print(f"detached {me} incarnation={incarnation}", flush=True)
        if "STUBBORN" in os.environ:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("asked to leave", flush=True)))
            time.sleep(1000)
        sys.exit(int(os.environ.get("LEAVE_WITH", "0")))
    os.close(answer.fd)
    print(f"in {me} incarnation={incarnation} version={answer.cluster.version} rank={answer.rank} "
          f"size={answer.cluster.size} pid={os.getpid()}", flush=True)
    if "FIX" in os.environ and "KUNGFU_CORES_PER_WORKER" not in os.environ:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        fixed = BrokerClient(broker, bytes.fromhex(secret)).fix_cores(1, 60)
        masks = set()
        for task in os.listdir("/proc/self/task"):
            with contextlib.suppress(ProcessLookupError):  # this thread has ended
                masks.add(len(os.sched_getaffinity(int(task))))
        print(f"fixed {me}: {fixed} {masks}", flush=True)
    return answer.cluster

print(f"broker={os.environ['KUNGFU_BROKER']}", flush=True)
cluster = enter(None, None)
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
print(f"job={os.environ['KUNGFU_JOB']}", flush=True)
client = open_store(os.environ["KUNGFU_CONFIG_SERVER"])
while "STAYS" in os.environ:  # in a long step
    time.sleep(1)
while True:
    try:
        newer = client.watch(cluster.version, 20)
    except StoreUnreachableError:
        time.sleep(0.05)
        continue
    if newer is not None:
        cluster = enter(cluster.version, newer.version)
"""


def cluster_of(version, *ports):
    return Cluster(tuple(PeerID("127.0.0.1", port) for port in ports), (), version)


class Job:
    """A running job in watch mode and its config server."""

    def __init__(self, program, start_module):
        self.program = program
        self.wait_for = program.wait_for
        self._start_module = start_module
        self.url = program.wait_for(r"config server: url=(http://\S+/config)")[0][1]

    def resize(self, *arguments, server=True):
        """`kungfu-run resize` from another shell of the same user."""
        words = ["resize", *arguments, *(["-config-server", self.url] if server else [])]
        environment = {"XDG_RUNTIME_DIR": str(self.program.runtime_dir)}
        command = self._start_module("ms_kungfu.launcher", *words, environment=environment)
        return command.wait(), command.output

    def put(self, document):
        secret = next(self.program.runtime_dir.rglob("*.secret")).read_text()
        return put(self.url, secret, document)

    def wait_for_version(self, version, size):
        """The matches of the members' reports, in the order of their ranks."""
        found = self.wait_for(rf"^in (\S+) incarnation=(\d+) version={version} rank=(\d+) size={size} pid=(\d+)", size)
        assert len(found) == size
        return sorted(found, key=lambda match: int(match[3]))

    def wait_for_cores(self, version, size, total):
        """Until the members of a version have so many cores in all: the launcher moves them after its answer."""
        members = [int(match[4]) for match in self.wait_for_version(version, size)]
        deadline = time.monotonic() + 30
        while sum(cores := [len(os.sched_getaffinity(pid)) for pid in members]) != total:
            assert time.monotonic() < deadline, f"version {version} has {cores} cores\n{self.program.output}"
            time.sleep(0.01)

    def finish_alone(self):
        """While another job runs in the same folder."""
        self.program.signal(signal.SIGUSR1)
        self.program.assert_exit(0)

    def finish(self):
        self.finish_alone()
        self.program.assert_gone(time.monotonic())


def put(url, secret, document):
    host, _, path = url[len("http://") :].partition("/")
    connection = http.client.HTTPConnection(host, timeout=20)
    body = document if isinstance(document, bytes) else json.dumps(document)
    connection.request("PUT", "/" + path, body, {"Authorization": f"Bearer {secret}"})
    response = connection.getresponse()
    status, answer = response.status, json.loads(response.read())
    connection.close()
    return status, answer


@pytest.fixture
def watch(kungfu_run, start_module, script):
    def start(*flags, environment=None):
        # These workers don't count, as the runtime does.
        program = kungfu_run("-peer-timeout", 0, *flags, "-w", *script(WORKER), environment=environment)
        return Job(program, start_module)

    return start


def test_manual_resize_grows_and_shrinks_and_workers_keep_their_processes(watch):
    job = watch("-np", 1)
    job.wait_for_version(0, 1)
    code, output = job.resize("4")
    assert code == 0
    assert output == "cluster version 1: 1 -> 4 workers; the job follows as soon as the new workers are ready"
    assert [m[2] for m in job.wait_for_version(1, 4)] == ["0", "1", "1", "1"]
    assert job.resize("2")[0] == 0
    assert [m[2] for m in job.wait_for_version(2, 2)] == ["0", "1"]
    job.wait_for("^detached", 2)
    assert job.resize("1")[0] == 0
    job.wait_for_version(3, 1)
    job.finish()


def test_cores_are_divided_again_at_every_change(watch):
    cores = len(os.sched_getaffinity(0))
    job = watch("-np", 1)
    job.wait_for_cores(0, 1, cores)
    job.resize("2")
    job.wait_for_cores(1, 2, max(cores, 2))
    job.resize("1")
    job.wait_for_cores(2, 1, cores)
    job.finish()


def test_each_worker_has_as_many_cores_at_every_size(watch):
    cores = len(os.sched_getaffinity(0))
    job = watch("-np", 1, "-cores-per-worker", 1)
    job.wait_for_cores(0, 1, 1)
    job.resize(str(cores + 1))
    job.wait_for_cores(1, cores + 1, cores + 1)
    job.resize("1")
    job.wait_for_cores(2, 1, 1)
    job.finish()


def test_workers_that_ask_for_it_have_one_core_from_then_on(watch):
    job = watch("-np", 1, environment={"FIX": "1"})
    job.wait_for_version(0, 1)
    job.wait_for(r"^fixed 127.0.0.1:10000: 1 \{1\}")
    job.resize("2")
    job.wait_for_cores(1, 2, 2)  # the newcomer knows, and doesn't ask
    job.resize("1")
    job.wait_for_cores(2, 1, 1)
    job.finish()


def test_workers_are_not_pinned_if_affinity_is_none(watch):
    cores = len(os.sched_getaffinity(0))
    job = watch("-np", 1, "-affinity", "none", environment={"FIX": "1"})
    job.wait_for(rf"^fixed 127.0.0.1:10000: 0 \{{{cores}\}}")
    job.finish()


def test_returning_peer_is_started_anew_while_the_old_process_lingers(watch):
    job = watch("-np", 2, "-leave-grace", "1h", environment={"STUBBORN": "1"})
    job.wait_for_version(0, 2)
    job.put(cluster_of(1, 10000).to_json())
    job.wait_for("^detached 127.0.0.1:10001 incarnation=0")
    job.put(cluster_of(2, 10000, 10001).to_json())
    assert [(m[1], m[2]) for m in job.wait_for_version(2, 2)] == [("127.0.0.1:10000", "0"), ("127.0.0.1:10001", "2")]


def test_any_rank_may_leave_also_the_first(watch):
    job = watch("-np", 3)
    job.wait_for_version(0, 3)
    assert job.put(cluster_of(1, 10002, 10001).to_json())[0] == 200
    assert [m[1] for m in job.wait_for_version(1, 2)] == ["127.0.0.1:10002", "127.0.0.1:10001"]
    job.wait_for("^detached 127.0.0.1:10000")
    job.finish()


def test_removed_worker_that_still_runs_keeps_its_slot_until_needed(watch):
    job = watch("-np", 2, "-leave-grace", "200ms", environment={"STUBBORN": "1"})
    job.wait_for_version(0, 2)
    job.resize("1")
    job.wait_for(r"worker 1 .* is no longer in cluster version 1, but still running after 0.2 s \(-leave-grace\)")
    assert "asked to leave" not in job.program.output
    job.resize("2")  # its name is given to another one
    job.wait_for(r"worker dismissed: worker 1 .* reason=.it has left the cluster, and its slot is needed")
    job.wait_for("^asked to leave")
    job.wait_for_version(2, 2)
    job.finish()


def test_end_of_a_job_does_not_wait_for_workers_removed_long_ago(watch):
    job = watch("-np", 2, "-leave-grace", "200ms", environment={"STUBBORN": "1"})
    job.wait_for_version(0, 2)
    job.resize("1")
    job.wait_for("still running after 0.2 s")
    job.wait_for_version(1, 1)
    job.finish()  # the other one's end is the job's


def test_newest_resize_request_wins_at_once_and_ends_unneeded_workers(watch):
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        job = watch("-np", 1, environment={"STAYS": "1"})
        job.wait_for_version(0, 1)
        code, output = job.resize("257")
        assert code == 1
        assert "257 workers: at most 256 workers per host; add hosts with -H" in output
        code, output = job.resize("12")
        assert code == 0
        assert "12 workers are far more than the 1 core of this machine" in output
        job.wait_for("many workers: workers=12 cores=1")
        assert job.resize("2")[0] == 0
        job.wait_for(
            r"worker dismissed: worker \d+ .* reason=.not needed any more", 10
        )  # no member has gone over to anything
        job.wait_for(r"worker ready: worker 1")
        job.finish()
    finally:
        os.sched_setaffinity(0, cores)


def test_worker_that_fails_after_it_has_left_does_not_end_the_job(watch):
    job = watch("-np", 2, environment={"LEAVE_WITH": "3"})
    job.wait_for_version(0, 2)
    job.resize("1")
    job.wait_for(r"worker 1 .* had left the cluster and then exited with code 3")
    job.finish()


def test_growing_past_the_slots_is_refused_at_the_caller(watch):
    job = watch("-np", 1, "-H", "127.0.0.1:2")
    job.wait_for_version(0, 1)
    code, output = job.resize("3")
    assert code == 1
    assert "3 workers: -H 127.0.0.1:2 has 2 slots" in output
    assert job.resize("2")[0] == 0
    job.wait_for_version(1, 2)
    job.finish()


BAD = [
    (b"garbage", 400, "not JSON"),
    (cluster_of(1).to_json(), 400, "Workers is empty"),
    (cluster_of(7, 10000).to_json(), 409, "not the next version"),
    (cluster_of(1, 10005).to_json(), 400, "keep one of 127.0.0.1:10000"),
    (
        {"Workers": ["10.0.0.1:10000", "127.0.0.1:10000"]},
        400,
        "worker 10.0.0.1:10000 is on a host that isn't in the job: the hosts are 127.0.0.1",
    ),
]


def test_a_bad_put_is_refused_and_the_job_goes_on(watch):
    job = watch("-np", 1)
    job.wait_for_version(0, 1)
    found = [(document, *job.put(document)) for document, _, _ in BAD]
    wrong = [
        (str(document)[:80], code, answer)
        for (document, code, answer), (_, status, told) in zip(found, BAD)
        if code != status or told not in answer["error"]
    ]
    assert wrong == []
    assert job.resize("2")[0] == 0
    job.wait_for_version(1, 2)
    job.finish()


def test_a_worker_that_could_not_be_started_is_no_failure_of_the_program(kungfu_run, start_module, tmp_path):
    os.mkfifo(tmp_path / "end")
    worker = tmp_path / "worker"
    worker.write_text('#!/bin/sh\nrm -- "$0"\necho runs\nread -r line <"$1"\n')
    worker.chmod(0o700)
    job = Job(kungfu_run("-np", 1, "-w", "-builtin-config-port", 0, worker, tmp_path / "end"), start_module)
    job.wait_for(r"runs")
    assert job.resize("2")[0] == 0
    job.wait_for(r"worker 1 \(\S+\) can't run")
    (tmp_path / "end").write_text("now\n")
    job.program.assert_exit(0)


def test_resize_without_a_url_finds_the_only_job_of_this_user(watch, start_module, tmp_path):
    def resize(*words):
        environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
        command = start_module(ONE_FOLDER, "resize", *words, environment=environment)
        return command.wait(), command.output

    code, output = resize(2)
    assert code == 2
    assert output.startswith("kungfu-run resize: no job of this user runs here; start one with")
    one = watch("-np", 1)
    one.wait_for_version(0, 1)
    one.program.signal(signal.SIGSTOP)
    code, output = resize(2)
    one.program.signal(signal.SIGCONT)
    assert code == 1
    assert "doesn't answer within 2 s: its launcher is stopped or overloaded" in output
    code, output = resize(2)
    assert code == 0, output
    assert "cluster version 1: 1 -> 2 workers" in output
    one.wait_for_version(1, 2)
    other = watch("-np", 1, "-port-range", "20000-20010")
    other.wait_for_version(0, 1)
    code, output = resize(3)
    assert code == 2
    assert output.startswith("kungfu-run resize: 2 jobs of this user run here; give the process ID or the URL, e.g. ")
    for job in (one, other):
        assert re.search(rf"^  {job.program.process.pid}  .*  {job.url}$", output, re.MULTILINE)
    code, output = resize(2, other.program.process.pid)
    assert code == 0, output
    other.wait_for_version(1, 2)
    other.finish_alone()
    one.finish()


def test_resize_says_what_is_wrong(watch, start_module):
    job = watch("-np", 1)
    job.wait_for_version(0, 1)
    assert job.resize("1") == (0, "nothing to do: cluster version 0 has 1 worker already")
    for arguments, told in (
        (["0"], "give one size, at least 1"),
        (["x"], "give one size, at least 1"),
        ([], "give one size, at least 1"),
        (["2", "-confg", "x"], "unknown flag -confg; did you mean -config-server?"),
    ):
        code, output = job.resize(*arguments)
        assert code == 2
        assert told in output
    code, output = job.resize("2", "-config-server", f"http://127.0.0.1:{free_port()}/config", server=False)
    assert code == 2
    assert "no secret for" in output
    job.finish()


def test_size_and_flags_of_resize_may_come_in_any_order(watch):
    job = watch("-np", 1)
    job.wait_for_version(0, 1)
    assert job.resize("-config-server", job.url, "-port-range", "12000-12001", "2", server=False)[0] == 0
    assert [m[1] for m in job.wait_for_version(1, 2)] == ["127.0.0.1:10000", "127.0.0.1:12000"]
    job.finish()


def test_a_taken_port_is_one_sentence_with_the_remedy(kungfu_run):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        job = kungfu_run("-w", "-builtin-config-port", port, "true")
        job.assert_exit(1)
        remedy = "give another port, or 0 for any free port"
        assert job.lines == [f"kungfu-run: port {port} (-builtin-config-port) on 127.0.0.1 is taken; {remedy}"]
        job.assert_gone(time.monotonic())


def test_kungfus_own_command_line_works(watch):
    port = free_port()
    url = f"http://127.0.0.1:{port}/config"
    job = watch("-np", "1", "-builtin-config-port", port, "-config-server", url)
    assert job.url == url
    job.wait_for_version(0, 1)
    job.finish()


def test_job_ends_with_its_members_although_joining_workers_still_wait(kungfu_run, script, start_module):
    # Rank 0 never moves to the new version; the workers that were started for it wait in vain.
    worker = script(WORKER.replace("while True:", "while incarnation == 0: time.sleep(0.01)\nwhile True:"))
    job = Job(kungfu_run("-np", 1, "-w", *worker), start_module)
    job.wait_for_version(0, 1)
    job.resize("2")
    job.wait_for("worker started: worker 1 .*")
    job.wait_for("broker=", 2)
    worker = job.wait_for(r"worker started: worker 0 \(127.0.0.1:10000, pid (\d+)\)")[0][1]
    os.kill(int(worker), signal.SIGUSR1)
    job.program.assert_exit(0)
    job.program.assert_gone(time.monotonic())


def test_killed_joining_worker_with_recover_fail_ends_the_job_and_is_named(watch):
    job = watch("-np", 1, "-recover", "fail")
    job.wait_for_version(0, 1)
    job.resize("2")
    job.wait_for_version(1, 2)
    pid = int(job.wait_for(r"worker started: worker 1 \(127.0.0.1:10001, pid (\d+)\)")[0][1])
    begin = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    job.program.assert_exit(137)
    job.program.assert_gone(begin)
    assert job.program.stderr[-1] == f"kungfu-run: worker 1 (127.0.0.1:10001, pid {pid}) was killed by SIGKILL"


# ---- a config server of its own ----


class ExternalServer:
    def __init__(self, start_module, runtime_dir, port):
        self._start_module = start_module
        self.port = port
        self.environment = {"XDG_RUNTIME_DIR": str(runtime_dir), "KUNGFU_JOB_SECRET": "abcdef"}
        self.url = f"http://127.0.0.1:{port}/config"
        self.client = open_store(self.url, "abcdef")
        self.start()

    def start(self, *arguments):
        self.program = self._start_module(
            "ms_kungfu.config_server", "-port", self.port, *arguments, environment=self.environment
        )
        self.program.wait_for("serving")


@pytest.fixture
def external(start_module, tmp_path):
    return ExternalServer(start_module, tmp_path / "run", free_port())


@pytest.fixture
def follow(kungfu_run, script, external):
    def start(*flags):
        return kungfu_run(*flags, "-w", "-config-server", external.url, *script(WORKER))

    return start


def members(job, version, size):
    return job.wait_for(rf"^in (\S+) incarnation=(\d+) version={version} rank=\d+ size={size}", size)


def test_a_config_server_of_its_own_is_followed(follow, external):
    job = follow("-np", 1)
    members(job, 0, 1)
    external.client.put(external.client.get().resized(3, range(10000, 10010)))
    members(job, 1, 3)
    job.signal(signal.SIGUSR1)
    job.assert_exit(0)


def test_the_next_job_at_the_same_server_goes_on_with_the_versions(follow, external):
    external.client.put(cluster_of(6, 20000, 20001))
    job = follow("-np", 1)
    members(job, 7, 1)
    assert external.client.get().version == 7


def test_init_version_minus_1_waits_for_a_cluster(follow, external):
    job = follow("-np", 1, "-init-version", "-1")
    job.wait_for("waiting for a cluster: url=")
    external.client.put(cluster_of(4, 20000, 20001))
    assert {m[1] for m in members(job, 4, 2)} == {"127.0.0.1:20000", "127.0.0.1:20001"}


def test_init_version_that_is_over_is_refused(follow, external):
    external.client.put(cluster_of(6, 10000))
    job = follow("-init-version", "3")
    job.assert_exit(1)
    assert "is already at version 6" in job.lines[-1]


def test_init_version_is_the_first_version(follow, external):
    job = follow("-init-version", "5")
    members(job, 5, 1)
    assert external.client.get().version == 5


@pytest.mark.parametrize("returns_with", ["nothing", "an old cluster"])
def test_training_continues_without_the_config_server_and_resizes_later(follow, external, returns_with, tmp_path):
    job = follow("-np", 1, "-init-version", "5")
    members(job, 5, 1)
    external.client.put(external.client.get().resized(2, range(10000, 10010)))
    members(job, 6, 2)
    external.program.kill_all()
    job.wait_for("The job goes on; changes of the cluster wait")
    if returns_with == "nothing":
        external.start()
    else:
        (tmp_path / "old.json").write_text(cluster_of(0, 10007).dumps())
        external.start("-init", tmp_path / "old.json")
    job.wait_for("store available: ")
    assert external.client.get().version == 6
    external.client.put(external.client.get().resized(3, range(10000, 10010)))
    members(job, 7, 3)
    job.signal(signal.SIGUSR1)
    job.assert_exit(0)


def test_version_that_this_host_cannot_run_is_refused_and_job_continues(follow, external):
    job = follow("-np", 1, "-H", "127.0.0.1:1")
    members(job, 0, 1)
    external.client.put(cluster_of(1, 10000, 10001))
    job.wait_for("cluster rejected: version=1 reason=.2 workers: -H .* has 1 slot")


def test_an_external_server_that_is_not_there_is_one_sentence(kungfu_run, monkeypatch):
    job = kungfu_run("-w", "-config-server", f"http://127.0.0.1:{free_port()}/config", "true")
    job.assert_exit(1)
    assert len(job.lines) == 1
    assert "start a config server first (kungfu-config-server)" in job.lines[0]


def test_waiting_for_a_config_server_can_be_interrupted(kungfu_run):
    with socket.socket() as deaf:  # takes connections and never answers
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}/config"
        job = kungfu_run("-w", "-config-server", url, "true", environment={"KUNGFU_JOB_SECRET": "ab"})
        deaf.settimeout(20)
        deaf.accept()
        begin = time.monotonic()
        job.signal(signal.SIGINT)
        job.assert_exit(130)
        job.assert_gone(begin)


@pytest.mark.parametrize(
    ("in_step", "said"),
    [
        ("pass", r"\. No worker has reported a step\. .*KungFuElasticCallback, ElasticTraining or --msrun"),
        ("kf.membership.training_begun(0)", r" step=0\. No worker has finished a step in this time\. "),
        (
            "kf.membership.step_ended(i)",
            r" step=\d+\. The workers have not adopted it\. .*epochs\(\) and no dataset=, they adopt it at",
        ),
    ],
    ids=["counts no steps", "is in its first step", "counts steps"],
)
def test_program_that_never_looks_for_changes_is_warned_of(start_module, script, in_step, said):
    port = free_port()
    run = start_module(
        "tests.multiprocess.programs.impatient_launcher", "-np", 1, "-w", "-builtin-config-port", port,
        *script("import itertools\nimport ms_kungfu as kf\n"
                "for i in itertools.count():\n    kf.comm.all_reduce(1)\n"
                f"    {in_step}\n"
                "    if i == 1: print('reduces', flush=True)\n"),
        environment={"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    run.wait_for("^reduces")
    resize = start_module("ms_kungfu.launcher", "resize", 2, "-config-server", f"http://127.0.0.1:{port}/config")
    resize.assert_exit(0)
    told = r"change waits: version=1 seconds=0\.5" + said
    run.wait_for(told)
    run.signal(signal.SIGTERM)
    run.assert_exit(143)
    assert len(run.wait_for(told)) == 1
    assert len([line for line in run.lines if "change waits: version=1" in line]) == 1


def test_worker_that_polls_for_a_failed_ranks_file_says_where_it_is(start_module, script):
    run = start_module(
        "ms_kungfu.launcher", "-np", 2, "-w", "-builtin-config-port", free_port(), "-recover", "shrink",
        *script("import os, signal, time\nimport ms_kungfu as kf\nfrom ms_kungfu.membership import outside\n"
                "outside._LIMIT_S, outside._LOOK_EVERY_S = 0.3, 0.05\nkf.comm.all_reduce(1)\n"
                "kf.membership.step_ended(7)\nif kf.current_rank() == 0: os.kill(os.getpid(), signal.SIGKILL)\n"
                "while not os.path.exists('written by rank 0'): time.sleep(0.01)\n"),
    )  # fmt: skip
    told = r"WARNING: outside steps: rank=1 seconds=0 last_step=7 at=worker.py:8 version=1 failed_ranks=0\. "
    run.wait_for(told)
    run.signal(signal.SIGTERM)
    run.assert_exit(143)
    assert len(run.wait_for(told)) == 1


def test_while_a_worker_has_yet_to_join_the_change_is_said_to_wait_for_it(start_module, script):
    port = free_port()
    run = start_module(
        "tests.multiprocess.programs.impatient_launcher", "-np", 1, "-w", "-builtin-config-port", port,
        *script("import os, time\nimport ms_kungfu as kf\n"
                "print('imports', flush=True)\n"
                "if os.environ['RANK_ID'] == '0': time.sleep(1000)\nkf.comm.all_reduce(1)\n"),
        environment={"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    run.wait_for("^imports")
    resize = start_module("ms_kungfu.launcher", "resize", 2, "-config-server", f"http://127.0.0.1:{port}/config")
    resize.assert_exit(0)
    told = r"change waits: version=1 not_joined=.worker 0 "
    run.wait_for(told)
    time.sleep(1.2)
    run.signal(signal.SIGTERM)
    run.assert_exit(143)
    assert len(run.wait_for(told)) == 1
    assert not [line for line in run.lines if "No worker has" in line]
