#!/usr/bin/env python3
"""Do what a new user does, and print how long it takes: train LeNet from a wheel, with several MindSpore versions.

    release/demonstration.py                                      # the wheel of dist/; MindSpore 2.9.0, 2.10.0, 2.9.0
    release/demonstration.py --python python3.12 2.8.0 2.10.0

The environment is empty and has no compiler. pip installs the first MindSpore and the wheel, and
examples/lenet-elastic trains on 1, 2, 4 and 1 workers. Then pip replaces only MindSpore, and the example trains again.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from matrix import Environment, fitting
from wheels import ROOT, Failure, interpreter


class Clock:
    """Measure seconds since creation, in wall-clock and processor time. The latter matters on a busy machine."""

    def __init__(self) -> None:
        self._begun, self._used = time.monotonic(), used_s()

    def __str__(self) -> str:
        return f"{time.monotonic() - self._begun:.0f} s ({used_s() - self._used:.0f} s of processor)"


def used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def shown(environment: Environment, wheel: Path, versions: Sequence[str]) -> None:
    """Print a line for each step."""
    example = environment.folder / "lenet-elastic"
    left_by_others = shutil.ignore_patterns("data", "data-drawn", "logs", "out", "__pycache__")
    shutil.copytree(ROOT / "examples" / "lenet-elastic", example, ignore=left_by_others)
    for number, version in enumerate(versions):
        clock = Clock()
        environment.pip_install(f"mindspore=={version}")
        print(f"MindSpore {version}: installed in {clock}", flush=True)
        beyond = Clock()
        if number == 0:
            environment.pip_install(wheel)
            print(f"{wheel.name}: installed in {beyond}", flush=True)
        seen = trained(environment, example)
        print(f"LeNet on 1, 2, 4 and 1 workers: {seen}; {beyond} beyond MindSpore", flush=True)


def trained(environment: Environment, example: Path) -> str:
    """Return the last lines of the example and of the audit of its samples."""
    ledger = example / "logs" / "ledger"
    shutil.rmtree(ledger, ignore_errors=True)
    told = environment.run("kungfu-run", "-q", "-np", "1", "-w", "python", example / "train.py", "--ledger", ledger)
    audit = environment.run("python", "-m", "ms_kungfu.dataset.audit", ledger)
    (accuracy,) = (line for line in told.splitlines() if "test accuracy" in line)
    return f"{accuracy.partition('test ')[2]}; {audit.splitlines()[-1]}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("mindspore", nargs="*", metavar="VERSION", help="default: 2.9.0 2.10.0 2.9.0")
    parser.add_argument("--python", default=sys.executable, help="an interpreter (default: this one)")
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="the folder with the wheel (default: dist)")
    asked = parser.parse_args(words)
    try:
        python = interpreter(asked.python)
        wheel = fitting(python, asked.wheels.resolve())
        with tempfile.TemporaryDirectory() as folder:
            environment = Environment(Path(folder), python)
            shown(environment, wheel, asked.mindspore or ["2.9.0", "2.10.0", "2.9.0"])
    except Failure as failure:
        sys.exit(f"release/demonstration.py: {failure}")


if __name__ == "__main__":
    main()
