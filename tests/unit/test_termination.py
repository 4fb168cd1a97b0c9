"""A worker's handler of SIGTERM: who sent the signal decides (ops_src/base/termination.h)."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ms_kungfu.membership import joining

# The parent is the supervisor. Each word of the arguments sends a SIGTERM.
PROGRAM = """
import os, signal, subprocess, sys, time
from ms_kungfu import _core
asked, asks = os.pipe()
os.set_blocking(asked, False)
_core.catch_sigterm(asks, os.getppid())
for sender in sys.argv[1:]:
    if sender == "self":
        os.kill(os.getpid(), signal.SIGTERM)
    elif sender == "other":
        subprocess.run(["sh", "-c", f"kill -TERM {os.getpid()}"], check=True)
    elif sender == "forked child":
        child = os.fork()
        if child == 0:
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    elif sender == "pause":
        time.sleep(3.1)
    elif sender == "end":
        _core.end_by_sigterm()
try:
    print("requests", len(os.read(asked, 10)), flush=True)
except BlockingIOError:
    print("requests 0", flush=True)
if "supervisor" in sys.argv:
    sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("senders", "requests"),
    [
        (["self"], None),  # a child of MindSpore's dataset has failed
        (["other"], 1),
        (["other", "self"], 1),  # a child of the dataset got the same SIGTERM
        (["other", "pause", "self"], None),
        (["other", "other"], None),
        (["other", "self", "end"], None),
        (["forked child"], 0),
        (["other", "forked child"], 1),
    ],
)
def test_sender_of_a_sigterm_decides_what_it_means(senders, requests):
    done = subprocess.run([sys.executable, "-c", PROGRAM, *senders], capture_output=True, text=True, timeout=60)
    assert done.returncode == (-signal.SIGTERM if requests is None else 0), done.stderr
    assert done.stdout == ("" if requests is None else f"requests {requests}\n")


@pytest.mark.parametrize("before", [[], ["other"]])
def test_supervisor_ends_a_worker_with_its_first_sigterm(before):
    worker = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *before, "supervisor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdout.readline() == f"requests {len(before)}\n".encode()
    os.kill(worker.pid, signal.SIGTERM)
    assert worker.wait(60) == -signal.SIGTERM


def test_worker_knows_of_its_sigterm_before_it_may_leave():
    told, tells = os.pipe()
    os.write(tells, b"x")
    known = []
    broker = SimpleNamespace(request_leave=lambda *_, **__: known.append(member.terminated))
    member: Any = SimpleNamespace(detached=False, self_id="a:1", terminated=False, broker=lambda: broker)
    joining._ask_to_leave(member, told)
    assert known == [True]
