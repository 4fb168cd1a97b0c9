"""Reductions in the background: the same results, errors where they belong, and the time that they are for."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import long
from tests.mindspore.programs import rounding

HERE = Path(__file__).parent
pytest.importorskip("mindspore", reason="MindSpore is not installed")


@pytest.mark.parametrize(
    "args", [("graph",), long(("pynative",)), long(("graph", "1")), long(("graph", "2"))], ids=" ".join
)
def test_n_workers_train_as_one_and_errors_reach_python(run_workers, args):
    run_workers("overlap.py", 2, *args, timeout_s=280)


@pytest.mark.long
@pytest.mark.parametrize("n", [3, 1])
def test_a_single_worker_and_more_workers_than_cores(run_workers, n):
    run_workers("overlap.py", n, "graph", *(["once"] if n > 2 else []), timeout_s=280)


@pytest.mark.long
def test_joiners_step_beside_veterans(run_program):
    program = HERE / "programs" / "fusion_resizes.py"
    alone = re.findall(r"^weights (\S+) (\S+)$", run_program(program, "none", np=0), re.MULTILINE)
    output = run_program(program, "3:2,8:3,13:2", "overlap", np=1, watch=True)
    assert len(re.findall(r"^left$", output, re.MULTILINE)) == 1
    resized = re.findall(r"weights (\S+) (\S+)$", output, re.MULTILINE)
    assert len(resized) == 2
    assert len(set(resized)) == 1, "the workers differ"
    assert float(resized[0][1]) == pytest.approx(float(alone[0][1]), rel=rounding.relative(20, 4 + 6 + 5 + 24))


@pytest.mark.timing
def test_four_groups_of_20_ms_hide_behind_a_backward_pass_of_80_ms(run_workers, tmp_path, monkeypatch):
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    nap = tmp_path / "nap.so"
    subprocess.run([compiler, "-shared", "-fPIC", HERE / "nap.c", "-o", nap], check=True, timeout=60)
    monkeypatch.setenv("KUNGFU_TEST_COMM_DELAY_MS", "20")
    output = run_workers("overlap_time.py", 2, str(nap))
    times = re.findall(r"overlap (True|False): (\S+) ms", output)
    print(times)
    assert len(times) == 4
    for overlap, ms in times:
        if overlap == "True":
            assert float(ms) <= 110, times
        else:
            assert float(ms) >= 155, "the delay isn't there"


def test_wrong_arguments_are_named():
    from ms_kungfu.optimizers import KungFuGradReducer

    with pytest.raises(TypeError, match="overlap must be True, False or None, not 'yes'"):
        KungFuGradReducer([], overlap="yes")
    with pytest.raises(ValueError, match="give the reducer the parameters too"):
        KungFuGradReducer(overlap=True)
