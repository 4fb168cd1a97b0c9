"""The device layer over the stand-ins of CUDA, NCCL, ACL and HCCL, in real processes under kungfu-run."""

from __future__ import annotations

from typing import Callable

import pytest

from tests.conftest import long

RunOnStandins = Callable[..., str]
ENGINES = {"GPU": "NCCL 2.21.5", "Ascend": "HCCL"}
CHUNK = 1 << 16

both = pytest.mark.parametrize("target", ["GPU", "Ascend"])


@both
@pytest.mark.parametrize("np", [long(2), 3])
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


@both
def test_operations_that_become_ready_in_any_order_are_launched_in_one(
    run_on_standins: RunOnStandins, target: str
) -> None:
    assert run_on_standins("device_order.py", target, np=3, STANDIN_DELAY_US=300).count("fine") == 3


@both
def test_device_failure_at_one_rank_raises_at_all_and_next_operation_works(
    run_on_standins: RunOnStandins, target: str
) -> None:
    output = run_on_standins("device_trouble.py", target, np=3, STANDIN_MEMORY_BYTES=4 << 20)
    assert output.count("fine") == 3


@both
@pytest.mark.parametrize("engine", ["vendor", "staging"])
def test_the_team_is_brought_up_anew_at_every_resize(run_on_standins: RunOnStandins, target: str, engine: str) -> None:
    plan = [2, 3, 3, 1, 2]
    in_use = "staging: as requested" if engine == "staging" else ENGINES[target]
    # At one rank, too, a vendor's library that was asked for is used.
    output = run_on_standins(
        "device_resizes.py", target, in_use, *plan, np=1, watch=True, KUNGFU_DEVICE_ENGINE=engine, STANDIN_DELAY_US=100
    )
    assert output.count("finished as rank") == 2
    assert output.count("left at step") == 2
