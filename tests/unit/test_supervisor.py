"""What can be tried of the supervisor in one process; the rest is in tests/multiprocess/test_launcher.py."""

import os
import subprocess
import sys

from ms_kungfu.launcher.agent import supervisor

PROGRAM = """
import os, subprocess, sys
from ms_kungfu.launcher.agent import supervisor
supervisor._prctl(supervisor._PR_SET_CHILD_SUBREAPER, 1)
children = [subprocess.Popen(["sleep", "1000"]) for _ in range(2)]
really_kill = os.kill
os.kill = lambda pid, number: really_kill(pid, number) if pid == children[0].pid else None  # the other one is frozen
left = supervisor.kill_descendants(0.3)
print([children.index(next(c for c in children if c.pid == pid)) for pid in left])
os.kill = really_kill
print(supervisor.kill_descendants(60))
"""


def test_process_that_cannot_be_killed_does_not_block_the_end_for_ever():
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=True, env=os.environ
    )
    assert done.stdout == "[1]\n[]\n"
    assert supervisor._PATIENCE_S >= 5


def test_worker_pinned_to_offline_cores_runs_on_allowed_ones():
    """The cpuset is rewritten between the launcher's look and the start."""
    told = []
    guard = supervisor._SupervisorProcess(None, ["true"], None)
    guard._tell = lambda event: told.append(type(event).__name__)
    null = os.open(os.devnull, os.O_WRONLY)
    guard._start(supervisor.Start(7, False, {}, [4095], null, os.dup(null)))
    assert told == ["Started"]
    (pid,) = guard._leaders
    assert os.waitpid(pid, 0)[1] == 0
