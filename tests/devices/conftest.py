"""Builds the stand-ins of the vendors' libraries once and runs programs over them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Callable

import pytest

from tests.conftest import Run

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "standins"
LIBRARIES = {"GPU": ("libcudart.so.12", "libnccl.so.2"), "Ascend": ("libascendcl.so", "libhccl.so")}


def mindspore() -> Path:
    """The installed package's folder."""
    spec = find_spec("mindspore")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def has_gpu_plugin() -> bool:
    """Whether this MindSpore brings its plugin for GPUs; those for x86-64 do."""
    return (mindspore() / "lib" / "plugin" / "libmindspore_gpu.so.11.6").exists()


@pytest.fixture(scope="session")
def standins() -> Path:
    """The folder with the stand-ins."""
    options = [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-DSTANDIN_MINDSPORE={mindspore() if has_gpu_plugin() else ''}",
    ]
    for command in (
        ["cmake", "-G", "Ninja", "-S", HERE / "standins", "-B", BUILD, *options],
        ["cmake", "--build", BUILD, "--parallel", str(os.cpu_count() or 1)],
    ):
        done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0, done.stdout
    return BUILD


@pytest.fixture(scope="session")
def cuda11(standins: Path) -> Path:
    """For CUDA_HOME: stand-ins for all that MindSpore's own GPU plugin takes from CUDA."""
    if not has_gpu_plugin():
        pytest.skip("this MindSpore brings no plugin for GPUs")
    return standins / "cuda11"


@pytest.fixture
def run_on_standins(
    standins: Path, run_program: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    """As `run_program` with the device target as first argument, over the stand-ins; `violations` says whether they
    have to find some. Other keyword arguments in capital letters are environment variables."""

    def run(program: str, *args: object, violations: bool = False, **options: object) -> str:
        log = tmp_path / "violations"
        monkeypatch.setenv("LD_LIBRARY_PATH", str(standins))
        runtime, engine = LIBRARIES[str(args[0])]
        monkeypatch.setenv("KUNGFU_DEVICE_RUNTIME_LIBRARY", str(standins / runtime))
        monkeypatch.setenv("KUNGFU_DEVICE_ENGINE_LIBRARY", str(standins / engine))
        monkeypatch.setenv("STANDIN_LOG", str(log))
        for name in [name for name in options if name.isupper()]:
            monkeypatch.setenv(name, str(options.pop(name)))
        output = run_program(HERE / "programs" / program, *args, timeout_s=100, **options)
        found = log.read_text() if log.exists() else ""
        assert bool(found) == violations, f"violations:\n{found}\n{output[-3000:]}"
        return output + found

    return run
