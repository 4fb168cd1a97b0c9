"""Our GPU plugin in one process with MindSpore's own, which MindSpore 2.10 for x86-64 brings for CUDA 11.

MindSpore loads its plugin where it finds CUDA's libraries, GPU or not. Here they are the stand-ins, on which whole
programs run; and the real ones of PyPI's nvidia-*-cu11 where these are installed (docs/devices.md says how), which can
do little without a GPU.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Callable

import pytest

from ms_kungfu.devices.libraries import CUDA_DRIVER, MINDSPORE_GPU, candidates
from tests.conftest import Run
from tests.devices.conftest import HERE

pytestmark = pytest.mark.long


@pytest.fixture
def run_in_mindspore(
    cuda11: Path, standins: Path, gpu_plugin: None, run_on_standins: Callable[..., str]
) -> Callable[..., str]:
    def run(program: str, *args: object, **options: object) -> str:
        return run_on_standins(
            program, "GPU", *args, timeout_s=240, STANDIN_DELAY_US=100, STANDIN_MEMORY_BYTES=2**29, CUDA_HOME=cuda11,
            LD_LIBRARY_PATH=f"{cuda11 / 'lib64'}:{standins}", KUNGFU_DEVICE_RUNTIME_LIBRARY="", **options,
        )  # fmt: skip

    return run


@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["NCCL", "staging"])
def test_primitives_work_with_device_target_gpu(run_in_mindspore: Callable[..., str], engine: str) -> None:
    assert run_in_mindspore("device_mindspore.py", engine, np=2).count("fine") == 2


@pytest.mark.timeout(600)
def test_resizes_and_a_death_with_device_target_gpu(run_in_mindspore: Callable[..., str]) -> None:
    output = run_in_mindspore("device_mindspore_elastic.py", "NCCL", 1, 3, np=2, watch=True)
    assert output.count("left at step") == 1
    assert len(re.findall("finished as rank [02] of 3", output)) == 2
    assert "collectives between devices go through host memory: 1 of 3 ranks failed" in output


def real_libraries() -> list[Path]:
    """The folders with CUDA 11's libraries, from the packages in KUNGFU_TEST_CUDA11 or in Python's own path."""
    folders = os.environ.get("KUNGFU_TEST_CUDA11", "").split(":")
    found: list[Path] = []
    for library in MINDSPORE_GPU:
        first = candidates(library, [*filter(None, folders), *sys.path])[0]
        if "/" not in first:
            pytest.skip(f"there is no {library.what}, nor in a package: set KUNGFU_TEST_CUDA11 as docs/devices.md says")
        found.append(Path(first).parent)
    return found


def test_plugin_loads_with_the_real_cuda_libraries(
    cuda11: Path,
    standins: Path,
    gpu_plugin: None,
    run_program: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = real_libraries()
    if not Path("/proc/driver/nvidia").exists():  # MindSpore's plugin is linked to the driver's library
        (tmp_path / CUDA_DRIVER.names[0]).symlink_to(cuda11 / "lib64" / CUDA_DRIVER.names[0])
        folders += [tmp_path, standins]
    monkeypatch.setenv("CUDA_HOME", str(cuda11))  # has an nvcc that tells the version
    monkeypatch.setenv("LD_LIBRARY_PATH", ":".join(map(str, folders)))
    monkeypatch.setenv("KUNGFU_DEVICE_ENGINE", "vendor")
    assert "fine" in run_program(HERE / "programs" / "device_beside.py", folders[0], np=0)
