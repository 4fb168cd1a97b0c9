"""Answer the doctor's queries about the machine. Checks use only these queries, so tests can simulate other machines.

The methods raise no exception, except `convolutions`. If a value is unknown, they return None, an empty value, or an
Outcome with an error.
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
# This program for `System.run` loads the runtime, and returns the instruction set that the reductions use.
LOAD_RUNTIME = "import ms_kungfu._core as core; answer(core.instruction_set())"


@dataclass(frozen=True)
class Outcome:
    """The result of a program that has run in another process.

    If there is no result, `error` is the reason, and `during` is the stage that the program had reached.
    """

    value: Any = None
    error: str = ""
    during: str = ""


class System:
    """The machine and the Python interpreter that this process uses."""

    def __init__(self) -> None:
        self.environ: Mapping[str, str] = os.environ
        self.python = platform.python_version()
        self.architecture = platform.machine()
        self.folders = [folder for folder in sys.path if folder]  # the folders of Python packages
        # The ms_kungfu folder that contains the compiled files. In an editable installation, this isn't the source
        # folder.
        build = importlib.util.find_spec("ms_kungfu._core")
        self.package = str(Path(str(ms_kungfu.__file__ if build is None else build.origin)).parent)

    def read(self, path: str) -> str | None:
        try:
            return Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def search(self, pattern: str, path: str) -> str | None:
        """Return the text of the group in `pattern` in a file's first matching line; None if no line matches."""
        found = re.search(pattern, self.read(path) or "", re.MULTILINE)
        return found.group(1).strip() if found else None

    def cpu(self) -> str:
        return self.search(r"^model name\s*:\s*(.+)$", "/proc/cpuinfo") or self.architecture

    def names(self, folder: str) -> list[str]:
        """Return the names of the files and folders in a folder; an empty list if the folder can't be read."""
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
        except Exception:  # damaged metadata counts as missing
            return None

    def own_metadata(self, field: str) -> list[str]:
        """Return the values of a field of ms_kungfu's metadata: Requires-Python, Requires-Dist or Provides-Extra."""
        try:
            return [str(value) for value in metadata.metadata("ms-kungfu").get_all(field) or []]
        except Exception:
            return []

    def damaged(self) -> list[str]:
        """Return the files of ms_kungfu that are missing or truncated."""
        try:
            return _installation.damaged()
        except Exception:
            return []

    def is_of_a_wheel(self) -> bool:
        return _installation.is_of_a_wheel()

    def reinstall(self) -> str:
        """Return the command that repairs a damaged installation."""
        return _installation.reinstall()

    def cores(self) -> tuple[int, int]:
        """Return the machine's number of cores, and the number of cores that this process may use."""
        return os.cpu_count() or 1, len(os.sched_getaffinity(0))

    def convolutions(self) -> Times:
        """Return the duration of a small convolution.

        Raises:
            NotMeasuredError: the convolution can't be measured.
        """
        return measured()

    def limit(self, name: str) -> int | None:
        """Return a soft resource limit; None if there is no limit. `name`: for example NOFILE for RLIMIT_NOFILE."""
        soft, _ = resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))
        return None if soft == resource.RLIM_INFINITY else soft

    def run(self, program: str, *arguments: str, timeout_s: float = 60.0) -> Outcome:
        """Run a Python program in a separate process.

        The program calls `answer(VALUE)` to return its result. It may call `doing(WHAT)` before each stage. If the
        program crashes, the error names the stage.

        The doctor opens libraries only in separate processes, so that a library that crashes or hangs doesn't end the
        doctor.
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
