"""Jobs in a real Slurm, of two nodes that are both this machine."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.engines import slurm_cluster

pytestmark = pytest.mark.timeout(240)
RESUMING = Path(__file__).with_name("programs") / "resuming.py"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "slurm" / "train.sbatch"
KUNGFU_RUN = [sys.executable, "-m", "ms_kungfu.launcher"]
SECRET = "0123456789abcdef" * 2


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    reason = slurm_cluster.why_not()
    if reason is not None:
        pytest.skip(reason)
    made = slurm_cluster.Slurm(tmp_path_factory.mktemp("slurm"))
    yield made
    made.close()


@pytest.fixture
def slurm(started):
    """With both nodes idle: the test before may have left its job."""
    started.cancel_all()
    return started


def run(slurm, *words, secret=SECRET):
    """srun, and what it printed."""
    done = subprocess.run(
        [*slurm.within(), "srun", *map(str, words)], capture_output=True, text=True, stdin=subprocess.DEVNULL,
        env={"PATH": "/usr/bin:/bin", **slurm.environment, **({"KUNGFU_JOB_SECRET": secret} if secret else {})},
        timeout=120,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def files(folder):
    """The program's checkpoint, and what it ends by. (A process in the mounts of a Slurm has lost its folder.)"""
    return folder / "at", folder / "finish"


def wait_for(pattern, file, count=1, timeout_s=90):
    deadline = time.monotonic() + timeout_s
    while True:
        text = file.read_text() if file.exists() else ""
        found = list(re.finditer(pattern, text, re.MULTILINE))
        if len(found) >= count:
            return found
        assert time.monotonic() < deadline, f"no {count} of {pattern!r}:\n{text}"
        time.sleep(0.1)


PLACE = "import os; print('worker', os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['KUNGFU_SELF'])"


def test_srun_needs_no_list_of_hosts(slurm, tmp_path):
    code, told = run(slurm, "-N2", "--ntasks-per-node=2", *KUNGFU_RUN, sys.executable, "-c", PLACE)
    assert code == 0, told
    assert sorted(re.findall(r"^worker (.*)", told, re.MULTILINE)) == [
        "0 4 n1:10000",
        "1 4 n1:10001",
        "2 4 n2:10000",
        "3 4 n2:10001",
    ]


def test_workers_of_two_nodes_reduce_together(slurm, tmp_path):
    (tmp_path / "finish").touch()
    words = ["-N2", "--ntasks-per-node=1", "-c2", *KUNGFU_RUN, "-np", 4, sys.executable, RESUMING, *files(tmp_path)]
    code, told = run(slurm, *words)
    assert code == 0, told
    assert len(re.findall(r"^begins at step 0 rank \d of 4 at n[12]:\d+", told, re.MULTILINE)) == 4
    assert told.count("finished at step 0") == 4


def test_a_list_of_nodes_that_does_not_parse(slurm, tmp_path):
    code, told = run(slurm, "-N1", "-n1", "env", "SLURM_STEP_NODELIST=n[1-", *KUNGFU_RUN, "true")
    assert code == 2, told
    (line,) = [line for line in told.splitlines() if line.startswith("kungfu-run: ")]
    assert "SLURM_STEP_NODELIST: 'n[1-' is not a list of nodes" in line
    assert "name the hosts with -H" in line


def test_several_nodes_without_a_secret(slurm, tmp_path):
    code, told = run(slurm, "-N2", *KUNGFU_RUN, "true", secret="")
    assert code == 2, told
    assert "srun passes its environment to all nodes" in told


def submit(slurm, folder):
    """The example, with a program that trains until there is a file: the job's number, and what it prints to."""
    told = slurm.run(
        "env", f"PATH={Path(sys.executable).parent}:/usr/bin:/bin", f"TRAIN={RESUMING}", "sbatch", "-c4", "-D", folder,
        "-o", folder / "out", EXAMPLE, *files(folder),
    )  # fmt: skip
    return int(told.split()[-1]), folder / "out"


def wait_until_queued_again(slurm, job):
    deadline = time.monotonic() + 90
    while "PD" not in slurm.run("squeue", "-h", "-j", job, "-o", "%t", check=False):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def start_again(slurm, job):
    """Once it is queued again. Slurm lets such a one wait for two minutes: a job that starts within the second in which
    its nodes hear of its end is taken for the one that has ended."""
    wait_until_queued_again(slurm, job)
    time.sleep(2.5)
    slurm.run("scontrol", "update", f"jobid={job}", "starttime=now")


def test_preempted_job_leaves_in_time_and_resumes_from_checkpoint(slurm, tmp_path):
    job, out = submit(slurm, tmp_path)
    wait_for(r"^begins at step 0 rank \d of 4", out, 4)
    wait_for(r"[1-9]\d*", tmp_path / "at")
    begun = time.monotonic()
    # It wants all of both nodes.
    code, told = run(slurm, "-p", "high", "-N2", "-n2", "-c4", "true")
    assert code == 0, told
    assert time.monotonic() - begun < 40, "the grace of 60 s isn't needed"
    wait_for("interrupted by SIGTERM", out)
    reached = int((tmp_path / "at").read_text())
    start_again(slurm, job)
    again = wait_for(r"^begins at step (\d+) rank \d of 4", out, 8)[4:]
    assert {int(match[1]) for match in again} == {reached}
    assert reached > 0
    (tmp_path / "finish").touch()
    assert len(wait_for(r"^finished at step (\d+)", out, 4)) == 4
    wait_for("all workers have finished", out)


@pytest.mark.parametrize("numbers", [[signal.SIGUSR1], [signal.SIGTERM], [signal.SIGUSR1] * 3])
def test_slurms_warning_before_it_takes_the_nodes_ends_the_job_in_time(slurm, tmp_path, numbers):
    job, out = submit(slurm, tmp_path)
    wait_for(r"^begins at step 0 rank \d of 4", out, 4)
    for number in numbers:
        slurm.run("scancel", f"--signal={number.name[3:]}", job)
    ended = wait_for(r"task \d: (.*)\n", out, 2)
    assert {match[1] for match in ended} == {"Exited with exit code 143"}
    assert "interrupted by SIGTERM" in out.read_text()
    wait_until_queued_again(slurm, job)  # the script goes by that code
    slurm.run("scancel", job)


def test_a_node_that_fails_costs_its_workers_and_not_the_job(slurm, tmp_path):
    job, out = submit(slurm, tmp_path)
    wait_for(r"^begins at step 0 rank \d of 4", out, 4)
    slurm.run("scontrol", "update", "nodename=n2", "state=down", "reason=test")
    wait_for("host lost: host=n2", out)
    # Slurm kills what runs on the node one by one: a worker's death may be seen before its host's, as a version.
    wait_for(r"cluster desired: version=\d workers=2", out)
    reached = int(wait_for(r"[1-9]\d*", tmp_path / "at")[0][0])
    deadline = time.monotonic() + 60
    while int((tmp_path / "at").read_text()) <= reached + 5:
        assert time.monotonic() < deadline, out.read_text()
        time.sleep(0.1)
    assert slurm.run("squeue", "-h", "-j", job, "-o", "%t %N").split() == ["R", "n1"]
    (tmp_path / "finish").touch()
    wait_for("all workers have finished", out)
    assert len(re.findall(r"^finished at step", out.read_text(), re.MULTILINE)) == 2
    slurm.wait_until_idle()  # the node comes back


def test_a_running_job_is_resized_and_asked_from_within_its_allocation(slurm, tmp_path):
    """As docs/slurm.md has it."""
    job, out = submit(slurm, tmp_path)
    wait_for(r"^begins at step 0 rank \d of 4", out, 4)
    (url,) = {match[1] for match in wait_for(r"config server: url=(http\S+)", out)}
    within = ["srun", f"--jobid={job}", "--overlap", "-N1", "-n1", "-w", "n1", *KUNGFU_RUN]
    told = slurm.run(*within, "resize", 2, "-config-server", url)
    assert "cluster version 1: 4 -> 2 workers" in told
    wait_for("cluster committed: version=1 workers=2", out)
    told = slurm.run(*within, "status")
    assert f"config server {url}" in told
    assert "version 1: 4 -> 2 workers" in told
    slurm.run("scancel", job)
