"""Builds the C++ tests and runs them through ctest. `.ci/run` runs them under the sanitizers, too."""

from __future__ import annotations

import subprocess

import pytest

from tests.conftest import build_cpp

TIMED = r"Time\."  # suites whose tests have a limit on time


def ctest(*selection: str) -> None:
    command = ["ctest", "--test-dir", str(build_cpp()), "--output-on-failure", "--no-tests=error", "--timeout", "300"]
    done = subprocess.run([*command, *selection], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join([*command, *selection])}\n{done.stdout}"
    print(done.stdout)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_cpp_tests_pass() -> None:
    ctest("-E", TIMED)


@pytest.mark.timing
@pytest.mark.timeout(600)
def test_the_cpp_tests_of_times_pass() -> None:
    ctest("-R", TIMED)
