"""The device layer over the stand-ins of CUDA, NCCL, ACL and HCCL, in real processes under kungfu-run."""

from __future__ import annotations

from typing import Callable

import pytest

RunOnStandins = Callable[..., str]
ENGINES = {"GPU": "NCCL 2.21.5", "Ascend": "HCCL"}
CHUNK = 1 << 16

both = pytest.mark.parametrize("target", ["GPU", "Ascend"])


@both
@pytest.mark.parametrize("np", [2, 3])
def test_collectives_through_the_vendors_library_agree_with_numpy(
    run_on_standins: RunOnStandins, target: str, np: int
) -> None:
    output = run_on_standins(
        "device_collectives.py", target, ENGINES[target], np=np, STANDIN_DELAY_US=200, KUNGFU_DEVICE_CHUNK_BYTES=CHUNK
    )
    assert output.count("fine") == np


@both
def test_ranks_that_share_a_device_go_through_host_memory(run_on_standins: RunOnStandins, target: str) -> None:
    output = run_on_standins(
        "device_collectives.py",
        target,
        "staging: rank 0 and rank 1 share device",
        np=3,
        STANDIN_DEVICES=1,
        STANDIN_DELAY_US=100,
        KUNGFU_DEVICE_CHUNK_BYTES=CHUNK,
    )
    assert output.count("fine") == 3
    assert "collectives between devices go through host memory: rank 0 and rank 1 share device" in output
