"""Launching the programs of this folder with several workers."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("programs")
pytest.importorskip("mindspore", reason="MindSpore is not installed")


def watching() -> list[str]:
    """The launcher's arguments for a cluster that resizes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ["-w", "-builtin-config-port", str(port), "-config-server", f"http://127.0.0.1:{port}/config"]


@pytest.fixture
def run_workers(tmp_path):
    """A function that runs a program with n workers and returns their output; a worker's failure fails the test."""

    def run(program: str, n: int, *args: str, watch: bool = False, timeout_s: float = 280) -> str:
        launcher = shutil.which("kungfu-run", path=str(Path(sys.executable).parent)) or shutil.which("kungfu-run")
        assert launcher is not None, "kungfu-run is not installed"
        options = ["-q", "-np", str(n), *(watching() if watch else [])]
        command = [launcher, *options, sys.executable, str(PROGRAMS / program), *args]
        # MindSpore writes its analysis of a failed compilation into the current folder.
        done = subprocess.run(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)} exited {done.returncode}:\n{done.stdout[-6000:]}"
        return done.stdout

    return run
