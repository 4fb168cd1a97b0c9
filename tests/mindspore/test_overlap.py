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
    "args",
    [("graph", "once"), long(("graph",)), long(("pynative",)), long(("graph", "1")), long(("graph", "2"))],
    ids=" ".join,
)
def test_n_workers_train_as_one_and_errors_reach_python(run_workers, args):
    run_workers("overlap.py", 2, *args, timeout_s=280)


@pytest.mark.long
@pytest.mark.parametrize("n", [3, 1])
def test_a_single_worker_and_more_workers_than_cores(run_workers, n):
    run_workers("overlap.py", n, "graph", *(["once"] if n > 2 else []), timeout_s=280)


@pytest.mark.long
def test_joining_workers_step_beside_members(run_program):
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


@pytest.mark.parametrize(
    ("hosts", "graph", "width", "fusion", "groups", "overlapped"),
    [
        (1, True, 1024, None, 1, False),
        (2, True, 1024, None, 4, True),
        (2, False, 1024, None, 1, False),
        (2, True, 16, None, 1, False),
        (2, True, 1024, {"mode": "size", "config": 8}, 2, True),
        (2, True, 1024, {"mode": "size", "config": 64}, 1, False),
    ],
)
def test_over_several_hosts_it_is_on_by_itself(monkeypatch, hosts, graph, width, fusion, groups, overlapped):
    import mindspore as ms

    from ms_kungfu.optimizers import KungFuGradReducer

    monkeypatch.setenv("KUNGFU_START_HOSTS", str(hosts))
    before = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE if graph else ms.PYNATIVE_MODE)
    try:
        layers = [ms.nn.Dense(width, width, has_bias=False) for _ in range(4)]  # of 4 MB each
        parameters = ms.nn.SequentialCell(layers).trainable_params()
        reducer = KungFuGradReducer(parameters, fusion=fusion)
        assert len(reducer.fusion_plan().groups) == groups
        assert reducer.overlapped is overlapped
        for given in (True, False):
            assert KungFuGradReducer(parameters, fusion=fusion, overlap=given).overlapped is given
        of_shards = KungFuGradReducer(parameters)
        of_shards.leave_to_shards()
        assert len(of_shards.fusion_plan().groups) == 1
    finally:
        ms.set_context(mode=before)


def test_wrong_arguments_are_named():
    from ms_kungfu.optimizers import KungFuGradReducer

    with pytest.raises(TypeError, match="overlap must be True, False or None, not 'yes'"):
        KungFuGradReducer([], overlap="yes")
    with pytest.raises(ValueError, match="pass the model's parameters with parameters="):
        KungFuGradReducer(overlap=True)
