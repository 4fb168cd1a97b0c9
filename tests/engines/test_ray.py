"""Jobs on a real Ray, of raylets that are all this machine."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from ms_kungfu._processes import children
from tests.engines import raylets

pytestmark = pytest.mark.timeout(600)
ROOT = Path(__file__).resolve().parents[2]
STEADY = Path(__file__).with_name("programs") / "steady.py"
EXAMPLE = ROOT / "examples" / "ray" / "launch.py"
LENET = ROOT / "examples" / "lenet-elastic" / "train.py"
GONE_WITHIN_S = 60.0
LENET_S = 150  # for two raylets to start, beside a training


@pytest.fixture
def ray_of():
    """Starts a Ray with nodes of so many CPUs each; nothing of it is left after the test."""
    reason = raylets.why_not()
    if reason is not None:
        pytest.skip(reason)
    made = []

    def make(*cpus):
        made.append(raylets.Raylets(*cpus))
        return made[-1]

    yield make
    for each in made:
        each.close()


def assert_nothing_left(program):
    """Of the agents' kungfu-runs and their workers, which aren't below the driver."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while True:
        left = [
            line for path in Path("/proc").glob("[0-9]*/cmdline") if (line := command_of(path)) and str(program) in line
        ]
        if not left:
            return
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def command_of(path):
    try:
        return path.read_text().replace("\0", " ")
    except OSError:
        return ""


def members(job, version, size):
    """The process IDs of a version's workers."""
    found = job.wait_for(rf"^in version {version} rank \d+ of {size} pid (\d+)", size, timeout=120)
    return {int(match[1]) for match in found}


def newest(job, size, after=0):
    """The first version after that one that has all of its `size` workers."""
    deadline = time.monotonic() + 120
    while True:
        for version in range(after + 1, after + 8):
            lines = [re.match(rf"in version {version} rank \d+ of {size} ", line) for line in list(job.lines)]
            if sum(map(bool, lines)) == size:
                return version
        assert time.monotonic() < deadline, job.output
        time.sleep(0.1)


@pytest.mark.alone
def test_nodes_that_come_are_used_and_those_that_go_are_left_in_time(ray_of, kungfu_run, tmp_path):
    """The driver's node has no CPU: it decides, and the others may all go."""
    program = tmp_path / "steady.py"
    program.write_text(STEADY.read_text())
    ray = ray_of(0, 1)
    second = ray.add(1)
    job = kungfu_run(
        "--engine", "ray", "--address", ray.address, "-np", 2, "-min-np", 1, "-max-np", 3, sys.executable, program
    )
    first = members(job, 0, 2)
    ray.add(1)
    grown = newest(job, 3)
    assert first < members(job, grown, 3)
    ray.drain(second)
    job.wait_for(r"Ray is about to remove 127\.0\.0\.\d: the host leaves the job", timeout=60)
    job.wait_for(r"^left pid \d+ step \d+", timeout=60)
    newest(job, 2, grown)
    assert "the others go on without it" not in job.output
    job.signal(signal.SIGINT)
    job.assert_exit(130, 60)
    assert_nothing_left(program)


@pytest.mark.alone
def test_a_driver_that_is_killed_leaves_nothing(ray_of, kungfu_run, tmp_path):
    program = tmp_path / "steady.py"
    program.write_text(STEADY.read_text())
    ray = ray_of(1, 1)
    job = kungfu_run("--engine", "ray", "--address", ray.address, "-np", 2, sys.executable, program)
    members(job, 0, 2)
    job.signal(signal.SIGKILL)
    assert_nothing_left(program)


@pytest.mark.alone
def test_a_cluster_that_is_too_small_is_refused_by_a_sentence(ray_of, kungfu_run):
    ray = ray_of(1)
    words = ["-engine", "ray", "-address", ray.address, "-np", 4, "-min-np", 2, "-max-np", 8]
    job = kungfu_run(*words, "true")
    job.assert_exit(1, 120)
    (line,) = [line for line in job.stderr if line.startswith("kungfu-run")]
    assert f"-min-np 2 is more than the 1 worker that fit on the Ray cluster at {ray.address}" in line
    assert "request a smaller -min-np, add nodes, or let it wait" in line


@pytest.mark.alone
@pytest.mark.long
def test_ray_job_with_etcd_survives_head_node_and_sigterm_ends_all_hosts(ray_of, etcd_of, kungfu_run, tmp_path):
    """No host just leaves by it, while the others go on."""
    program = tmp_path / "steady.py"
    program.write_text(STEADY.read_text())
    ray, url = ray_of(1, 1, 1), etcd_of(1).url("seat")
    words = ["-engine", "ray", "-address", ray.address, "-np", 3, "-min-np", 1, "-recover", "shrink"]
    job = kungfu_run(*words, "-host-timeout", "8s", "-config-server", url, sys.executable, program)
    members(job, 0, 3)
    (agent,) = agents("-self=127.0.0.1", program)
    (head,) = children(agent)
    os.kill(head, signal.SIGKILL)
    job.wait_for(r"on 127\.0\.0\.1, the head node, has ended, and the other hosts continue", timeout=60)
    newest(job, 2)
    job.signal(signal.SIGTERM)
    job.assert_exit(143, 30)
    assert_nothing_left(program)


@pytest.mark.skipif(raylets.why_not() is not None, reason=str(raylets.why_not()))
@pytest.mark.parametrize(
    ("address", "told"),
    [
        ("127.0.0.1:1", "no Ray cluster answers there (Connection refused); start one (ray start --head)"),
        ("ray://127.0.0.1:1", "the driver must run on a node of the cluster; give HOST:PORT"),
    ],
)
def test_an_address_where_no_ray_is_is_refused_by_a_sentence(address, told, kungfu_run):
    job = kungfu_run("-engine", "ray", "-address", address, "true")
    job.assert_exit(1, 60)
    assert [line.startswith(f"kungfu-run: -address {address}: {told}") for line in job.stderr] == [True]


@pytest.mark.alone
def test_killed_agent_is_distinguished_from_lost_node(ray_of, kungfu_run, tmp_path):
    """Its host comes back: the node is there, and has room."""
    program = tmp_path / "steady.py"
    program.write_text(STEADY.read_text())
    ray = ray_of(0, 1, 1)
    words = ["-engine", "ray", "-address", ray.address, "-np", 2, "-min-np", 1, "-max-np", 2]
    job = kungfu_run(*words, sys.executable, program)
    members(job, 0, 2)
    (agent,) = agents("-self=127.0.0.3", program)
    os.kill(agent, signal.SIGKILL)
    job.wait_for(r"the agent on 127\.0\.0\.3 has failed, with the host's workers", timeout=60)
    newest(job, 2)
    assert "the node of" not in job.output
    job.signal(signal.SIGINT)
    job.assert_exit(130, 60)
    assert_nothing_left(program)


def agents(*words):
    """The processes of Ray's that have started a kungfu-run with these words."""
    lines = [command_of(path) for path in Path("/proc").glob("[0-9]*/cmdline")]
    return {
        int(line.split("run_launcher()")[1].split()[0])
        for line in lines
        if "run_launcher()" in line and {*map(str, words)} <= {*line.split()}
    }


FUNCTION = """
import dataclasses
import functools
import os

import beside
import ms_kungfu.ray

@dataclasses.dataclass
class Result:
    rank: int
    of_the_module: str

def train():
    import numpy as np
    import ms_kungfu as kf
    from ms_kungfu import comm
    kf.init()
    total = comm.all_reduce(np.array([kf.current_rank() + 1]), name="ranks")
    print("worker", kf.current_rank(), flush=True)
    return kf.current_rank(), int(total[0]), os.environ["OMP_NUM_THREADS"]

def leave():
    raise SystemExit(3)

def fail():
    import numpy as np
    from ms_kungfu import comm, current_rank
    comm.all_reduce(np.ones(1), name="ones")
    if current_rank() == 1:
        raise FileNotFoundError(2, "no such data")
    return current_rank()

def returns(make):
    return make()

def attempt(function, workers=1):
    try:
        print("returned", ms_kungfu.ray.run(function, num_workers=workers))
    except subprocess.CalledProcessError as error:
        print("failed with", error.returncode, error.rank, repr(error.__cause__), "|", error)
    except TypeError as error:
        print("TypeError", error)

if __name__ == "__main__":
    import ray, subprocess, threading
    ray.init("local", num_cpus=2, include_dashboard=False)
    attempt(train, 2)
    attempt(leave)
    attempt(fail, (1, 2))
    # At once, with all CPUs again.
    (one, two) = ms_kungfu.ray.run(lambda: Result(ms_kungfu.current_rank(), beside.NAME), num_workers=(1, 2))
    print("returned", one == Result(0, "mine"), two == Result(1, "mine"))
    attempt(beside.count, (1, 2))
    print("returned", ms_kungfu.ray.run(functools.partial(returns, lambda: lambda: 7))[0]())
    attempt(functools.partial(returns, threading.Lock))
"""
INTERRUPTED = """
import os, time
import ms_kungfu.ray

def train():
    print("trains in", os.getpid(), flush=True)
    time.sleep(600)

if __name__ == "__main__":
    try:
        ms_kungfu.ray.run(train, address="local")
    except KeyboardInterrupt as error:
        print("interrupted", flush=True)
"""
WITHOUT_HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
import ms_kungfu.ray

FOLDER = Path(sys.argv[1])

def train():
    import numpy as np
    from ms_kungfu import comm
    (FOLDER / "begun").touch()
    while not (FOLDER / "enough").exists():
        comm.all_reduce(np.ones(1), name="step")
        time.sleep(0.1)
    return 7

def kill_head():
    while not (FOLDER / "begun").exists():
        time.sleep(0.1)
    for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        if "gcs_server" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(int(pid), signal.SIGKILL)
            print("killed", flush=True)

if __name__ == "__main__":
    threading.Thread(target=kill_head, daemon=True).start()
    print("returned", ms_kungfu.ray.run(train, address="local"), flush=True)
"""


@pytest.mark.alone
@pytest.mark.skipif(raylets.why_not() is not None, reason=str(raylets.why_not()))
def test_functions_run_on_a_machine_with_nothing_started(run_program, tmp_path, monkeypatch):
    for name, value in raylets.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    program = tmp_path / "scripts" / "functions.py"  # which isn't the current folder
    program.parent.mkdir()
    program.write_text(FUNCTION)
    program.with_name("beside.py").write_text("NAME = 'mine'\n\ndef count():\n    return len(NAME)\n")
    told = run_program(program, np=0)
    assert sorted(re.findall("^worker (.*)", told, re.MULTILINE)) == ["0", "1"]
    results = re.findall("^(?:returned|failed with|TypeError) .*", told, re.MULTILINE)
    assert results == [
        "returned [(0, 3, '1'), (1, 3, '1')]",
        "failed with 3 0 SystemExit(3) | leave has failed at rank 0: SystemExit: 3",
        "failed with 1 1 FileNotFoundError(2, 'no such data') | "
        "fail has failed at rank 1: FileNotFoundError: [Errno 2] no such data",
        "returned True True",
        "returned [4, 4]",
        "returned 7",
        "TypeError training succeeded, but the value that returns returned at rank 0 (of _thread.lock) can't be "
        "pickled: TypeError: cannot pickle '_thread.lock' object",
    ]


@pytest.mark.alone
@pytest.mark.skipif(raylets.why_not() is not None, reason=str(raylets.why_not()))
def test_interrupt_reaches_the_caller_after_the_job_has_ended(start_module, tmp_path, monkeypatch):
    for name, value in raylets.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    job = start_module("interrupted")
    (trains,) = job.wait_for(r"^trains in (\d+)", timeout=120)
    job.signal(signal.SIGINT)
    job.wait_for("^interrupted", timeout=60)
    job.assert_exit(0, 60)
    assert "Traceback" not in job.output
    assert not Path("/proc", trains[1]).exists()


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.skipif(raylets.why_not() is not None, reason=str(raylets.why_not()))
def test_job_whose_ray_head_node_is_lost_ends_with_returned_values(start_module, tmp_path, monkeypatch):
    for name, value in raylets.ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "without_head.py").write_text(WITHOUT_HEAD)
    job = start_module("without_head", tmp_path)
    job.wait_for("^killed", timeout=120)
    job.wait_for(r"Ray's head \(its GCS\) doesn't answer: training continues", timeout=30)
    (tmp_path / "enough").touch()
    job.wait_for(r"^returned \[7\]", timeout=40)
    job.assert_exit(0, 60)


@pytest.mark.alone
@pytest.mark.long
@pytest.mark.skipif(raylets.why_not() is not None, reason=str(raylets.why_not()))
def test_the_example_runs_on_a_machine_with_nothing_started(run_program, tmp_path, monkeypatch):
    for module in ("mindspore", "sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(module)
    for name, value in {**raylets.ENVIRONMENT, "RAY_ADDRESS": "local"}.items():  # another Ray may run here
        monkeypatch.setenv(name, value)
    told = run_program(EXAMPLE, "--epochs", 4, "--out", tmp_path / "out", np=0)
    (accuracy,) = re.findall(r"^test accuracy (\d\.\d{4})$", told, re.MULTILINE)
    assert float(accuracy) >= 0.8


@pytest.mark.alone
@pytest.mark.long
def test_lenet_on_two_nodes_grows_to_a_third_and_survives_a_lost_node(ray_of, kungfu_run, start_module, tmp_path):
    for module in ("mindspore", "sklearn", "matplotlib", "tqdm"):
        pytest.importorskip(module)
    ray = ray_of(1)
    doomed = ray.add(1)
    ledger = tmp_path / "ledger"
    job = kungfu_run(
        "-engine", "ray", "-address", ray.address, "-np", 2, "-min-np", 1, "-max-np", 3,
        sys.executable, LENET, "--schedule", "none", "--epochs", 300, "--until", int(time.time()) + LENET_S,
        "--ledger", ledger, "--out", tmp_path / "out",
    )  # fmt: skip
    job.wait_for("cluster committed: version=0|worker started: worker 1 .*", timeout=200)
    ray.add(1)
    job.wait_for(r"cluster committed: version=\d+ workers=3", timeout=300)
    ray.remove(doomed)
    job.wait_for("the others go on without it", timeout=60)
    job.assert_exit(0, 400)
    accuracy = re.findall(r"^test accuracy (\d\.\d{4})$", job.output, re.MULTILINE)
    assert len(accuracy) == 1, job.output
    assert float(accuracy[0]) >= 0.8
    audit = start_module("ms_kungfu.dataset.audit", ledger)
    audit.assert_exit(0, 60)
    assert "exact: each sample was trained once" in audit.output
