"""The other systems' packages, in a separate virtual environment, and the versions that were measured."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.churn.systems.base import System

FOLDER = Path("build/churn-peers")
_PIP_S, _BUILD_S = 1800, 3600
# Each package is installed separately, and a failure doesn't stop the others.
PEERS: dict[str, tuple[list[str], dict[str, str]]] = {
    "torch": (["torch==2.13.0", "numpy"], {}),
    "torchft": (["torchft==0.2.0"], {}),
    "Ray Train": (["ray[train]==2.60.0"], {}),
    # Built from its sources, as its "Installation guide" describes for PyTorch and Gloo alone.
    "Elastic Horovod": (
        ["--no-build-isolation", "horovod==0.28.1"],
        {
            "HOROVOD_WITH_PYTORCH": "1", "HOROVOD_WITH_GLOO": "1", "HOROVOD_WITHOUT_MPI": "1",
            "HOROVOD_WITHOUT_TENSORFLOW": "1", "HOROVOD_WITHOUT_MXNET": "1",
        },
    ),
}  # fmt: skip


def python(folder: Path = FOLDER) -> str:
    return str(folder / "bin" / "python")


def cause(output: str) -> str:
    """Return the line of pip's output with the cause of a failed installation, without leading paths.

    >>> cause("  a.h:5:2: error: #error C++17 or later is required\\nERROR: Failed building wheel for horovod\\n")
    'error: #error C++17 or later is required'
    >>> cause("  error: subprocess-exited-with-error\\n  CMake Error at gloo:1 (cmake_minimum_required):\\n")
    'CMake Error at gloo:1 (cmake_minimum_required):'
    """
    lines = [line.strip() for line in output.splitlines()]
    errors = [line for line in lines if re.search("error: |CMake Error", line) and "error: subprocess" not in line]
    errors += [line for line in lines if line.lower().startswith("error")]
    return re.sub(r"^.*?(?=CMake Error|error)", "", errors[0]) if errors else (lines or ["no output"])[-1]


def setup(folder: Path = FOLDER) -> dict[str, str]:
    """Install all other systems. Return the errors of failed installations, and store them in `folder`."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [python(folder), "-m", "pip", "install", "--no-input", "--disable-pip-version-check"]
    errors: dict[str, str] = {}
    subprocess.run([*pip, "-q", "setuptools", "wheel"], check=True, timeout=_PIP_S)
    for name, (words, env) in PEERS.items():
        print(f"churn: install {name}: {' '.join(words)}", flush=True)
        try:
            done = subprocess.run(
                [*pip, *words], env={**os.environ, **env}, capture_output=True, text=True, timeout=_BUILD_S, check=False
            )
        except subprocess.TimeoutExpired:
            errors[name] = f"not installed within {_BUILD_S} s"
            continue
        if done.returncode != 0:
            errors[name] = cause(done.stdout + done.stderr)
            print(f"churn: {name} can't be installed: {errors[name]}", flush=True)
    (folder / "errors.json").write_text(json.dumps(errors, indent=1))
    return errors


def errors(folder: Path = FOLDER) -> dict[str, str]:
    """Return the errors of the packages that `setup` couldn't install."""
    path = folder / "errors.json"
    return json.loads(path.read_text()) if path.exists() else {}


_VERSIONS = """
import json, sys
from importlib import metadata
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
print(json.dumps(found))
"""


def versions(system: System, interpreter: str) -> dict[str, str] | None:
    """Return the versions of a system's packages, or None if a package is missing."""
    if not system.is_peer:
        return {"ms_kungfu": machine.commit(), **{name: metadata.version(name) for name in system.packages}}
    if not Path(interpreter).exists():
        return None
    words = [interpreter, "-c", _VERSIONS, *system.packages]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found if len(found) == len(system.packages) else None
