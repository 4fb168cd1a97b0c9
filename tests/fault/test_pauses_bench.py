"""`python -m benchmarks resize --pauses` and `python -m ms_kungfu.chaos` on real processes, in small."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import long
from tests.multiprocess.launching import Program

pytestmark = pytest.mark.timeout(200)
WORKER = Path(__file__).with_name("programs") / "adding.py"
ENVIRON = {"PYTHONPATH": str(Path(__file__).resolve().parents[2])}


def test_survivors_go_on_through_kills_and_the_ledger_is_exact(tmp_path: Path) -> None:
    words = ["resize", "--pauses", "kill,shrink", "--count", "2", "--step-ms", "5", "--timeout", "150"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *words, "--json", str(tmp_path / "out.jsonl")],
        cwd=tmp_path, env={**os.environ, **ENVIRON}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=190,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    kill, shrink = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert kill["verified"]
    assert shrink["verified"]
    assert 0 < kill["heard_p50_ms"] < kill["heard_max_ms"] < 5000
    assert 0 <= kill["redo_p50_ms"] <= kill["whole_max_ms"] < 20000
    assert shrink["whole_max_ms"] < 20000
    assert kill["median_step_ms"] >= 5


@pytest.mark.long
def test_chaos_finds_a_job_that_minds_and_one_that_does_not(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "ms_kungfu.chaos", "-seed", "3", "-every", "1.5", "-for", "12", "-finish", "60"]
    for program, status in ((["good"], 0), (["bad"], 1)):
        done = subprocess.run(
            [*command, "--", "-np", "3", sys.executable, str(WORKER), str(tmp_path / program[0]), *program],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == status, done.stdout[-4000:]
        assert int(re.findall(r"chaos: (\d+) kills", done.stdout)[0]) >= 1
        assert "exact: each sample was trained once" in done.stdout
        assert ("parameters differ" in done.stdout) == (status == 1)
        left = set(Path("/dev/shm").glob(f"adding-{tmp_path.name}-*"))
        named = re.findall(r"chaos: WRONG: (\S+) is left", done.stdout)
        for path in left:
            path.unlink()
        assert set(named) == {str(path) for path in left}
        assert (len(left) > 0) == (status == 1)


PAUSES = "benchmarks", ["resize", "--pauses", "kill", "--count", "100000"]
CHAOS = "ms_kungfu.chaos", ["-for", "1000", "--", "-np", "3", sys.executable, WORKER, "job", "good"]


@pytest.mark.parametrize(
    ("module", "words", "number"),
    [
        (*PAUSES, signal.SIGTERM), (*CHAOS, signal.SIGINT),
        long(*PAUSES, signal.SIGINT), long(*CHAOS, signal.SIGTERM),  # the other signal, in the same two handlers
    ],
)  # fmt: skip
def test_a_signal_ends_the_job_too(tmp_path: Path, module: str, words: list, number: int) -> None:
    program = Program(module, words, tmp_path, ENVIRON)
    try:
        deadline = time.monotonic() + 60
        # The program, launcher, guard, and three workers or more.
        while len(seen := program.processes()) < 6 and time.monotonic() < deadline:
            time.sleep(0.02)  # one that is just being replaced by its program (exec) isn't seen for a moment
        assert len(seen) >= 6, program.output
        program.signal(number)
        begin = time.monotonic()
        code = program.wait()
        assert code in ((143,) if number == signal.SIGTERM else (-signal.SIGINT, 130)), program.output
        program.assert_gone(begin, 15)
    finally:
        program.kill_all()
