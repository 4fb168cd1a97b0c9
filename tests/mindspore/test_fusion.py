"""Fusion groups in training: what is reduced together, and that it doesn't change the result."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import long
from tests.mindspore.programs import rounding

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
ms = pytest.importorskip("mindspore", reason="MindSpore is not installed")


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """Programs write down what they ask the runtime for."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path / "tracing.so"
    include = HERE.parents[1] / "ops_src" / "include"
    source = HERE / "tracing.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", f"-I{include}", source, "-o", library, "-ldl"], check=True, timeout=60
    )
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("KUNGFU_TRACE", str(tmp_path / "trace"))


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize(
    ("mode", "n", "cases"),
    [("graph", 2, "few"), *(long(mode, n, "all") for mode in ("graph", "pynative") for n in (1, 2, 3))],
)
def test_n_workers_train_as_one_with_every_mode_in_one_operation_a_group(run_workers, mode, n, cases):
    run_workers("fusion.py", n, mode, cases)


@pytest.mark.parametrize(("schedule", "left"), [("3:2", 0), long("3:2,8:3,13:2", 1)])
def test_joining_workers_have_the_fusion_groups_of_the_members(run_program, schedule, left):
    program = PROGRAMS / "fusion_resizes.py"
    alone = re.findall(r"^weights (\S+) (\S+)$", run_program(program, "none", np=0), re.MULTILINE)
    output = run_program(program, schedule, np=1, watch=True)
    assert len(re.findall(r"^left$", output, re.MULTILINE)) == left
    resized = re.findall(r"weights (\S+) (\S+)$", output, re.MULTILINE)
    assert len(resized) == 2
    assert len(set(resized)) == 1, "the workers differ"
    assert float(resized[0][1]) == pytest.approx(float(alone[0][1]), rel=rounding.relative(20, 4 + 6 + 5 + 24))


def test_split_points_are_those_of_mindspores_own_reducer():
    from mindspore.nn.wrap import grad_reducer

    from ms_kungfu.fusion import Gradient, make_plan, parse

    for points in ([0], [1, 3], [2, 4], [5], [3, 9]):
        theirs = [op.fusion for op in grad_reducer._init_allreduce_operators(6, points, "group")]
        plan = make_plan([Gradient(str(i), 4, "float32") for i in range(6)], parse({"mode": "index", "config": points}))
        ours = [number for number, group in enumerate(plan.groups) for _ in group.members]
        assert [fusion - theirs[0] for fusion in theirs] == ours, points


BAD = [
    {"mode": "size"},
    {"config": 1},
    {"mode": "large", "config": 1},
    {"mode": "size", "config": None},
    {"mode": "size", "config": -1},
    {"mode": "size", "config": 1.5},
    {"mode": "size", "config": "3"},
    {"mode": "index", "config": None},
    {"mode": "index", "config": []},
    {"mode": "index", "config": (1, 2)},
    {"mode": "index", "config": [1.0]},
    {"mode": "index", "config": [True]},
    {"mode": "index", "config": [-1]},
    {"mode": "index", "config": [2, 2]},
    {"mode": "index", "config": [3, 2]},
    None,
    [1],
]


@pytest.mark.parametrize("bad", BAD, ids=str)
def test_a_bad_configuration_raises_what_mindspore_raises(bad):
    from ms_kungfu.fusion import parse

    with pytest.raises((TypeError, ValueError, KeyError)) as theirs:
        ms.set_auto_parallel_context(comm_fusion={"allreduce": bad})
    ms.reset_auto_parallel_context()
    with pytest.raises(theirs.type):
        parse(bad)


def test_bad_argument_is_refused_when_the_optimizer_is_made():
    from ms_kungfu.optimizers import KungFuGradReducer, KungFuSGD

    params = ms.nn.Dense(2, 2).trainable_params()
    with pytest.raises(ValueError, match="at least 0, not -3"):
        KungFuSGD(params, 0.1, fusion={"mode": "size", "config": -3})
    with pytest.raises(ValueError, match="pass the model's parameters with parameters="):
        KungFuGradReducer(fusion="none")


NETWORK = """
import mindspore as ms
import ms_kungfu as kf
from mindspore import nn, Tensor

def network():
    net = nn.SequentialCell(nn.Dense(2, 3), nn.Dense(3, 1))
    net[0].set_comm_fusion(5)
    return net

def optimizer():
    return nn.SGD(network().trainable_params(), 0.1)

def parameters():
    return network().trainable_params()[::-1]

if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE)
    net = nn.SequentialCell(nn.Dense(2, 3), nn.Dense(3, 1))
    optimizer = kf.optimizers.KungFuSGD(net.trainable_params(), 0.1)
    print("made")
    net[0].set_comm_fusion(5)
    step = nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)
    if __import__("sys").argv[1:] == ["train"]:
        step(Tensor([[1.0, 2.0]]), Tensor([[1.0]]))
        print("trained")
"""


@pytest.mark.parametrize(
    ("words", "first", "groups"),
    [
        (["a_network.py:network"], "0.weight", [2, 2]),
        long(["a_network:optimizer"], "0.weight", [2, 2]),
        long(["a_network.py:parameters"], "1.bias", [2, 2]),
        long(["--fusion", "none", "a_network.py:network"], "0.weight", [1, 1, 1, 1]),
        long(["a_network.py", "train"], "0.weight", [2, 2]),
        (["--fusion", "none", "a_network.py", "train"], "0.weight", [1, 1, 1, 1]),
    ],
)
def test_the_command_shows_a_program(tmp_path, words, first, groups):
    (tmp_path / "a_network.py").write_text(NETWORK)
    shown = command(tmp_path, *words)
    assert "trained" not in shown
    assert "made" not in shown  # the program's own words, its plan maybe
    assert shown.startswith("4 gradients, ")
    assert "ERROR" not in shown, "MindSpore's messages about the compilation that was stopped"
    assert re.findall(r"^gradients/\d+: (\d+) ", shown, re.MULTILINE) == [str(n) for n in groups]
    assert re.search(r"^ +0  (\S+)", shown, re.MULTILINE)[1] == first


def test_the_command_tells_of_a_program_without_a_step(tmp_path):
    (tmp_path / "a_network.py").write_text(NETWORK)
    (tmp_path / "a_network.py").open("a").write("print('all that it says')\n")
    said = command(tmp_path, "a_network.py", status=2)
    assert "a_network.py ended before an optimizer" in said
    assert "all that it says" in said


def command(folder, *words, status=0):
    done = subprocess.run(
        [sys.executable, "-m", "ms_kungfu.fusion", *words], cwd=folder, timeout=120, text=True, capture_output=True
    )
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr
