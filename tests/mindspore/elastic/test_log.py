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
    assert lines[0] == "INFO: resize requested: 1 -> 3 workers step=3 reason=schedule wait=True"
    assert lines[1] == "INFO: resize: 1 -> 3 workers version=1 step=3 reason=schedule"
    assert re.fullmatch(r"WARNING: rank failed: rank=1 peer=127\.0\.0\.1:\d+ step=8", lines[2])
    assert "version=2 step=8 reason=failed ranks=1" in lines[3]
    assert re.fullmatch(r"INFO: checkpoint written: step=12 path=\S+step-00000012.ckpt", lines[-1])
    assert "INFO: joined: rank=2 size=3 step=3" in said(reports, 2)
    assert "resize missed" not in reports.output


@pytest.mark.long
def test_a_job_that_is_over_before_it_grows_says_so_and_names_the_remedy(run_elastic):
    reports = run_elastic("told.py", "2:3", "-", "4")
    lines = said(reports, 0)
    assert lines[0] == "INFO: resize requested: 1 -> 3 workers step=2 reason=schedule wait=False"
    assert lines[-1] == (
        'WARNING: resize missed: workers=3 step=2 reason="the program ended before the new workers were ready; '
        'with wait=True, training waits for them"'
    )
