"""A container without /dev/shm and without ptrace takes nothing more: jobs start, change and survive deaths there."""

import os
import platform
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import RECOVERY_PROGRAM, Job


def may_confine():
    if platform.machine() != "x86_64" or shutil.which("unshare") is None:
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0


pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(
        not may_confine(),
        reason="mount namespaces need root; the filter of system calls is written for x86-64",
    ),
]
CONFINED = Path(__file__).parent / "programs" / "confined.py"
EXAMPLE = Path(__file__).parents[2] / "examples" / "comm-fusion" / "train.py"


def within(dev):
    return ["unshare", "-m", sys.executable, str(CONFINED), dev]


@pytest.mark.parametrize("dev", ["absent", pytest.param("read-only", marks=pytest.mark.long)])
def test_a_job_starts_changes_and_survives_a_death(kungfu_run, start_module, dev):
    run = kungfu_run("-np", 2, "-w", sys.executable, RECOVERY_PROGRAM, within=within(dev))
    run.wait_for(r"^confined: /dev has" if dev == "read-only" else r"^confined: /dev has (?!.*'shm')")
    job = Job(run, start_module)
    job.in_version(0, 2)
    assert job.command("resize", 3)[0] == 0
    there = job.in_version(1, 3)
    os.kill(there[1], signal.SIGKILL)
    job.in_version(2, 2)
    assert job.finish(2) == {there[0], there[2]}


def test_a_training_with_mindspore(kungfu_run):
    pytest.importorskip("mindspore", reason="MindSpore is not installed")
    run = kungfu_run("-q", "-np", 2, sys.executable, EXAMPLE, "--epochs", 1, within=within("absent"))
    run.assert_exit(0, timeout=100)
    assert "gradients/0: 1 gradient" in run.output
    assert "epoch 1 of 1  loss " in run.output
