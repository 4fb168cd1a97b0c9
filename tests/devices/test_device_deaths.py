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
    ("GPU", "reducing"): "ncclAllReduce:5:-9",
    ("GPU", "staging"): "cudaMemcpyAsync:17:-9",
    ("Ascend", "bringing up"): "HcclCommInitRootInfo:1:-9",
    ("Ascend", "reducing"): "HcclAllReduce:5:-9",
    ("Ascend", "staging"): "aclrtMemcpyAsync:17:-9",
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("recovers", [False, True], ids=["failing", "recovering"])
@pytest.mark.parametrize(("target", "where"), FAULTS)
def test_survivors_leave_the_vendors_library_when_a_rank_dies(
    standins: Path, tmp_path: Path, target: str, where: str, recovers: bool
) -> None:
    fd = _core.create_segment(SIZE, 1, 2, recovers)
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
    command = [sys.executable, HERE / "programs" / "device_death.py", target, fd]
    ranks = [
        subprocess.Popen(
            list(map(str, [*command, r, SIZE, VICTIM, FAULTS[target, where], where, int(recovers)])),
            env=environment,
            pass_fds=[fd],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
        )
        for r in range(SIZE)
    ]
    survivors = [r for r in range(SIZE) if r != VICTIM]
    try:
        assert ranks[VICTIM].wait(timeout=60) == -signal.SIGKILL
        died = time.monotonic()
        control.mark_lost(VICTIM, "was killed", recovers)
        outputs = {}
        for r in survivors:
            outputs[r], _ = ranks[r].communicate(timeout=30)
            assert ranks[r].returncode == 0, outputs[r]
        assert time.monotonic() - died < 20
        assert not log.exists(), log.read_text()
        if not recovers:
            assert all("PeerLostError" in output for output in outputs.values()), outputs
            return
        # The same at all survivors: all groups of a step with the same ranks in them, which the runtime tells, too.
        steps = {r: [line for line in outputs[r].splitlines() if line.startswith("step ")] for r in survivors}
        assert steps[survivors[0]] == steps[survivors[1]], steps
        assert len(steps[survivors[0]]) == 3
        everybody = list(range(SIZE))
        for line in steps[survivors[0]]:
            assert any(line.endswith(f": {who} {who} {who} of {who}") for who in (everybody, survivors)), line
        assert steps[survivors[0]][-1].endswith(f"of {survivors}")
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
        os.close(fd)
