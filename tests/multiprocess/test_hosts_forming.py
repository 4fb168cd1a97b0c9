# ruff: noqa: F811
"""Before a job on several hosts has begun: who waits for whom, for how long, and what those who wait say."""

from __future__ import annotations

import subprocess
import sys

import pytest
from launching import RECOVERY_PROGRAM
from test_hosts import ENDS, SECRET, A, B, C, all_in_version, embedded, finish, free_port, hosts  # noqa: F401

pytestmark = pytest.mark.timeout(120)
COMMANDS = [sys.executable, "-m", "ms_kungfu.launcher"]


def told(run, *words):
    """What `kungfu-run resize` or `evict` says, and its exit status."""
    done = subprocess.run([*COMMANDS, *words], env=run.environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr, done.returncode


# ---- who wants another size before it has begun ----


def test_a_size_that_is_wanted_while_a_host_is_missing_is_the_jobs_when_it_has_begun(hosts):
    flags, url = embedded(A)
    job = hosts([sys.executable, RECOVERY_PROGRAM], *flags, "-np", 4, slots={A: 2, B: 1, C: 1},
                environments={C: {"KUNGFU_JOB_SECRET": "ff" * 16}})  # fmt: skip
    job[C].assert_exit(1)
    job[A].wait_for(f"host {B} is there")
    assert "cluster version 1: 4 -> 3 workers" in told(job[A], "resize", "3", "-config-server", url)[0]
    assert told(job[A], "evict", "0", "-config-server", url)[1] == 0
    output, code = told(job[A], "resize", "9", "-config-server", url)
    assert code == 1
    assert "slots" in output
    job.runs[C] = job.start_one(C)
    all_in_version(job, 2, {A: 1, B: 1})
    finish(job, {A: 1, B: 1})
