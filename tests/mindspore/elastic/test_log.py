"""What a job tells: each resize, death and checkpoint is a line, and a size that is never reached isn't passed over."""

import re

import pytest

TIME = r"\d\d:\d\d:\d\d"


def said(reports, rank):
    """The lines of ms_kungfu by the worker that has this rank when it says them, without their time, and but for those
    of a long wait on a busy machine."""
    found = re.findall(rf"^{TIME} ms_kungfu\[rank {rank}\] (\w+: .*)$", reports.output, re.MULTILINE)
    assert found, reports.output
    return [line for line in found if "has waited" not in line]


@pytest.mark.long  # test_elastic_training.py checks these lines of its loop with failures
def test_resize_failure_and_checkpoint_are_logged_with_step_and_reason(run_elastic):
    reports = run_elastic("told.py", "3:3", "wait", "12", "8:1")
    lines = said(reports, 0)
    assert lines[0] == "INFO: step 3: 3 workers wanted, 2 starting"
    assert lines[1] == "INFO: step 3: 1 -> 3 workers, cluster version 1, as the schedule has it from step 3 on"
    assert re.fullmatch(r"WARNING: step 8: rank 1 \(127\.0\.0\.1:\d+\) has died; the others go on", lines[2])
    assert "cluster version 2, without rank 1, dead" in lines[3]
    assert re.fullmatch(r"INFO: step 12: checkpoint \S+step-00000012.ckpt is written", lines[-1])
    assert "INFO: step 3: joined as rank 2 of 3 workers" in said(reports, 2)
    assert "never reached" not in reports.output


@pytest.mark.long
def test_a_job_that_is_over_before_it_grows_says_so_and_names_the_remedy(run_elastic):
    reports = run_elastic("told.py", "2:3", "-", "4")
    lines = said(reports, 0)
    assert lines[0].startswith("INFO: step 2: 3 workers wanted, 2 starting; training goes on meanwhile")
    assert lines[-1] == (
        "WARNING: size 3 of the schedule at step 2 was never reached: the program was over before its workers were "
        "ready; wait=True has training wait for them"
    )
