"""A rank that dies in a collective of the vendor's library, which would leave the others waiting for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ms_kungfu import _core
from tests.devices.conftest import HERE, LIBRARIES

SIZE, VICTIM = 3, 1
FAULTS = {
    # Where it dies: the call of the vendor's library that it does not return from.
    ("GPU", "bringing up"): "ncclCommInitRankConfig:1:-9",
    ("GPU", "reducing"): "ncclAllReduce:2:-9",
    ("GPU", "staging"): "cudaMemcpyAsync:3:-9",
    ("Ascend", "bringing up"): "HcclCommInitRootInfo:1:-9",
    ("Ascend", "reducing"): "HcclAllReduce:2:-9",
    ("Ascend", "staging"): "aclrtMemcpyAsync:3:-9",
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize(("target", "where"), FAULTS)
def test_survivors_leave_the_vendors_library_when_a_rank_dies(
    standins: Path, tmp_path: Path, target: str, where: str
) -> None:
    fd = _core.create_segment(SIZE, 1, 2)
    control = _core.SegmentControl(fd)
    runtime, engine = LIBRARIES[target]
    log = tmp_path / "violations"
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": str(standins),
        "KUNGFU_DEVICE_RUNTIME_LIBRARY": str(standins / runtime),
        "KUNGFU_DEVICE_ENGINE_LIBRARY": str(standins / engine),
        "KUNGFU_DEVICE_CHUNK_BYTES": str(1 << 16),
        "STANDIN_LOG": str(log),
        "STANDIN_DELAY_US": "100",
    }
    program = HERE / "programs" / "device_death.py"
    ranks = [
        subprocess.Popen(
            [sys.executable, program, target, str(fd), str(r), str(SIZE), str(VICTIM), FAULTS[target, where], where],
            env=environment,
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
        )
        for r in range(SIZE)
    ]
    try:
        assert ranks[VICTIM].wait(timeout=60) == -signal.SIGKILL
        died = time.monotonic()
        control.mark_lost(VICTIM, "was killed")
        for r in range(SIZE):
            if r == VICTIM:
                continue
            output, _ = ranks[r].communicate(timeout=30)
            assert ranks[r].returncode == 0, output
            assert f"rank {r}: PeerLostError" in output
        assert time.monotonic() - died < 15
        assert not log.exists(), log.read_text()
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
        os.close(fd)
