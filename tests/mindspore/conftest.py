"""Launching the programs of this folder with several workers."""

from __future__ import annotations

from pathlib import Path
from typing import Callable

import pytest

from tests.conftest import Run

PROGRAMS = Path(__file__).with_name("programs")
pytest.importorskip("mindspore", reason="MindSpore is not installed")


@pytest.fixture
def run_workers(run_program: Run) -> Callable[..., str]:
    """A function that runs a program with n workers and returns their output; a worker's failure fails the test."""

    def run(program: str, n: int, *args: str, watch: bool = False, timeout_s: float = 280) -> str:
        return run_program(PROGRAMS / program, *args, np=n, watch=watch, timeout_s=timeout_s)

    return run
