"""Builds the stand-ins of the vendors' libraries once and runs programs over them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Callable

import pytest

import ms_kungfu
from ms_kungfu import _core
from tests.conftest import Run, one_at_a_time

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
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


def cuda_headers() -> list[Path]:
    """CUDA's headers from PyPI's packages, which the extra `test` brings."""
    folders = sorted(Path(sysconfig.get_path("purelib"), "nvidia").glob("cuda_*/include"))
    if not any((folder / "cuda_runtime_api.h").exists() for folder in folders):
        pytest.skip("CUDA's headers are not installed (the extra `test` brings them, on x86-64)")
    return folders


def execute(*command: object) -> str:
    done = subprocess.run([str(c) for c in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-6000:]}"
    return done.stdout


def build(name: str, **options: object) -> Path:
    """The folder in which the CMake project in the folder `name` has been built."""
    folder = ROOT / "build" / "devices" / name
    definitions = [f"-D{option}={value}" for option, value in {"Python_EXECUTABLE": sys.executable, **options}.items()]
    with one_at_a_time(f"devices-{name}"):
        execute("cmake", "-G", "Ninja", "-S", HERE / name, "-B", folder, *definitions)
        execute("cmake", "--build", folder, "--parallel", os.cpu_count() or 1)
    return folder


@pytest.fixture(scope="session")
def standins() -> Path:
    """The folder with the stand-ins."""
    return build("standins", STANDIN_MINDSPORE=mindspore() if has_gpu_plugin() else "")


@pytest.fixture(scope="session")
def plugins() -> Path:
    """The folder with the plugin for GPUs, compiled with the headers from PyPI, and what launches kernels."""
    return build(
        "plugins",
        CMAKE_BUILD_TYPE="Release",
        CUDA_INCLUDE_DIRS=";".join(map(str, cuda_headers())),
        KUNGFU_RUNTIME=Path(_core.__file__).with_name("libkungfu_runtime.so"),
    )


@pytest.fixture
def gpu_plugin(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs find the plugin for GPUs, also where the package was built without CUDA's headers."""
    installed = Path(_core.__file__).parent
    kernels = Path("plugins", version("mindspore"))
    if (installed / kernels / "libkungfu_ms_gpu.so").exists():
        return
    package = tmp_path / "with-plugin" / "ms_kungfu"
    (package / kernels).mkdir(parents=True)
    files = [*Path(ms_kungfu.__file__).parent.iterdir(), *installed.iterdir()]
    for name, file in {file.name: file for file in files if file.name != "plugins"}.items():
        (package / name).symlink_to(file)
    built: Path = request.getfixturevalue("plugins")
    for file in (*(installed / kernels).iterdir(), built / "libkungfu_ms_gpu.so"):
        (package / kernels / file.name).symlink_to(file)
    monkeypatch.setenv("PYTHONPATH", f"{package.parent}:{os.environ.get('PYTHONPATH', '')}")


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

    def run(program: str, *args: object, violations: bool = False, timeout_s: float = 100, **options: object) -> str:
        log = tmp_path / "violations"
        monkeypatch.setenv("LD_LIBRARY_PATH", str(standins))
        runtime, engine = LIBRARIES[str(args[0])]
        monkeypatch.setenv("KUNGFU_DEVICE_RUNTIME_LIBRARY", str(standins / runtime))
        monkeypatch.setenv("KUNGFU_DEVICE_ENGINE_LIBRARY", str(standins / engine))
        monkeypatch.setenv("STANDIN_LOG", str(log))
        for name in [name for name in options if name.isupper()]:
            monkeypatch.setenv(name, str(options.pop(name)))
        output = run_program(HERE / "programs" / program, *args, timeout_s=timeout_s, **options)
        found = log.read_text() if log.exists() else ""
        assert bool(found) == violations, f"violations:\n{found}\n{output[-3000:]}"
        return output + found

    return run
