"""The parts of `benchmarks` that need no second process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks import __main__ as cli
from benchmarks import collectives, machine, report, rounds
from benchmarks.workload import DTYPES, Task, Workload
from ms_kungfu.comm import OPS
from ms_kungfu.fusion.shapes import GRADIENTS


def task(**changes: Any) -> Task:
    return Task(**{"kind": "all_reduce", "counts": (3000, 1), "groups": ((0, 2),), "dtype": "float32", **changes})


def reduced(all_ranks: list[Workload], op: str) -> None:
    """What a correct contender leaves behind, by NumPy."""
    for t in range(len(all_ranks[0].task.counts)):
        dtype = all_ranks[0].dtype
        values = np.stack([dtype.decode(w.sets[0][0][t]) for w in all_ranks])
        result = {"sum": values.sum, "mean": values.mean, "min": values.min, "max": values.max, "prod": values.prod}[
            op
        ](0)
        for w in all_ranks:
            w.sets[0][1][t][:] = dtype.encode(np.trunc(result) if op == "mean" and not dtype.tolerance else result)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_results_pass_and_one_wrong_element_does_not(dtype: str, op: str) -> None:
    ranks = [Workload(task(dtype=dtype, op=op), rank, 3) for rank in range(3)]
    for work in ranks:
        work.poison()
        assert work.verify(1) is not None
    reduced(ranks, op)
    assert [work.verify(1) for work in ranks] == [None] * 3
    output = ranks[1].sets[0][1][0]
    output[2999] = DTYPES[dtype].encode(DTYPES[dtype].decode(output[2999:]) + 1)[0]
    assert str(ranks[1].verify(1)).startswith("rank 1, buffer set 0, tensor 0, element 2999: ")


def test_a_nan_is_wrong() -> None:
    ranks = [Workload(task(), rank, 2) for rank in range(2)]
    reduced(ranks, "sum")
    ranks[0].sets[0][1][1][0] = np.nan
    assert str(ranks[0].verify(1)).startswith("rank 0, buffer set 0, tensor 1, element 0: nan instead of ")


def test_values_depend_on_rank_and_tensor() -> None:
    works = [Workload(task(counts=(2000, 2000)), rank, 2) for rank in range(2)]
    arrays = [x for w in works for x in w.sets[0][0]]
    assert len({x.tobytes() for x in arrays}) == 4


def test_a_broadcast_poisons_all_but_its_root() -> None:
    works = [Workload(task(kind="broadcast", root=1), rank, 2) for rank in range(2)]
    for work in works:
        work.poison()
    assert works[0].verify(1) is not None
    assert works[1].verify(1) is None


def test_buckets_keep_the_order_and_the_limit() -> None:
    assert collectives._groups([2, 2, 9, 1], 1 << 20, "4M") == ((0, 2), (2, 3), (3, 4))
    assert collectives._groups([1, 1], 4, "4M") == collectives._groups([1, 1], 4 << 20, "flat") == ((0, 2),)
    assert collectives._groups([1, 1], 4, "each") == ((0, 1), (1, 2))
    groups = collectives._groups(GRADIENTS["resnet50"], 4, "4M")
    assert [i for begin, end in groups for i in range(begin, end)] == list(range(161))


def test_gradients_are_those_of_the_models() -> None:
    shapes = {name: (len(counts), sum(counts)) for name, counts in GRADIENTS.items()}
    # As published with the models' weights.
    assert shapes == {
        "lenet": (10, 44_426), "resnet50": (161, 25_557_032), "vgg16": (32, 138_357_544),
        "inception-v3": (284, 23_834_568), "bert-base": (199, 109_482_240),
    }  # fmt: skip


def test_large_buffers_are_taken_in_turns_that_exceed_the_cache() -> None:
    settings = collectives.Settings(["kungfu"], 2)
    small = collectives._task("all_reduce", [16], "each", settings)
    large = collectives._task("all_reduce", [1 << 18], "each", settings)
    assert (small.sets, small.batch) == (1, 100)
    assert large.sets * 2 * large.nbytes >= 2 * machine.cache_bytes()
    assert large.batch == 1


def entry(label: str, *turns: list[float], wrong: str | None = None) -> rounds.Entry:
    group: Any = SimpleNamespace(size=2, contender=SimpleNamespace(transport="shm"))
    return rounds.Entry(label, group, {}, {"dtype": "float32", "op": "sum", "bytes": 4000}, list(turns), wrong)


def test_the_ratio_compares_what_was_measured_in_the_same_round() -> None:
    # The machine slows down tenfold in the second round; the ratio stays.
    ours, theirs = entry("kungfu", [1e-6] * 3, [10e-6] * 3), entry("mpi", [2e-6] * 3, [20e-6] * 3)
    made = report.records("all_reduce", [ours, theirs], ours)
    assert [r["ratio"] for r in made] == [1, 2]
    assert made[0]["min_us"] == 1
    assert made[0]["algorithm_gb_s"] == round(4000 / made[0]["p50_us"] / 1e3, 3)


@pytest.mark.parametrize(("last_to_come", "expected"), [(False, [2.0, 5.0]), (True, [1.0, 3.0])])
def test_the_slowest_rank_counts_in_each_sample_or_the_last_to_come(last_to_come: bool, expected: list[float]) -> None:
    class Fake:
        size = 2
        contender = SimpleNamespace(last_to_come_counts=last_to_come)

        def measure(self, task: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"samples": [1.0, 5.0], "wrong": None}, {"samples": [2.0, 3.0], "wrong": None}]

        def cpu_seconds(self) -> float:
            return 0.0

    fake: Any = Fake()
    (done,) = rounds.run([rounds.Entry("x", fake, {})], rounds=2)
    assert done.rounds == [expected] * 2


def test_a_wrong_result_shows_in_the_table_and_the_records() -> None:
    made = report.records("all_reduce", [entry("kungfu", [1e-6], wrong="rank 1, ...")], None)
    out = report.Report()
    out.add("title", made)
    assert out.failures == made
    assert "WRONG RESULT: rank 1, ..." in report.table("title", made)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    status = cli.main(words)
    return status, capsys.readouterr().err


def test_a_missing_peer_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("benchmarks.contenders.base.find_spec", lambda name: None)
    status, said = run(capsys, "all_reduce", "--vs", "gloo")
    assert (status, said) == (2, 'bench: gloo: torch not installed; pip install "ms_kungfu[bench]"\n')


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["all_reduce", "--vs", "nccl"], "no contender 'nccl'"),
        (["all_reduce", "--vs", "os:path"], "'os:path' is not a Contender"),
        (["all_reduce", "--dtype", "float8"], "no dtype 'float8'"),
        (["all_reduce", "--through", "magic"], "no face 'magic'"),
        (["broadcast", "--root", "2"], "root 2"),
        (["gradients", "--models", "vgg"], "no model 'vgg'"),
        (["step", "--vs", "gloo"], "supports only the peer mindspore"),
    ],
)
def test_bad_input_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, text = run(capsys, *words)
    assert status == 2
    assert text.startswith("bench: ")
    assert said in text
    assert text.count("\n") == 1


@pytest.mark.parametrize("words", [["all_reduce", "--sizes", "4X"], ["all_reduce", "-np", "0"]])
def test_argparse_refuses(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    assert ended.value.code == 2
    assert words[-1] in capsys.readouterr().err


def test_the_picture_is_drawn_from_written_results(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = report.Report()
    ours = entry("kungfu", [1e-6, 2e-6])
    out.records = report.records("all_reduce", [ours, entry("mpi", [2e-6, 3e-6])], ours)
    out.records += [{**r, "bench": "gradients", "model": "lenet"} for r in out.records]
    out.write(str(tmp_path / "results.jsonl"))
    picture = tmp_path / "picture.png"
    assert cli.main(["plot", str(tmp_path / "results.jsonl"), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["picture.png", "results.jsonl"]
