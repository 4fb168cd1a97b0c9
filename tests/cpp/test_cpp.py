"""Builds the C++ tests and runs them through ctest. `.ci/run` runs them under the sanitizers, too."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import one_at_a_time

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build" / "cpp-tests"
TIMED = r"Time\."  # suites whose tests have a limit on time


def run(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def ctest(*selection: str) -> None:
    with one_at_a_time("cpp-tests"):
        run("cmake", "-G", "Ninja", "-S", ROOT, "-B", BUILD, "-DKUNGFU_BUILD_TESTS=ON", "-DKUNGFU_BUILD_PYTHON=OFF")
        run("cmake", "--build", BUILD, "--parallel", os.cpu_count() or 1)
    output = run("ctest", "--test-dir", BUILD, "--output-on-failure", "--no-tests=error", "--timeout", 300, *selection)
    print(output)


@pytest.mark.timeout(600)
def test_the_cpp_tests_pass() -> None:
    ctest("-E", TIMED)


@pytest.mark.timing
@pytest.mark.timeout(600)
def test_the_cpp_tests_of_times_pass() -> None:
    ctest("-R", TIMED)
