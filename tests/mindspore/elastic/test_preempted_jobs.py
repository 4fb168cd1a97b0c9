"""Jobs that end by a signal to the launcher: what their workers write before, and with what code they end."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("programs") / "preempted.py"
pytestmark = pytest.mark.timeout(120)
pytest.importorskip("mindspore", reason="MindSpore is not installed")


@pytest.fixture
def held(kungfu_run, tmp_path):
    """Starts a job whose two workers are held in their third step; `go` ends that."""

    def start(*arguments, flags=(), environment=None):
        words = ["-np", 2, *flags, sys.executable, PROGRAM, tmp_path, *arguments]
        job = kungfu_run(*words, environment=environment)
        job.wait_for(r"^holds \d", 2, timeout=60)
        job.go = (tmp_path / "go").touch
        return job

    return start


def checkpoints(folder):
    return sorted(path.name for path in (folder / "checkpoints").glob("*.ckpt"))


WATCH = ("-w", "-builtin-config-port", "0")


@pytest.mark.parametrize(
    ("number", "flags", "arguments"),
    [
        (signal.SIGTERM, (), ["together"]),
        (signal.SIGINT, WATCH, ["together"]),
        (signal.SIGTERM, WATCH, ["together", "thread"]),
        (signal.SIGINT, (), ["together", "thread"]),
    ],
    ids=["SIGTERM", "SIGINT-watch", "SIGTERM-watch-thread", "SIGINT-thread"],
)
def test_signal_ends_the_job_after_the_step_and_its_checkpoint(held, tmp_path, number, flags, arguments):
    job = held(*arguments, flags=flags)
    job.signal(number)
    job.wait_for(f"workers ending: signal={number.name} workers=2 limit_s=30")
    job.go()
    job.assert_exit(128 + number)
    job.assert_gone(time.monotonic())
    assert checkpoints(tmp_path) == ["step-00000003.ckpt"]
    assert f"training ends: step=3 signal={number.name}" in job.output
    assert "trained" not in job.output


@pytest.mark.parametrize("flags", [(), WATCH], ids=["plain", "watch"])
@pytest.mark.parametrize("launcher_too", [False, True])
def test_sigterm_to_all_workers_ends_the_job_after_a_checkpoint(held, tmp_path, flags, launcher_too):
    """Slurm and systemd may send SIGTERM to each process of a job."""
    job = held("together", flags=flags)
    for match in job.wait_for(r"worker started: worker \d \(\S+, pid (\d+)\)", 2):
        os.kill(int(match[1]), signal.SIGTERM)
    if launcher_too:
        job.signal(signal.SIGTERM)
    job.wait_for("workers ending: signal=SIGTERM workers=2")
    job.go()
    job.assert_exit(143)
    job.assert_gone(time.monotonic())
    assert checkpoints(tmp_path) == ["step-00000003.ckpt"]


def test_asynchronous_workers_end_with_one_checkpoint(held, tmp_path):
    job = held("asynchronous")
    job.signal(signal.SIGTERM)
    job.wait_for("workers ending: ")
    job.go()
    job.assert_exit(143)
    assert len(checkpoints(tmp_path)) == 1
    assert "trained" not in job.output


def test_handler_of_the_program_runs_after_the_checkpoint(held, tmp_path):
    job = held("together", "handler")
    job.signal(signal.SIGTERM)
    job.wait_for("workers ending: ")
    job.go()
    job.assert_exit(143)
    assert checkpoints(tmp_path) == ["step-00000003.ckpt"]
    assert job.stdout.count("handled") == 2


def test_second_signal_ends_a_job_that_writes_a_checkpoint_at_once(held, tmp_path):
    job = held("together")
    job.signal(signal.SIGTERM)
    job.wait_for("workers ending: ")
    job.signal(signal.SIGTERM)
    job.assert_exit(143)
    assert checkpoints(tmp_path) == []


def test_grace_period_limits_a_step_that_does_not_end(held, tmp_path):
    job = held("together", flags=["-grace-period", "1500ms"])
    job.signal(signal.SIGTERM)
    job.assert_exit(143)
    assert checkpoints(tmp_path) == []


def test_worker_that_trains_in_a_thread_leaves_on_sigterm(held):
    job = held("none", "thread", flags=WATCH)
    pid = int(job.wait_for(r"worker started: worker 1 \(\S+, pid (\d+)\)")[0][1])
    os.kill(pid, signal.SIGTERM)
    job.wait_for("cluster desired: version=1 workers=1")
    job.go()
    job.wait_for(r"worker exited: worker 1 .* code=0")
    job.wait_for("^trained False 100")
    job.assert_exit(0)


@pytest.mark.parametrize("graceful", ["0", "1"])
def test_request_exit_of_mindspore_ends_training_after_the_step(held, tmp_path, graceful):
    job = held("none", "exit", environment={"MS_ENABLE_GRACEFUL_EXIT": graceful})
    job.signal(signal.SIGTERM)
    job.wait_for("workers ending: ")
    job.go()
    job.assert_exit(143)
    written = [path.relative_to(tmp_path) for path in tmp_path.glob("*/rank_0/asked_train.ckpt")]
    assert written == [Path("0/rank_0/asked_train.ckpt")], "one worker's callbacks write files"
    steps = [int(match[1]) for match in job.wait_for(r"^trained False (\d+)", 2)]
    assert max(steps) <= 5
    again = held("none", "exit", environment={"MS_ENABLE_GRACEFUL_EXIT": graceful})
    again.assert_exit(0)
    ends = {int(match[1]) for match in again.wait_for(r"^trained False (\d+)", 2)}
    assert len(ends) == 1, "all workers continue from the one worker's file"
    assert ends.pop() > 100
