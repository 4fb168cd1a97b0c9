"""The parent process of a run: it starts the run's commands, adopts every orphan, and kills all processes at the end.

``python -m benchmarks.churn.shim FOLDER`` reads one JSON object per line. ``{"start": NAME, "argv": [...], "env":
{...}}`` starts a command; with ``"again": true`` the command is restarted until it exits with 0. ``{"signal": NAME,
"number": N}`` sends a signal to the process group. The end of the input ends the run. FOLDER/exits.jsonl has the exit
status of each command, and FOLDER/usage.json the processor time of all descendants.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import queue
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36
_POLL_S = 0.02


def descendants(pid: int) -> list[int]:
    """Return the living processes below `pid`."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    children.setdefault(int(fields[1]), []).append(int(entry))
    found, left = [], [pid]
    while left:
        below = children.get(left.pop(), [])
        found += below
        left += below
    return found


class Shim:
    """The commands of a run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[int, dict[str, Any]] = {}
        self._words: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def _read(self) -> None:
        for line in sys.stdin:
            self._words.put(json.loads(line))
        self._words.put(None)

    def _start(self, command: dict[str, Any]) -> None:
        with open(self._folder / f"{command['start']}.log", "ab") as log:
            process = subprocess.Popen(
                command["argv"], env={**os.environ, **command["env"]}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self._running[process.pid] = command

    def _reap(self) -> None:
        """Wait for ended processes, so that their processor time counts, and restart commands."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                command = self._running.pop(pid, None)
                if command is None:
                    continue
                code = os.waitstatus_to_exitcode(status)
                if code != 0 and command.get("again"):
                    self._start(command)
                else:
                    with open(self._folder / "exits.jsonl", "a") as file:
                        file.write(json.dumps({"name": command["start"], "code": code}) + "\n")

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        while True:
            self._reap()
            try:
                words = self._words.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if words is None:
                break
            if "start" in words:
                self._start(words)
            else:
                for pid, command in self._running.items():
                    if command["start"] == words["signal"]:
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(pid, words["number"])
        self._running.clear()
        while left := descendants(os.getpid()):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._reap()
            time.sleep(_POLL_S)
        self._reap()
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        (self._folder / "usage.json").write_text(json.dumps({"cpu_s": used.ru_utime + used.ru_stime}))


def main(folder: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    Shim(Path(folder)).run()


if __name__ == "__main__":
    main(sys.argv[1])
