"""Where a worker's lines go. Each program is a process of its own, as logging is one for a whole process."""

import re
import subprocess
import sys

import pytest

from ms_kungfu import env

SAY = """
import logging
from ms_kungfu import _logging
{before}
_logging.set_up(lambda: 2)
{after}
log = logging.getLogger("ms_kungfu.elastic.event_log")
log.info("a line")
log.info("a line")
log.warning("a warning")
"""
TIME = r"\d\d:\d\d:\d\d"


def said(before="", after="", **environment):
    done = subprocess.run(
        [sys.executable, "-c", SAY.format(before=before, after=after)],
        env=environment, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_program_without_logging_setup_gets_lines_with_time_and_rank():
    lines = said()
    assert len(lines) == 3
    assert re.fullmatch(rf"{TIME} ms_kungfu\[rank 2\] INFO: a line", lines[0])
    assert re.fullmatch(rf"{TIME} ms_kungfu\[rank 2\] WARNING: a warning", lines[2])


def test_worker_that_has_left_logs_with_its_last_rank():
    lines = said(after="from ms_kungfu import membership; membership.current().detached = True")
    assert re.fullmatch(rf"{TIME} ms_kungfu\[was rank 2\] INFO: a line", lines[0])


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_program_that_configures_logging_has_them_in_its_own_way(when):
    lines = said(**{when: "logging.basicConfig(level=logging.INFO, format='mine %(message)s')"})
    assert lines == ["mine a line", "mine a line", "mine a warning"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_handler_of_the_programs_for_ms_kungfu_alone_counts_as_well(when):
    lines = said(
        **{when: "own = logging.getLogger('ms_kungfu'); own.addHandler(logging.StreamHandler()); own.setLevel('ERROR')"}
    )
    assert lines == []


def test_the_level_is_the_users():
    assert len(said(KUNGFU_LOG_LEVEL="WARNING")) == 1
    assert said(KUNGFU_LOG_LEVEL="error") == []
    lines = said(before="logging.basicConfig(format='mine %(message)s')", KUNGFU_LOG_LEVEL="INFO")
    assert lines == ["mine a line", "mine a line", "mine a warning"]


def test_a_level_that_is_none_is_refused_by_its_name():
    with pytest.raises(ValueError, match=r"KUNGFU_LOG_LEVEL must be DEBUG, INFO.*got 'loud'"):
        env.LOG_LEVEL.get({"KUNGFU_LOG_LEVEL": "loud"})
