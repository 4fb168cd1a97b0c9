"""A training over several hosts to which something is done, and what has to hold of it then."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

import pytest

from benchmarks import job
from benchmarks.group import GroupError
from ms_kungfu.dataset import audit
from tests.fault.faulty_jobs import ROOT, build_runtime, weight_of
from tests.hosts.jobs import LAUNCHER, Jobs
from tests.hosts.namespaces import Network
from tests.hosts.programs.struck import AFTER

PROGRAM = Path(__file__).with_name("programs") / "struck.py"
LENET = 61706
IN_SLICES = 700_000
"""Weights of which the gradients are reduced in slices."""


class StruckJob(job.Job):
    """Of `programs.struck`, two workers a host. `agents`: links die where they are told to, too."""

    def __init__(
        self, network: Network, folder: Path, *flags: object, weights: int = LENET,
        step_s: float = 0.005, agents: bool = False, timeout: float = 600.0, manner: str = "together",
    ) -> None:  # fmt: skip
        self.jobs, self.network = Jobs(network, folder), network
        runtime = build_runtime()
        self.launcher = "tests.hosts.programs.agent" if agents else LAUNCHER
        self.environment = {"PYTHONPATH": str(ROOT), "STRUCK_FOLDER": str(folder), "STRUCK_RUNTIME": str(runtime)}
        self.over = self.jobs.over(
            network, 2 * len(network.hosts), "-logfile", "log", *flags,
            worker=PROGRAM, program=(folder, step_s, weights, runtime, manner),
            launcher=self.launcher, environment=self.environment,
        )  # fmt: skip
        super().__init__("hosts", folder, self.over.launchers[0].process, timeout)
        (folder / "log").symlink_to(folder / network.hosts[0].name / "log")

    def error(self, text: str) -> GroupError:
        return GroupError(text)

    def keep(self) -> Path:
        """All that it has left, with its output, in a folder of its own."""
        (self.folder / "output").write_text(self.over.output)
        kept = Path(tempfile.mkdtemp(prefix="kungfu-struck-"))
        shutil.copytree(self.folder, kept, symlinks=True, ignore=lambda at, _: ["run"], dirs_exist_ok=True)
        return kept

    def order(self, pid: int, place: str, kind: str = "strike") -> None:
        """Has a process die there, or "stop"."""
        unseen = self.folder / f"order.{pid}"
        unseen.write_text(place)
        unseen.rename(self.folder / f"{kind}.{pid}")

    def struck_at(self, pid: int, timeout: float) -> float | None:
        """When it has died, or stopped, by an order; None: it hasn't yet."""
        path, deadline = self.folder / f"struck.{pid}", time.monotonic() + timeout
        while time.monotonic() < deadline:
            if path.exists() and not runs(pid):
                return float(path.read_text())
            time.sleep(0.002)
        return None

    def changes(self) -> dict[int, list[float]]:
        """By process, when it had adopted each of its cluster versions."""
        found: dict[int, list[float]] = {}
        for line in self.lines():
            if "digest" not in line and "head" not in line:
                found.setdefault(line["pid"], []).append(line["time"])
        return found

    def judge(self, lost: Collection[int]) -> None:
        """AssertionError where something is wrong at the end, which all workers come to but for those that are lost."""
        (self.folder / "stop").touch()
        self.over.end(0)
        lines = self.lines()
        digests = {line["pid"]: line["digest"] for line in lines if "digest" in line}
        assert len({*digests.values()}) == 1, f"the weights differ at the end: {digests or 'nobody told them'}"
        missing = {line["pid"] for line in lines} - {*digests} - {*lost}
        assert not missing, f"workers {sorted(missing)} are gone, and nothing was done to them"
        assert "Traceback" not in self.over.output, "a worker failed"
        after: dict[int, dict[int, list[int]]] = {}
        for path in self.folder.glob("weights.*"):
            content = path.read_bytes()
            for step, check in AFTER.iter_unpack(content[: len(content) // AFTER.size * AFTER.size]):
                after.setdefault(step, {}).setdefault(check, []).append(int(path.suffix[1:]))
        for step, who in after.items():
            assert len(who) == 1, f"the weights after step {step} differ: {list(who.values())}"
        found = audit.audit(*audit.read(self.folder / "ledger"))
        assert found.exact, audit.to_text(found)
        steps, weight, tolerance = weight_of(self.folder / "ledger")
        for line in lines:
            if "head" in line:
                told = f"after {line['step']} steps a weight is {line['head']}, by the ledger's {steps} it is {weight}"
                assert (line["step"], line["head"]) == (steps, pytest.approx(weight, abs=tolerance)), told


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZXT"
    except (FileNotFoundError, ProcessLookupError):
        return False


def require_hosts(reason: str | None) -> None:
    if reason is not None:
        raise SystemExit(f"hosts can't be played here: {reason}")


def kill(pid: int, number: int) -> float:
    """When it was done."""
    os.kill(pid, number)
    return time.monotonic()
