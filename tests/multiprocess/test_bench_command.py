"""`python -m benchmarks` as a user starts it: what it writes, what it notices, that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from test_hosts import A, B, C, hosts  # noqa: F401

from benchmarks import contenders
from benchmarks.simulate import fit, read
from tests.conftest import long

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).resolve().parents[2]
TINY = ("--rounds", "2", "--samples", "2", "--timeout", "100")
KEYS = {
    "bench", "contender", "ranks", "transport", "dtype", "op", "bytes", "tensors", "rounds", "samples", "batch",
    "buffers", "min_us", "p50_us", "p90_us", "p99_us", "algorithm_gb_s", "ratio", "ratio_to", "idle_ranks_cpu",
    "verified", "machine", "commit",
}  # fmt: skip


def processes_with(marker: str) -> list[str]:
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if marker.encode() in environ.read_bytes():
                found.append((environ.parent / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def bench(*words: object, status: int = 0, cwd: Path) -> tuple[list[dict[str, Any]], str]:
    """The records that were written, and all that was printed."""
    marker = f"BENCH_TEST_{uuid.uuid4().hex}"
    environ = {**os.environ, marker: "1", "PYTHONPATH": f"{PROGRAMS}{os.pathsep}{ROOT}", "TMPDIR": str(cwd)}
    json_file = cwd / "out.jsonl"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", *map(str, words), "--json", str(json_file)],
        cwd=cwd, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == status, done.stdout[-5000:]
    assert processes_with(marker) == []
    assert list(cwd.glob("kungfu-bench-*")) == []
    records = [json.loads(line) for line in json_file.read_text().splitlines()] if json_file.exists() else []
    return records, done.stdout


def peer(name: str) -> Any:
    missing = contenders.find(name).missing()
    return pytest.param(name, marks=pytest.mark.skipif(missing is not None, reason=f"{name}: {missing}"))


def names(records: Sequence[dict[str, Any]]) -> list[str]:
    return [r["contender"] for r in records]


def test_each_size_and_baseline_gets_a_verified_record(tmp_path: Path) -> None:
    records, text = bench(
        "all_reduce", "-np", "2", "--sizes", "4,96K,1M", *TINY, "--through", "native,python", "--vs", "memcpy",
        cwd=tmp_path,
    )  # fmt: skip
    assert names(records) == ["kungfu", "kungfu-python", "memcpy"] * 3
    assert [r["bytes"] for r in records[::3]] == [4, 96 << 10, 1 << 20]
    for r in records:
        assert set(r) >= KEYS
        assert r["verified"]
        assert 0 < r["min_us"] <= r["p50_us"] <= r["p99_us"]
        assert (r["ranks"], r["rounds"], r["samples"], r["ratio_to"]) == (2, 2, 4, "kungfu")
    assert [r["buffers"] > 1 for r in records[::3]] == [False, False, True]
    assert all(r["ratio"] == 1 for r in records[::3])
    assert "all_reduce, float32 sum, 2 ranks, 96 KiB" in text


@pytest.mark.timing
def test_ranks_that_are_not_measured_are_blocked_in_a_read(tmp_path: Path) -> None:
    # A wait that turns takes a core, 1.0; the clock's tick of 10 ms is 0.1 of each of these rounds at most.
    words = ["all_reduce", "-np", "2", "--sizes", "1M", "--rounds", "10", "--samples", "20", "--timeout", "100"]
    records, _ = bench(*words, "--vs", "memcpy", cwd=tmp_path)
    assert all(r["idle_ranks_cpu"] < 0.1 for r in records), records


ALL = "int8,uint64,float16,bfloat16,float64"


@pytest.mark.parametrize(
    ("ranks", "op", "dtypes"),
    [
        (3, "sum", ALL), (3, "mean", "int8,bfloat16"), (1, "prod", "float64"),
        *(long(ranks, op, ALL) for ranks in (1, 3) for op in ("min", "max", "mean", "prod")),
    ],
)  # fmt: skip
def test_dtypes_and_ops_are_verified(ranks: int, op: str, dtypes: str, tmp_path: Path) -> None:
    words = ["all_reduce", "-np", ranks, "--sizes", "8,300K", "--dtype", dtypes, "--op", op, *TINY]
    records, _ = bench(*words, cwd=tmp_path)
    assert len(records) == 2 * len(dtypes.split(","))
    assert all(r["verified"] and r["op"] == op for r in records)


def test_broadcast_from_another_root(tmp_path: Path) -> None:
    words = ["broadcast", "-np", "3", "--root", "2", "--sizes", "4,300K", "--through", "native,python", *TINY]
    records, _ = bench(*words, cwd=tmp_path)
    assert names(records) == ["kungfu", "kungfu-python"] * 2
    assert all(r["verified"] for r in records)


def test_gradients_are_one_operation(tmp_path: Path) -> None:
    records, _ = bench("gradients", "--models", "lenet", "--vs", "memcpy", *TINY, cwd=tmp_path)
    assert [(r["contender"], r["model"], r["tensors"], r["way"]) for r in records] == [
        ("kungfu", "lenet", 10, "flat"), ("memcpy", "lenet", 10, "each"),
    ]  # fmt: skip
    assert all(r["verified"] for r in records)


@pytest.mark.parametrize("name", [peer("mpi"), peer("gloo")])
def test_peers_are_measured_and_verified(name: str, tmp_path: Path) -> None:
    short = ("--rounds", "1", "--samples", "2", "--timeout", "100", "--vs", name)
    records, _ = bench("all_reduce", "--sizes", "4,300K", *short, cwd=tmp_path)
    assert names(records) == ["kungfu", name] * 2
    assert all(r["verified"] for r in records)
    records, _ = bench("gradients", "--models", "lenet", *short, cwd=tmp_path)
    ways = contenders.find(name).ways
    assert names(records) == ["kungfu", *(f"{name}, {way}" for way in ways)]
    assert all(r["verified"] for r in records)
    records, _ = bench("broadcast", "--sizes", "4,300K", "--root", "1", *short, cwd=tmp_path)
    assert all(r["verified"] for r in records)


@pytest.mark.parametrize("name", [peer("mpi"), peer("gloo")])
def test_operation_that_a_baseline_lacks_is_reported_and_others_continue(name: str, tmp_path: Path) -> None:
    records, text = bench("all_reduce", "--sizes", "4", "--op", "mean", "--vs", name, *TINY, cwd=tmp_path)
    assert names(records) == ["kungfu"]
    assert f"bench: {name}: " in text


def test_a_wrong_result_is_a_failure_that_says_where(tmp_path: Path) -> None:
    words = ["all_reduce", "--sizes", "64K", "--vs", "bench_contenders:OffByOne", *TINY]
    records, text = bench(*words, status=1, cwd=tmp_path)
    assert [r["verified"] for r in records] == [True, False]
    assert "rank 1, buffer set 0, tensor 0, element 16383: " in records[1]["wrong"]
    assert "WRONG RESULT" in text


@pytest.mark.parametrize(
    ("name", "says"),
    [("Dies", ["a rank has died", "rank 1 says goodbye"]), ("NeverReady", ["before it was ready", "no such hardware"])],
)
def test_broken_baseline_ends_the_run_with_its_log(name: str, says: list[str], tmp_path: Path) -> None:
    _, text = bench("all_reduce", "--sizes", "64K", "--vs", f"bench_contenders:{name}", *TINY, status=1, cwd=tmp_path)
    assert all(part in text for part in says)
    assert "Traceback" not in text.partition("bench:")[0]


def test_resize_measures_each_change(tmp_path: Path) -> None:
    records, _ = bench("resize", "--schedule", "1,2,1", "--rounds", "2", "--timeout", "100", cwd=tmp_path)
    assert [(r["contender"], r["samples"], r["verified"]) for r in records] == [
        ("1 -> 2", 2, True),
        ("2 -> 1", 2, True),
    ]
    for r in records:
        assert r["p50_us"] > 0
        assert r["resize_p50_us"] > 0


@pytest.mark.long
def test_a_step_costs_and_yields_the_same_with_both_optimizers(tmp_path: Path) -> None:
    pytest.importorskip("mindspore")
    records, _ = bench("step", "-np", "1,2", "--rounds", "1", "--samples", "2", "--timeout", "200", cwd=tmp_path)
    assert names(records) == ["KungFuMomentum", "nn.Momentum"] * 2
    assert all(r["verified"] and r["ratio_to"] == "nn.Momentum" for r in records)


def test_parts_of_a_step_add_up_to_the_step(tmp_path: Path) -> None:
    pytest.importorskip("mindspore")
    words = ["-np", "2", "--rounds", "1", "--samples", "12", "--timeout", "200"]
    (record,), text = bench("parts", *words, cwd=tmp_path)
    parts = ("MindSpore", "reduction", "agreement", "callback", "ledger", "data", "waiting")
    assert all(record[name] > 0 for name in parts)
    assert sum(record[name] for name in parts) == pytest.approx(1)
    assert record["first_step_s"] > record["step_s"]
    assert "lenet, graph mode, 32 samples a rank, 2 ranks, 1 round: step " in text


@pytest.mark.long
def test_samples_a_second_of_the_optimizers(tmp_path: Path) -> None:
    pytest.importorskip("mindspore")
    words = ["--networks", "lenet", "--rounds", "1", "--samples", "3", "--timeout", "200"]
    records, text = bench("optimizers", "-np", "2", *words, cwd=tmp_path)
    assert names(records) == ["nn.Momentum", "S-SGD", "SMA", "pair averaging"]
    for r in records:
        assert (r["verified"], r["ratio_to"], r["batch"]) == (True, "nn.Momentum", 32)
        assert r["samples_per_s"] == pytest.approx(2 * 32 / r["p50_us"] * 1e6, rel=1e-3)
        assert f"{r['contender']}: {r['samples_per_s']:g} samples/s of all workers" in text


@pytest.mark.long
def test_through_the_primitive(tmp_path: Path) -> None:
    pytest.importorskip("mindspore")
    words = ["--models", "lenet", "--through", "native,primitive,kernel", *TINY]
    records, _ = bench("gradients", *words, cwd=tmp_path)
    assert names(records) == ["kungfu", "kungfu-primitive", "kungfu-kernel"]
    assert all(r["verified"] for r in records)


@pytest.mark.long
def test_times_of_a_few_hosts_are_written_for_the_simulation(hosts, tmp_path):  # noqa: F811
    file = tmp_path / "few.jsonl"
    program = (sys.executable, "-m", "benchmarks", "simulate", "--measure", file)
    for slots in ({A: 1, B: 1}, {A: 1, B: 1, C: 1}):
        environments = {host: {"PYTHONPATH": str(ROOT)} for host in slots}
        hosts(program, "-np", len(slots), slots=slots, environments=environments).assert_exit(0)
    measured = read(file)
    assert [m.hosts for m in measured] == [2] * 7 + [3] * 7
    assert all(value >= 0 for value in vars(fit(measured)).values())
