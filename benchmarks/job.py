"""Watch a job under kungfu-run by reading files that its workers write."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Callable, TypeVar

from benchmarks.group import GroupError
from benchmarks.pauses_worker import read_steps
from ms_kungfu import env
from ms_kungfu._processes import end_launcher
from ms_kungfu.cluster_store import open_store
from ms_kungfu.launcher.commands import write_size

_LIMIT_S = 60.0  # for each wait
T = TypeVar("T")


class Job:
    """A running job whose workers write files with a `Recorder`.

    See benchmarks.pauses_worker. The methods read what the workers have written so far.
    """

    def __init__(self, bench: str, folder: Path, process: subprocess.Popen[bytes], timeout: float) -> None:
        """Watch a job that has been started.

        `process`: the launcher, which writes its log and all output to `folder`. `timeout`: the time limit of the whole
        job in seconds.
        """
        self.folder, self.process = folder, process
        self._bench = bench
        self._deadline = time.monotonic() + timeout
        self._clock_began = time.time() - time.monotonic()

    def lines(self) -> list[dict[str, Any]]:
        return self._json_lines("events.jsonl")

    def _json_lines(self, name: str) -> list[Any]:
        with contextlib.suppress(OSError):
            return parsed((self.folder / name).read_bytes())
        return []

    def _await(self, look: Callable[[], T | None], what: str) -> T:
        """Call `look` until it returns a result, and return this result.

        Raise GroupError with the text `what` if the job ends first, or if a time limit passes.
        """
        limit = min(self._deadline, time.monotonic() + _LIMIT_S)
        while time.monotonic() < limit and self.process.poll() is None:
            found = look()
            if found is not None:
                return found
            time.sleep(0.005)
        raise self.error(what)

    def whole(self, size: int, after: int = -1) -> tuple[int, list[int]]:
        """Return the newest cluster version after `after` with all of its `size` members, and their pids by rank."""

        def look() -> tuple[int, list[int]] | None:
            versions: dict[int, dict[int, int]] = {}
            for line in self.lines():
                if line["event"] == "member" and line["size"] == size and line["version"] > after:
                    versions.setdefault(line["version"], {})[line["rank"]] = line["pid"]
            newest = max(versions, default=after)
            by_rank = versions.get(newest, {})
            return (newest, [by_rank[rank] for rank in range(size)]) if len(by_rank) == size else None

        return self._await(look, f"no whole cluster of {size} workers")

    def await_steps(self, pids: Sequence[int], count: int) -> None:
        """Wait until each of these processes has done `count` steps.

        The first steps take longer, because they compile and touch new memory.
        """

        def look() -> bool | None:
            done = dict(read_steps(self.folder))
            return all(len(done.get(pid, ())) >= count for pid in pids) or None

        self._await(look, f"a worker has not done {count} steps")

    def heard(self) -> list[float]:
        """Return the log time of each failure. The launcher logs a failure as soon as the survivors can notice it."""
        log = (self.folder / "log").read_text()
        times = re.findall(r"^(.{23}) WARNING recovery: .* was killed by SIGKILL", log, re.MULTILINE)
        return [datetime.strptime(each, "%Y-%m-%d %H:%M:%S,%f").timestamp() - self._clock_began for each in times]

    def resized(self, size: int, version: int) -> tuple[int, list[int]]:
        """Write `size` to the cluster store, and wait for the resized cluster.

        The wait ends when a version after `version` has all of its `size` members.
        """
        # The environment that the launcher has given its workers.
        environ = Path(f"/proc/{self.lines()[-1]['pid']}/environ").read_text().split("\0")
        told = dict(entry.partition("=")[::2] for entry in environ)
        write_size(open_store(told[env.CONFIG_SERVER.name], told[env.JOB_SECRET.name]), size)
        return self.whole(size, version)

    def take_turn(self, number: int) -> None:
        """Let the workers do turn `number`, and wait for its end."""
        own = self.folder / "turn.new"
        own.write_text(str(number))
        own.rename(self.folder / "turn")
        self._await(lambda: len(self.turns()) > number or None, f"turn {number} has not ended")

    def turns(self) -> list[Any]:
        """Return the workers' records of each turn."""
        return self._json_lines("times.jsonl")

    def finish(self) -> None:
        (self.folder / "stop").touch()
        try:
            code = self.process.wait(max(1.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise self.error("it did not finish") from None
        if code != 0:
            raise self.error(f"kungfu-run exited with {code}")

    def error(self, text: str) -> GroupError:
        said = (self.folder / "output").read_text(errors="replace")[-3000:]
        return GroupError(f"{self._bench}: {text}:\n{said}")


def parsed(text: bytes) -> list[Any]:
    """Parse lines of JSON. Skip incomplete lines of killed workers."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return found


@contextlib.contextmanager
def running_job(bench: str, size: int, worker: Sequence[str], flags: Sequence[str], timeout: float) -> Iterator[Job]:
    """Run a job of `size` workers until the `with` block ends. `worker`: their module and its arguments.

    ``{folder}`` in the arguments is replaced by the folder into which the workers write their files. `timeout`: the
    time limit of the whole job in seconds.
    """
    with tempfile.TemporaryDirectory(prefix="kungfu-bench-") as name:
        folder = Path(name)
        own = ["-q", "-logfile", str(folder / "log"), "-timeout", f"{timeout:.0f}s", "-w", "-np", str(size)]
        words = [word.replace("{folder}", name) for word in worker]
        with open(folder / "output", "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "ms_kungfu.launcher", *own, *flags, sys.executable, "-m", *words],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, "XDG_RUNTIME_DIR": name},
            )  # fmt: skip
        try:
            yield Job(bench, folder, process, timeout)
        finally:
            end_launcher(process)
