"""ms_kungfu.comm and the membership between real processes."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Run, launcher, long
from tests.ports import free_port

PROGRAMS = Path(__file__).with_name("programs")


@pytest.mark.parametrize("np", [1, 2, 3, long(4), long(7)])
def test_collectives_agree_with_numpy(run_program: Run, np: int) -> None:
    assert run_program(PROGRAMS / "collectives.py", np=np).count("fine") == np


def test_collectives_work_without_the_launcher(run_program: Run) -> None:
    assert "rank 0 of 1 fine" in run_program(PROGRAMS / "collectives.py", np=0)


@pytest.mark.parametrize("np", [0, 1, 3])
def test_all_reduces_in_the_background(run_program: Run, np: int) -> None:
    assert run_program(PROGRAMS / "in_background.py", np=np).count("fine") == max(np, 1)


@pytest.mark.parametrize("np", [0, 1, 3])
def test_prepared_all_reduce_reads_current_elements(run_program: Run, np: int) -> None:
    output = run_program(PROGRAMS / "prepared.py", np=np, watch=np > 1)
    assert output.count("fine") == max(np - 1, 1)


@pytest.mark.parametrize("np", [0, 1, 3])
def test_agreement_after_a_step_finds_different_words(run_program: Run, np: int) -> None:
    assert run_program(PROGRAMS / "agrees.py", np=np).count("fine") == max(np, 1)


def test_a_size_that_one_worker_proposes_comes_true_at_a_later_step(run_program: Run) -> None:
    output = run_program(PROGRAMS / "proposes.py", 3, 1, 2, np=2, watch=True)
    assert (output.count("left"), output.count("finished")) == (2, 2)
    assert "refused" in run_program(PROGRAMS / "proposes.py", 2, np=0)


def test_joining_worker_with_another_mindspore_is_refused(run_program: Run, tmp_path: Path) -> None:
    """pip has replaced it while the job ran: its kernels compute other bits."""
    output = run_program(
        PROGRAMS / "other_versions.py", tmp_path / "told", np=2, watch=True, flags=["-recover", "shrink"], status=1
    )
    assert output.splitlines().count("finished") == 2  # the job ends with the newcomer's status
    sentence = r"MindSpore is 2\.9\.0 in worker \S+, but 2\.10\.0 in worker \S+; all workers of a job require the same"
    assert re.search(sentence, (tmp_path / "told").read_text())
    assert re.search(sentence, output)  # in its log, too


@pytest.mark.parametrize("np", [long(2), 3])
def test_wrong_calls_raise_where_they_should_and_break_nothing(run_program: Run, np: int) -> None:
    assert run_program(PROGRAMS / "misuse.py", np=np).count("fine") == np


def test_ranks_that_wait_for_each_other_learn_it_at_once(run_program: Run) -> None:
    began = time.monotonic()
    output = run_program(PROGRAMS / "other_order.py", "mismatch", np=2, status=1)
    assert time.monotonic() - began < 60  # not the 600 s of a collective's deadline
    for rank, name in ((0, "first"), (1, "second")):
        assert re.search(rf'CollectiveMismatchError: .*rank {rank}: all_reduce "{name}" \(other_order.py:20\)', output)


@pytest.mark.parametrize("manner", ["late", "thread"])
def test_ranks_that_are_late_are_waited_for(run_program: Run, manner: str) -> None:
    assert run_program(PROGRAMS / "other_order.py", manner, np=2).count("fine") == 2


@pytest.mark.timing
@pytest.mark.parametrize("np", [2, 4])
def test_wait_for_a_late_rank_uses_no_cpu(run_program: Run, np: int) -> None:
    assert run_program(PROGRAMS / "idle_wait.py", np=np).count("fine") == np


@pytest.mark.parametrize("manner", ["fail", "recover", long("stay"), "quit"])
def test_ctrl_c_ends_a_collective_that_waits(run_program: Run, manner: str) -> None:
    recovers = manner != "fail"
    # A rank that is out is ended also if no launcher looks for hangs.
    flags = ["-recover", "shrink", "-peer-timeout", "0"] if recovers else []
    output = run_program(PROGRAMS / "interrupted.py", manner, np=3, watch=recovers, flags=flags, timeout_s=60)
    assert output.count("rank 1 interrupted") == 1
    assert output.count("fine") == (2 if recovers else 3)


# Not for the modes' sake: the line comes through Python, which a kernel that waits must not keep from running.
@pytest.mark.parametrize("manner", ["comm", long("graph"), long("pynative")])
def test_long_wait_is_logged_by_the_worker(start_module, tmp_path: Path, manner: str) -> None:
    if manner != "comm":
        pytest.importorskip("mindspore")
    told = tmp_path / "told"
    program = PROGRAMS / "late.py"
    job = start_module("ms_kungfu.launcher", "-q", "-np", 2, sys.executable, program, manner, told)
    job.wait_for(
        r"\d\d:\d\d:\d\d ms_kungfu\[rank 0\] WARNING: runtime: all_reduce \"\w+\": "
        r"rank 0 \(\S+\) has waited \d\d s for rank 1 \(\S+\), cluster version 0$",
        timeout=120,
    )
    told.touch()
    job.assert_exit(0)
    assert job.output.count("the sum is [1.]") == 2


def test_a_plan_of_resizes_is_followed_with_right_sums(run_program: Run) -> None:
    plan = [2, 4, 4, 1, 3, 2, 7, 1, 2]
    output = run_program(PROGRAMS / "resizes.py", *plan, np=1, watch=True)
    assert output.count("finished as rank") == 2
    assert "finished as rank 1 of 2, 1/2" in output
    leavers = sum(max(0, before - after) for before, after in zip([1, *plan], plan))
    assert output.count("left at step") == leavers


def test_growing_past_the_slots_of_a_host_is_refused_at_every_rank(run_program: Run) -> None:
    output = run_program(PROGRAMS / "resizes.py", 3, np=2, watch=True, flags=["-H", "127.0.0.1:2"], status=1)
    assert output.count("ResizeError: 3 workers: -H 127.0.0.1:2 has 2 slots") >= 1


def test_a_person_resizes_a_running_job(tmp_path: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/config"
    command = [launcher(), "-q", "-np", "1", "-w", "-builtin-config-port", str(port), "-config-server", url]
    job = subprocess.Popen(
        [*command, sys.executable, str(PROGRAMS / "follower.py"), "3"], stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    try:
        assert job.stdout is not None
        assert "rank 0 of 1 began" in job.stdout.readline()
        done = subprocess.run([launcher(), "resize", "3", "-config-server", url], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        output, _ = job.communicate(timeout=60)
        assert job.returncode == 0
        assert output.count("of 3 finished") == 3
    finally:
        job.kill()
        job.wait()


@pytest.mark.parametrize("np", [0, 1, 3])
def test_model_saved_by_one_rank_is_found_by_the_others(run_program: Run, np: int) -> None:
    assert run_program(PROGRAMS / "saved.py", np=np).count("fine") == max(1, np)


@pytest.mark.parametrize("manner", ["spawn", "fork"])
def test_children_answer_rank_and_size_and_take_no_part(run_program: Run, manner: str) -> None:
    assert run_program(PROGRAMS / "children.py", manner, np=2, watch=True).count("fine") == 1


def test_pool_of_a_program_without_main_guard_ends_with_one_reason(run_program: Run) -> None:
    output = run_program(PROGRAMS / "unguarded.py", np=1, status=1)
    assert output.count("a process that multiprocessing has spawned runs this program from the beginning") == 1
    assert output.count("Traceback") == 1


@pytest.mark.parametrize("manner", ["spawn", "fork"])
def test_children_that_ask_first_take_no_slot(run_program: Run, manner: str) -> None:
    assert run_program(PROGRAMS / "children.py", manner, "early", np=2).count("fine") == 2
