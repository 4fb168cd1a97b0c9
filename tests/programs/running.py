"""A program as it stands, on one device and under kungfu-run while the cluster changes.

A program of this folder is the elastic one. Lines that end with ``# elastic`` are what makes it so, and after
``# stock:`` is what stands there without; so the stock program is made of the same file, and the lines that differ are
counted. A program for msrun has ``# msrun`` behind what asks for more than one process, and is run elastic as it is.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ms_kungfu.dataset import audit
from tests.conftest import launcher
from tests.ports import free_port

HERE = Path(__file__).parent
LIMIT_S = 600
_READY = " worker ready: "
# What the launcher writes of a worker that has ended and shouldn't have.
_ENDED = re.compile(
    r"^\[kungfu-run\] \S+ [\w ]+: .*reason=.worker \d+ \((\S+), pid (\d+)\) "
    r".*(?:exited with code [1-9]|was killed|exited before).*$",
    re.M,
)


def stock(text: str) -> str:
    """The same program on one device."""
    kept = [line for line in text.splitlines() if not line.endswith(("  # elastic", "  # msrun"))]
    return "\n".join(re.sub(r"^(\s*)# stock: ", r"\1", line) for line in kept) + "\n"


def lines_changed(text: str) -> int:
    return sum(line.endswith("  # elastic") for line in text.splitlines())


def accuracy(folder: Path, pattern: str) -> float:
    """The last one that was printed, or written into a log file."""
    logs = sorted(folder.rglob("*log"), key=lambda path: path.stat().st_mtime_ns)
    printed = "\n".join(path.read_text(errors="replace") for path in logs)
    found = re.findall(pattern, printed)
    if not found:
        raise AssertionError(f"no accuracy was printed:\n{printed[-4000:]}")
    return float(found[-1])


@dataclass
class Command:
    """How one program is run."""

    file: Path
    arguments: list[str]
    path: list[str] = field(default_factory=list)
    """Folders that PYTHONPATH gets besides."""
    pattern: str = r"accuracy: (\S+)"

    def environment(self, *first: str) -> dict[str, str]:
        path = [*first, *self.path, *filter(None, [os.environ.get("PYTHONPATH")])]
        return {**os.environ, "PYTHONPATH": os.pathsep.join(path), "GLOG_v": "3"}

    def run(self, folder: Path, parts: int = 1) -> float:
        """On one device, without ms_kungfu; with `parts` a step is the mean of as many parts of its batch."""
        folder.mkdir(parents=True)
        environment = {**self.environment(str(HERE / "in_parts")), "PROGRAMS_PARTS": str(parts)}
        done = subprocess.run(
            [sys.executable, str(self.file), *self.arguments],
            cwd=folder, env=environment, text=True, timeout=LIMIT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        (folder / "log").write_text(done.stdout)
        assert done.returncode == 0, done.stdout[-6000:]
        return accuracy(folder, self.pattern)


@dataclass
class Outcome:
    accuracy: float
    equal: bool
    """The checksum of all that is trained, at each worker that came to the end."""
    exact: bool
    """By the audit of the ledger, where there is one."""


class Job:
    """The program under kungfu-run. `pacing` holds its workers back while the cluster changes."""

    def __init__(self, command: Command, folder: Path, msrun: bool, begins: int, size: int) -> None:
        folder.mkdir(parents=True)
        self.begins, self.size = begins, size
        self.folder, self.pattern = folder, command.pattern
        self.killed: set[int] = set()
        self.url = f"http://127.0.0.1:{free_port()}/config"
        port = self.url.split(":")[2].split("/")[0]
        flags = [
            "-w",
            "-np",
            str(begins),
            "-recover",
            "replace",
            "-builtin-config-port",
            port,
            "-config-server",
            self.url,
        ]
        flags += ["-logdir", str(folder / "workers")]
        if msrun:
            flags += ["--msrun", "-msrun-size", str(size)]
        environment = command.environment(str(HERE / "pacing"))
        environment.update(PROGRAMS_OUT=str(folder), KUNGFU_LEDGER_DIR=str(folder / "ledger"))
        self.log = folder / "log"
        (folder / "pace").write_text("0")
        self.process = subprocess.Popen(
            [launcher(), *flags, sys.executable, str(command.file), *command.arguments],
            cwd=folder, env=environment, stdout=self.log.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait()

    def workers(self) -> list[int]:
        """The processes that have trained a step, in the order of their first."""
        paths = sorted(self.folder.glob("steps.*"), key=lambda path: (path.stat().st_ctime_ns, path.name))
        return [int(path.suffix[1:]) for path in paths]

    def last_step(self) -> int:
        lines = [path.read_text().split() for path in self.folder.glob("steps.*")]
        return max((int(each[-1]) for each in lines if each), default=0)

    def resize(self, size: int) -> None:
        self.ask("resize", size)

    def ask(self, what: str, number: int) -> None:
        subprocess.run(
            [launcher(), what, str(number), "-config-server", self.url], check=True, timeout=LIMIT_S,
            stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def pace(self, step: int) -> None:
        """No further than this step."""
        (self.folder / "new").write_text(str(step))
        (self.folder / "new").rename(self.folder / "pace")

    def wait(self, until: Callable[[], bool], step_every_s: float | None = None) -> None:
        """With `step_every_s` training goes on meanwhile, a step at a time."""
        end = time.monotonic() + LIMIT_S
        stepped = time.monotonic()
        ended = False
        while not until():
            self.check()
            assert not ended, f"it ended too early:\n{self.log.read_text()[-6000:]}"
            assert time.monotonic() < end, f"nothing happens:\n{self.log.read_text()[-6000:]}"
            ended = self.process.poll() is not None
            if step_every_s is not None and time.monotonic() - stepped > step_every_s:
                self.pace(self.last_step() + 1)
                stepped = time.monotonic()
            time.sleep(0.05)

    def check(self) -> None:
        """AssertionError with the last lines of a worker that has ended by itself: the others may go on, or wait."""
        for found in _ENDED.finditer(self.log.read_text()):
            if int(found[2]) not in self.killed:
                paths = (self.folder / "workers").glob(f"{found[1].replace(':', '.')}.*")
                raise AssertionError("\n".join([found[0], *(path.read_text()[-4000:] for path in sorted(paths))]))

    def ready(self) -> int:
        """Workers that came after the first."""
        return self.log.read_text().count(_READY)

    def change(self, kills_the_first: bool, after: int) -> str:
        """1 -> size -> one is killed and replaced -> 2, from this step on. Returns what it was."""
        if self.begins == self.size:
            return self.kill_in_one_pass(after)
        size = self.size
        trained: list[int] = []  # a killer and its victim are told apart by the order of their first steps

        def at_least(count: int) -> bool:
            trained[:] = self.workers()
            return len(trained) >= count

        self.pace(after)
        self.wait(lambda: self.last_step() >= after)
        (first,) = self.workers()
        self.resize(size)
        self.wait(lambda: self.ready() == size - 1)
        self.wait(lambda: at_least(size), 0.5)
        killed = first if kills_the_first else next(pid for pid in trained if pid != first)
        self.killed.add(killed)
        os.kill(killed, signal.SIGKILL)
        self.wait(lambda: self.ready() == size)
        self.wait(lambda: at_least(size + 1), 0.5)
        history = f"1 -> {size} -> rank {'0' if kills_the_first else '1 or 2'} killed -> {size}"
        if size > 2:
            if kills_the_first:
                self.ask("evict", 0)  # the last one plays rank 0 of msrun's world, and prints what is compared
            else:
                self.resize(2)
            self.wait(lambda: "left: size=" in self.log.read_text(), 0.5)
            history += " -> 2"
        step = self.last_step()
        self.pace(10**9)
        return f"{history}, all by step {step}"

    def kill_in_one_pass(self, after: int) -> str:
        """Kill rank 0 of a loop that workers can't join. Its replacement joins when the loop has ended its pass."""
        self.pace(after)
        self.wait(lambda: self.last_step() >= after and len(self.workers()) == self.size)
        found = re.search(r"worker started: worker 0 \(\S+ pid (\d+)\)", self.log.read_text())
        assert found is not None
        self.killed.add(int(found[1]))
        os.kill(int(found[1]), signal.SIGKILL)
        self.wait(lambda: self.ready() == 1)
        self.wait(lambda: "resize deferred: " in self.log.read_text(), 0.5)
        return f"{self.begins} -> rank 0 killed at step {after} -> {self.begins - 1} to the end"

    def finish(self, partitions: bool = True) -> Outcome:
        self.pace(10**9)
        self.wait(lambda: self.process.poll() is not None)
        self.check()
        assert self.process.returncode == 0, self.log.read_text()[-6000:]
        ended = {path.name: path.read_text() for path in self.folder.glob("ended.*")}
        exact = not partitions or audit.audit(*audit.read(self.folder / "ledger")).exact
        return Outcome(
            accuracy(self.folder, self.pattern),
            equal=len(ended) == 2 and len(set(ended.values())) == 1,
            exact=exact,
        )
