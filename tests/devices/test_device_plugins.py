"""The plugins for GPU and Ascend: they compile, register with MindSpore's factories, and their kernels work."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Callable

import pytest

from ms_kungfu import _device
from tests.devices.conftest import HERE, ROOT, cuda_headers, execute


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("target", ["GPU", "Ascend"])
def test_kernels_made_by_mindspores_factory_work(
    plugins: Path, run_on_standins: Callable[..., str], target: str
) -> None:
    assert run_on_standins("device_kernels.py", target, plugins, np=2, STANDIN_DELAY_US=100).count("fine") == 2


def test_own_declarations_of_cuda_are_the_vendors() -> None:
    includes = [f"-isystem{folder}" for folder in cuda_headers()]
    source = HERE / "declarations.cc"
    execute("c++", "-std=c++17", "-fsyntax-only", f"-I{ROOT}/ops_src", f"-I{ROOT}/ops_src/include", *includes, source)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, standins: Path) -> None:
    program = "import ms_kungfu as kf, sys; kf.init(device=sys.argv[1])"

    def fails(target: str, *texts: str, **variables: object) -> None:
        environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
        done = subprocess.run(
            [sys.executable, "-c", program, target], env=environment, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 1
        for text in texts:
            assert text in done.stderr.splitlines()[-1], done.stderr

    missing = tmp_path / "missing.so"
    fails("GPU", "ImportError: the CUDA runtime (libcudart) is missing: ", KUNGFU_DEVICE_RUNTIME_LIBRARY=missing)
    fails("Ascend", "ImportError: AscendCL (libascendcl) is missing: ", KUNGFU_DEVICE_RUNTIME_LIBRARY=missing)
    wrong = standins / "libnccl.so.2"
    fails("GPU", f"ImportError: the CUDA runtime (libcudart) in {wrong} has no function cudaGetDeviceCount",
          KUNGFU_DEVICE_RUNTIME_LIBRARY=wrong)  # fmt: skip
    runtime = standins / "libcudart.so.12"
    # Without NCCL there is staging, unless NCCL was asked for.
    fails("GPU", "ImportError: NCCL (libnccl) is missing: ", KUNGFU_DEVICE_RUNTIME_LIBRARY=runtime,
          KUNGFU_DEVICE_ENGINE_LIBRARY=missing, KUNGFU_DEVICE_ENGINE="vendor")  # fmt: skip
    fails("GPU", "ImportError: ", "is NCCL 2.10.3; 2.14 or later is required", STANDIN_NCCL_VERSION=21003,
          KUNGFU_DEVICE_RUNTIME_LIBRARY=runtime, KUNGFU_DEVICE_ENGINE_LIBRARY=wrong,
          KUNGFU_DEVICE_ENGINE="vendor")  # fmt: skip
    fails("GPU", "ImportError: no GPU device can be used: cudaGetDeviceCount: cudaErrorOfTheStandIn (100)",
          STANDIN_FAIL="cudaGetDeviceCount:1:100", KUNGFU_DEVICE_RUNTIME_LIBRARY=runtime,
          KUNGFU_DEVICE_ENGINE_LIBRARY=wrong)  # fmt: skip
    fails("TPU", "ValueError: device must be one of CPU, GPU, Ascend, not 'TPU'")


def test_a_device_target_is_spelled_as_mindspore_spells_it() -> None:
    assert [_device.check_target(text) for text in ("cpu", "GPU", "ascend", "Ascend")] == [
        "CPU", "GPU", "Ascend", "Ascend",
    ]  # fmt: skip
