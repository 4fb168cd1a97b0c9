"""Launching the programs of this folder on a cluster that starts with one worker and resizes."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).with_name("programs")
pytest.importorskip("mindspore", reason="MindSpore is not installed")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Reports:
    """What the workers of a run wrote: JSON lines, in the order of each worker."""

    def __init__(self, folder: Path, output: str) -> None:
        self.output = output
        self.workers = [
            [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("*.jsonl"))
        ]

    def of(self, kind: str) -> list[dict]:
        """All workers' reports of one kind."""
        return [row for rows in self.workers for row in rows if row["kind"] == kind]

    def by_step(self, kind: str) -> dict[int, list[dict]]:
        """The same by step, sorted by rank."""
        steps: dict[int, list[dict]] = {}
        for row in self.of(kind):
            steps.setdefault(row["step"], []).append(row)
        return {step: sorted(rows, key=lambda row: row["rank"]) for step, rows in sorted(steps.items())}


@pytest.fixture
def run_elastic(tmp_path):
    """``run(program, *args, np=1)`` under kungfu-run -w, or with np=0 without it; returns what the workers reported."""
    runs = 0

    def run(program: str, *args: str, np: int = 1, timeout_s: float = 240, status: int = 0) -> Reports:
        nonlocal runs
        runs += 1
        folder = tmp_path / f"reports{runs}"
        folder.mkdir()
        command = [sys.executable, str(PROGRAMS / program), str(folder), *args]
        if np:
            launcher = shutil.which("kungfu-run", path=str(Path(sys.executable).parent)) or shutil.which("kungfu-run")
            assert launcher is not None, "kungfu-run is not installed"
            port = free_port()
            watch = ["-w", "-builtin-config-port", str(port), "-config-server", f"http://127.0.0.1:{port}/config"]
            command = [launcher, "-q", "-np", str(np), *watch, *command]
        # MindSpore writes its analysis of a failed compilation into the current folder.
        done = subprocess.run(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout_s
        )
        assert done.returncode == status, f"{' '.join(command)} exited {done.returncode}:\n{done.stdout[-6000:]}"
        return Reports(folder, done.stdout)

    return run
