"""A training of numbers under kungfu-run to which faults happen: what can be seen of it, and what has to hold of it."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import job
from benchmarks.group import GroupError
from benchmarks.pauses_worker import ROW
from ms_kungfu._processes import children, stat_of
from ms_kungfu.dataset import audit, sharding
from tests.conftest import build_cpp
from tests.fault.programs.training import AFTER
from tests.hosts.jobs import LAUNCHER, Hosts, Jobs
from tests.multiprocess.launching import ROOT, Program

PROGRAMS = ROOT / "tests" / "fault" / "programs"
FINISH_S = 90.0
_WOKEN_S = 2.0  # again and again for so long: a stop by a timer may come later than it should


class BrokenError(AssertionError):
    """A promise that was not kept."""


def build_runtime() -> Path:
    """The runtime with the places of its collectives marked, built beside the C++ tests, of which it is a part."""
    return build_cpp("kungfu_runtime") / "ops_src" / "libkungfu_runtime.so"


class Job(job.Job):
    """Of a program of tests/fault/programs, with a launcher on each host, the head's first."""

    def __init__(
        self, network: Hosts, folder: Path, size: int, *flags: object, program: Path, words: Iterable[object] = (),
        launcher: str = LAUNCHER, environment: dict[str, str] | None = None, slots: int = 2, url: str = "",
        timeout: float = 600.0,
    ) -> None:  # fmt: skip
        self.jobs, self.network, self.launcher = Jobs(folder), network, launcher
        self.environment = {"PYTHONPATH": str(ROOT), **(environment or {})}
        self.over = self.jobs.over(
            network, size, *flags, slots=slots, url=url, worker=program, program=(folder, *words),
            launcher=launcher, environment=self.environment,
        )  # fmt: skip
        super().__init__("job", folder, self.launchers[0].process, timeout)
        (folder / "log").symlink_to(folder / network.hosts[0].name / "log")
        self.lost: dict[int, float] = {}
        """Workers to which something was done that ends them, and when."""
        self._events: list[dict[str, Any]] = []
        self._read = 0

    @property
    def launchers(self) -> list[Program]:
        return self.over.launchers

    def error(self, text: str) -> GroupError:
        return GroupError(text)

    # ---- what there is ----

    def lines(self) -> list[dict[str, Any]]:
        """Of all events; only what is new is read."""
        path = self.folder / "events.jsonl"
        if path.exists():
            with path.open("rb") as file:
                file.seek(self._read)
                news = file.read()
            whole = news[: news.rfind(b"\n") + 1]
            self._read += len(whole)
            self._events += job.parsed(whole)
        return self._events

    def told(self, event: str) -> dict[int, dict[str, Any]]:
        """By process, its first event of this kind."""
        return told(self.lines(), event)

    def steps(self, pid: int) -> int:
        """How many steps it has done; -1: none yet."""
        try:
            with (self.folder / f"{pid}.steps").open("rb") as file:
                rows = file.seek(0, os.SEEK_END) // ROW.size
                file.seek(max(0, rows - 1) * ROW.size)
                return int(ROW.unpack(file.read(ROW.size))[0]) if rows else -1
        except FileNotFoundError:
            return -1

    def versions(self) -> dict[int, int]:
        """By process, the version that it is in, or was in at last."""
        return {line["pid"]: line["version"] for line in self.lines() if line["event"] == "member"}

    def processes(self, number: int) -> set[int]:
        """Workers and standbys of a host, those that have only been forked too."""
        return workers_of(self.launchers[number]) - self.lost.keys()

    def holders(self) -> list[int]:
        """The workers that have the state, and are in the cluster as far as can be seen."""
        running = set().union(*(workers_of(launcher) for launcher in self.launchers))
        gone = {*self.lost, *self.told("left"), *self.told("failed"), *self.told("end")}
        return sorted((self.told("member").keys() - gone) & running)

    def fired(self, names: Iterable[str]) -> dict[str, int]:
        """Of these files, which a worker leaves before something happens to it, those that are there, with its ID."""
        paths = {name: self.folder / name for name in names}
        return {name: int(path.read_text()) for name, path in paths.items() if path.exists()}

    def await_more_steps(self, pids: Collection[int], more: int, timeout: float) -> None:
        """Until each has done so many more."""
        wanted = {pid: self.steps(pid) + more for pid in pids}
        deadline = time.monotonic() + timeout
        while late := [pid for pid in pids if self.steps(pid) < wanted[pid]]:
            assert time.monotonic() < deadline, f"workers {late} stand still for {timeout:g} s"
            time.sleep(0.02)

    # ---- what is done to it ----

    def kill(self, pids: Iterable[int]) -> float:
        """Workers, by SIGKILL; when it was done."""
        for pid in pids:
            self.lost[pid] = kill(pid)
        return time.monotonic()

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

    def join(self, number: int, *flags: object) -> None:
        """One host more, with two workers, or one that comes back."""
        host = self.network.hosts[number]
        words = ["-join", self.over.url, "-self", f"{host.address}:2", *flags]
        joined = self.jobs.start(host, self.launcher, *words, environment=self.environment)
        self.launchers[number : number + 1] = [joined]

    def resize(self, size: int, by: int = 0, within_s: float = 60.0) -> None:
        """Typed on host `by` until the hosts that have come are known."""
        deadline = time.monotonic() + within_s
        while (command := self.over.command(by, "resize", size)).wait() != 0:
            assert " workers: the job's hosts have " in command.output, command.output
            assert time.monotonic() < deadline, f"no host has come within {within_s:g} s: {command.output}"

    def stop(self) -> None:
        (self.folder / "stop").touch()

    # ---- what came of it ----

    def await_end(self, limit_s: float, stops: Mapping[str, float], look: Callable[[], None] = lambda: None) -> None:
        """Until the job has ended; calls `look` meanwhile. `stops`: by file, so many seconds after that was left the
        worker goes on that is stopped then."""
        deadline = time.monotonic() + limit_s
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running after {limit_s:g} s"
            for name, pid in self.fired(stops).items():
                late = time.time() - (self.folder / name).stat().st_mtime - stops[name]
                if 0 <= late < _WOKEN_S:
                    kill(pid, signal.SIGCONT)
            look()
            time.sleep(0.02)

    def finish(self, among: Iterable[int] | None = None, codes: Collection[int] = (0,)) -> None:
        """Asks the job to end. BrokenError where what has to hold of it then doesn't. `among`: hosts that are left."""
        self.stop()
        for number in range(len(self.launchers)) if among is None else among:
            launcher = self.launchers[number]
            if (code := launcher.wait(FINISH_S)) not in codes:
                raise BrokenError(f"lost: exit status {code} {errors(self.told('failed'))}")
            launcher.assert_gone(time.monotonic())
        check(self.folder, self.lines(), self.lost)

    def keep(self) -> Path:
        """All that it has left, with its output, in a folder of its own."""
        (self.folder / "output").write_text(self.over.output)
        kept = Path(tempfile.mkdtemp(prefix="kungfu-faults-"))
        shutil.copytree(self.folder, kept, symlinks=True, ignore=lambda at, _: ["run"], dirs_exist_ok=True)
        return kept

    def end(self) -> None:
        self.jobs.kill_all()


def told(lines: Iterable[dict[str, Any]], event: str) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for line in lines:
        if line["event"] == event:
            found.setdefault(line["pid"], line)
    return found


def check(folder: Path, lines: Sequence[dict[str, Any]], lost: Collection[int]) -> audit.Report:
    """BrokenError where what has to hold of every job at its end doesn't.

    Args:
        lines: all events.
        lost: workers to which something was done that ends them.
    """
    ends, left, failed, members = (told(lines, event) for event in ("end", "left", "failed", "member"))
    if not ends:
        raise BrokenError("lost: no worker has come to the end")
    if missing := members.keys() - ends.keys() - left.keys() - failed.keys() - set(lost):
        raise BrokenError(f"workers {sorted(missing)} are gone, and nothing was done to them")
    if wrong := told(lines, "wrong"):
        raise BrokenError(f"wrong weights: {json.dumps(next(iter(wrong.values())))}")
    if failed.keys() - set(lost):
        raise BrokenError(f"failed: {errors(failed)}")
    if len({(line["step"], line["digest"]) for line in ends.values()}) > 1:
        raise BrokenError(f"wrong weights: they differ at the end: {ends}")
    for step, who in weights_after(folder).items():
        if len(who) > 1:
            raise BrokenError(f"wrong weights: they differ after step {step}: {list(who.values())}")
    found = audit.audit(*audit.read(folder / "ledger"))
    if not found.exact:
        raise BrokenError(audit.to_text(found))
    line = next(iter(ends.values()))
    if "head" in line:
        steps, weight, tolerance = weight_of(folder / "ledger")
        if line["step"] != steps or abs(line["head"] - weight) > tolerance:
            by_the_ledger = f"by the ledger's {steps} it is {weight}"
            raise BrokenError(f"wrong weights: after {line['step']} steps a weight is {line['head']}, {by_the_ledger}")
    if "epochs" in line and set(line["weights"]) != {line["epochs"]}:
        raise BrokenError(f"wrong weights: {line}")
    return found


def weights_after(folder: Path) -> dict[int, dict[int, list[int]]]:
    """By step and weights, the workers that went on from them; lost workers, too."""
    after: dict[int, dict[int, list[int]]] = {}
    for path in folder.glob("weights.*"):
        content = path.read_bytes()
        for step, check in AFTER.iter_unpack(content[: len(content) // AFTER.size * AFTER.size]):
            after.setdefault(step, {}).setdefault(check, []).append(int(path.suffix[1:]))
    return after


def weight_of(ledger: Path) -> tuple[int, float, float]:
    """How many steps were committed, what the first weight has to be after what they have trained, and how far it may
    be off: it is a float32 that each step rounds once (2**-24 of it), after a weighted mean of numbers of at most 1
    (two roundings for each of up to 16 ranks)."""
    steps: dict[tuple[int, int], float] = {}
    for path in ledger.iterdir():
        for text in path.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                continue  # torn by a kill
            line = json.loads(text)
            if "step" in line:
                batch = tuple((first, last) for first, last in line["batch"])
                step = sharding.Step(line["step"], batch, tuple(line["members"]))
                trained, _ = step.outcome(line["participants"])
                steps[line["epoch"], line["step"]] = float(np.sin(sharding.positions(trained)).mean())
    sums = np.cumsum([0.0, *(steps[key] for key in sorted(steps))])
    return len(steps), float(sums[-1]), len(steps) * (float(np.abs(sums).max()) + 32) * 2.0**-24


def workers_of(launcher: Program) -> set[int]:
    return {worker for guard in children(launcher.process.pid) for worker in children(guard)}


def runs(pid: int) -> bool:
    try:
        return stat_of(pid)[0] not in "ZXT"
    except (FileNotFoundError, ProcessLookupError):
        return False


def kill(pid: int, number: int = signal.SIGKILL) -> float:
    """When it was done; nothing where the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
    return time.monotonic()


def errors(failed: dict[int, dict[str, Any]]) -> str:
    return "; ".join(sorted({line["error"].strip().splitlines()[-1] for line in failed.values()}))
