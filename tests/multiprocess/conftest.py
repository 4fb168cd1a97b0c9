import sys

import pytest
from launching import RECOVERY_PROGRAM, Job


@pytest.fixture
def script(tmp_path):
    """Writes a worker's program and returns the words of the command that runs it."""

    def write(text, name="worker.py"):
        (tmp_path / name).write_text(text)
        return sys.executable, str(tmp_path / name)

    return write


@pytest.fixture
def job(kungfu_run, start_module):
    """Starts a job of `RECOVERY_PROGRAM`."""

    def start(*flags, program=(), environment=None, watch=True):
        words = [*flags, *(["-w"] if watch else []), sys.executable, RECOVERY_PROGRAM, *program]
        return Job(kungfu_run(*words, environment=environment), start_module)

    return start
