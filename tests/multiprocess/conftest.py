import sys

import pytest
from launching import RECOVERY_PROGRAM, Job, Program


@pytest.fixture
def start_module(tmp_path):
    """Starts ``python -m MODULE ARGUMENTS`` in the test's folder; whatever is left of it is killed after the test."""
    started = []

    def run(module, *arguments, **options):
        started.append(Program(module, arguments, tmp_path, **options))
        return started[-1]

    yield run
    for program in started:
        program.kill_all()


@pytest.fixture
def kungfu_run(start_module):
    """Starts ``kungfu-run ARGUMENTS``."""

    def run(*arguments, **options):
        return start_module("ms_kungfu.launcher", *arguments, **options)

    return run


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
