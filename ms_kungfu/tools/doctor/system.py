"""The doctor's queries about the machine. The checks use only these, so a test can simulate another machine.

Nothing here raises an exception. An unknown value is None, empty, or an Outcome with an error.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import ms_kungfu
from ms_kungfu import _installation
from ms_kungfu.launcher.cpu_isa import Times, measured
from ms_kungfu.launcher.state.policy import signal_name

_MARK = "ms_kungfu.doctor: "
_STAGE = "ms_kungfu.doctor is "
# A program for `System.run`: returns the instruction set of the reductions, if the runtime can be loaded.
LOAD_RUNTIME = "import ms_kungfu._core as core; answer(core.instruction_set())"


@dataclass(frozen=True)
class Outcome:
    """The result of a program in another process. Without a result: the error, and what the program was doing."""

    value: Any = None
    error: str = ""
    during: str = ""


class System:
    """This machine and this Python."""

    def __init__(self) -> None:
        self.environ: Mapping[str, str] = os.environ
        self.python = platform.python_version()
        self.architecture = platform.machine()
        self.folders = [folder for folder in sys.path if folder]  # folders of Python's packages
        # The ms_kungfu folder with the compiled build. In an editable installation it isn't the source folder.
        build = importlib.util.find_spec("ms_kungfu._core")
        self.package = str(Path(str(ms_kungfu.__file__ if build is None else build.origin)).parent)

    def read(self, path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def search(self, pattern: str, path: str) -> str | None:
        """Return the matches of the group in `pattern` in the lines of a file; None without the file."""
        found = re.search(pattern, self.read(path) or "", re.MULTILINE)
        return found.group(1).strip() if found else None

    def cpu(self) -> str:
        return self.search(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or self.architecture

    def names(self, folder: str) -> list[str]:
        """Return the names in a folder."""
        try:
            return sorted(os.listdir(folder))
        except OSError:
            return []

    def is_file(self, path: str) -> bool:
        return os.path.isfile(path)

    def version(self, distribution: str) -> str | None:
        """Return the installed version of a Python package; None if it isn't installed."""
        try:
            return metadata.version(distribution)
        except Exception:  # treat damaged metadata as missing
            return None

    def own_metadata(self, field: str) -> list[str]:
        """Return ms_kungfu's metadata: Requires-Python, Requires-Dist, Provides-Extra."""
        try:
            return [str(value) for value in metadata.metadata("ms-kungfu").get_all(field) or []]
        except Exception:
            return []

    def damaged(self) -> list[str]:
        """Return files of ms_kungfu that are missing or truncated."""
        try:
            return _installation.damaged()
        except Exception:
            return []

    def is_of_a_wheel(self) -> bool:
        return _installation.is_of_a_wheel()

    def reinstall(self) -> str:
        """Return the remedy for a damaged installation."""
        return _installation.reinstall()

    def cores(self) -> tuple[int, int]:
        """Return the number of cores of the machine, and the number that this process may use."""
        return os.cpu_count() or 1, len(os.sched_getaffinity(0))

    def convolutions(self) -> Times:
        """Return the times of a small convolution. Raise NotMeasuredError if it can't be measured."""
        return measured()

    def limit(self, name: str) -> int | None:
        """Return the soft limit RLIMIT_`name`; None if there is no limit."""
        soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        return None if soft == resource.RLIM_INFINITY else soft

    def run(self, program: str, *arguments: str, timeout_s: float = 60.0) -> Outcome:
        """Run a Python program in a separate process.

        The program calls `answer(VALUE)` to return its result. It calls `doing(WHAT)` before each stage, so that the
        report of a crash can name the stage.

        Libraries are opened only in such a process, because a library that crashes or hangs must not end the doctor.
        """
        prologue = (
            f"import json, sys\ndef answer(value): print({_MARK!r} + json.dumps(value), flush=True)\n"
            f"def doing(what): print({_STAGE!r} + what, flush=True)\n"
        )
        try:
            done = subprocess.run(
                [sys.executable, "-c", prologue + program, *arguments],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=timeout_s,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return Outcome(error=f"no answer within {timeout_s:g} s")
        except OSError as error:
            return Outcome(error=f"another Python can't be started: {error}")
        during = ""
        for line in done.stdout.splitlines():
            if line.startswith(_STAGE):
                during = line[len(_STAGE) :]
            if line.startswith(_MARK):
                return Outcome(json.loads(line[len(_MARK) :]))
        if done.returncode < 0:
            killed = f"the process was killed by {signal_name(-done.returncode)}"
            return Outcome(error=f"{killed}, {during}" if during else killed, during=during)
        last = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return Outcome(error=last[-1] if last else f"the process exited with code {done.returncode}", during=during)
