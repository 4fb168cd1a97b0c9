"""Builds the C++ tests and runs them through ctest. `.ci/run` runs them under the sanitizers, too."""

from __future__ import annotations

import subprocess

import pytest

from tests.conftest import build_cpp

TIMED = r"Time\."  # suites whose tests have a limit on time


def ctest(*selection: str) -> None:
    # Two at a time: most of them wait for one another's threads and processes.
    command = ["ctest", "--test-dir", str(build_cpp()), "--output-on-failure", "--no-tests=error", "--timeout", "300"]
    command += ["--parallel", "2"]
    done = subprocess.run([*command, *selection], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join([*command, *selection])}\n{done.stdout}"
    print(done.stdout)


@pytest.mark.timeout(900)
def test_the_cpp_tests_pass() -> None:
    """In the quick suite though it costs more than 20 s: nothing else sees most mistakes of the runtime."""
    ctest("-E", TIMED)


@pytest.mark.timing
@pytest.mark.timeout(600)
def test_the_cpp_tests_of_times_pass() -> None:
    ctest("-R", TIMED)
