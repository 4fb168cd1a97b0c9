"""The launcher's signals, up to the end of its process."""

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from ms_kungfu.launcher import signals

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2
SCRIPT = """
import asyncio, os, signal, sys
from ms_kungfu.launcher import signals

in_slurm = sys.argv[1] == "True"
class Late:  # goes with the interpreter, after whose end handlers are gone
    def __del__(self, os=os, numbers=[signal.SIGTERM, *([signal.SIGUSR1] if in_slurm else [])]):
        for number in numbers:
            os.kill(os.getpid(), number)

async def run():
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    signals.hear(loop, lambda number: ended.done() or ended.set_result(number), print, in_slurm, signals.outlive)
    os.kill(os.getpid(), signal.SIGUSR1 if in_slurm else signal.SIGTERM)
    return await ended

code = 128 + asyncio.run(run())
for _ in range(3):
    os.kill(os.getpid(), signal.SIGTERM)
    if in_slurm:
        os.kill(os.getpid(), signal.SIGUSR1)
signals.ignore_from_now_on(in_slurm)
late = Late()
sys.exit(code)
"""


@pytest.mark.parametrize("in_slurm", [True, False])
def test_a_second_one_after_the_loop_does_not_change_the_exit_code(in_slurm):
    """Slurm tells its warning more than once, and the batch script queues the job again by this code."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(in_slurm)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (143, "")


@pytest.mark.parametrize("in_slurm", [True, False])
def test_each_one_is_heard_in_the_loop(in_slurm):
    before = {number: signal.getsignal(number) for number in signal.valid_signals() if number in range(1, 29)}
    told = []

    async def run():
        loop = asyncio.get_running_loop()

        def note(what):
            return lambda number: told.append((what, number, asyncio.get_running_loop() is loop))

        signals.hear(loop, note("ends"), note("passed on"), in_slurm, signals.outlive)
        for number in (TERM, USR1, USR2):
            count = len(told)
            os.kill(os.getpid(), number)
            while len(told) == count:
                await asyncio.sleep(0.001)

    try:
        asyncio.run(asyncio.wait_for(run(), 30))
    finally:
        for number, handler in before.items():
            if number not in (signal.SIGKILL, signal.SIGSTOP):
                signal.signal(number, handler)
    of_slurm = ("ends", TERM, True) if in_slurm else ("passed on", USR1, True)
    assert told == [("ends", TERM, True), of_slurm, ("passed on", USR2, True)]
