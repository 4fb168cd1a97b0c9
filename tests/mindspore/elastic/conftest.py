"""Launching the programs of this folder on a cluster that starts with one worker and resizes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Callable

import pytest

from ms_kungfu import membership
from ms_kungfu.dataset import audit
from tests.conftest import Run

PROGRAMS = Path(__file__).with_name("programs")
pytest.importorskip("mindspore", reason="MindSpore is not installed")


class Reports:
    """What the workers of a run wrote: JSON lines, in the order of each worker; and the ledgers of their data."""

    def __init__(self, folder: Path, output: str) -> None:
        self.folder, self.output = folder, output
        self.ledger = folder / "ledger"
        self.workers = [
            [json.loads(line) for line in path.read_text().splitlines()] for path in sorted(folder.glob("*.jsonl"))
        ]

    def audit(self) -> audit.Report:
        """What the ledger proves."""
        return audit.audit(*audit.read(self.ledger))

    def of(self, kind: str, **having: object) -> list[dict]:
        """All workers' reports of one kind, and with these values."""
        having = {"kind": kind, **having}
        return [row for rows in self.workers for row in rows if having.items() <= row.items()]

    def by_step(self, kind: str, **having: object) -> dict[int, list[dict]]:
        """The same by step, sorted by rank."""
        steps: dict[int, list[dict]] = {}
        for row in self.of(kind, **having):
            steps.setdefault(row["step"], []).append(row)
        return {step: sorted(rows, key=lambda row: row["rank"]) for step, rows in sorted(steps.items())}


def check_each(**checks: Callable[[], None]) -> None:
    """Run all checks of a job that has played many cases, and name those that fail: one doesn't hide another."""
    failed = {}
    for name, check in checks.items():
        try:
            check()
        except AssertionError as error:
            failed[name] = error
    assert not failed, "\n".join(f"{name}: {error}" for name, error in failed.items())


@pytest.fixture
def run_elastic(run_program: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Reports]:
    """``run(program, *args, np=1)`` under kungfu-run -w, or with np=0 without it; returns what the workers reported."""
    runs = 0

    def run(
        program: str, *args: str, np: int = 1, timeout_s: float = 240, status: int = 0, ledger: bool = True
    ) -> Reports:
        nonlocal runs
        runs += 1
        folder = tmp_path / f"reports{runs}"
        folder.mkdir()
        if ledger:
            monkeypatch.setenv("KUNGFU_LEDGER_DIR", str(folder / "ledger"))
        output = run_program(PROGRAMS / program, folder, *args, np=np, watch=np > 0, timeout_s=timeout_s, status=status)
        return Reports(folder, output)

    return run


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> object:
    """A cluster that is played in this process, as datasets see it."""
    from tests.mindspore.elastic import fake_cluster  # loads MindSpore

    return fake_cluster.play(monkeypatch)


@pytest.fixture
def two_cores():
    """Start the test's processes on two cores, so that shards are chosen on any machine."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(before)[:2])
    yield
    os.sched_setaffinity(0, before)


@pytest.fixture(autouse=True)
def cores_of_the_tests(monkeypatch):
    """Training with shards in the tests' own process doesn't pin that, and all tests behind it, to one core."""
    monkeypatch.setattr(membership, "fix_cores", lambda: None)
