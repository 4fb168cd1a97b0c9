"""The parts of `benchmarks.churn` that need no process: the schedule, the tally, the timeline, table and caption."""

from __future__ import annotations

import doctest
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.churn import __main__ as cli
from benchmarks.churn import cost, measure, peers, samples, schedule, table, worker
from benchmarks.churn.measure import Observed, Timeline, numbers, recoveries, timeline
from benchmarks.churn.samples import EXTRA, counted, marks, read
from benchmarks.churn.schedule import events
from benchmarks.churn.worker import ROW, Plan, Worker


@pytest.mark.parametrize(("module", "count"), [(cost, 1), (measure, 2), (peers, 1), (samples, 1), (schedule, 2)])
def test_examples_of_the_churn_bench_hold(module: Any, count: int) -> None:
    failed, tried = doctest.testmod(module)
    assert failed == 0
    assert tried >= count


# -- the schedule --


def test_schedule_of_a_seed_is_the_same_each_time() -> None:
    first = events("kill", 5, 300, 7)
    assert first == events("kill", 5.0, 300, 7)
    assert first != events("kill", 5, 300, 8)
    # Of this seed for ever: results of different days have the same victims at the same times.
    assert [(round(event.at, 3), round(event.draw, 3)) for event in first[:2]] == [(5.347, 0.533), (9.547, 0.146)]


@pytest.mark.parametrize("every", [30.0, 10.0, 5.0, 1.0])
def test_schedule_kills_once_an_interval_and_any_rank(every: float) -> None:
    found = events("kill", every, 300, 1)
    assert len(found) in (int(300 / every), int(300 / every) - 1)
    assert all(abs(event.at - (i + 1) * every) <= every / 10 for i, event in enumerate(found))
    if every <= 5:
        assert {schedule.victim(range(4), event.draw) for event in found} == {0, 1, 2, 3}


def test_schedule_of_hosts_brings_each_host_back() -> None:
    assert [event.action for event in events("host", 60, 170, 1)] == ["host", "host-back"] * 2
    assert [event.size for event in events("resize", 20, 90, 1)] == [2, 4, 2, 4]


# -- the tally --


def trained(steps: list[list[list[int]]], total: int = 8) -> Any:
    """The tally after steps, each with the samples of its workers; the mean is weighted by samples, or it isn't."""
    tally = np.zeros(total + EXTRA)
    for weighted in (True, False):
        own = np.zeros_like(tally)
        for step in steps:
            each = [marks(total, np.array(chosen), slot, False) for slot, chosen in enumerate(step)]
            weights = [len(chosen) for chosen in step] if weighted else None
            own += counted(np.average(each, axis=0, weights=weights))
        if weighted:
            tally = own
    return tally, own


def test_tally_counts_each_sample_once_at_any_number_of_workers() -> None:
    weighted, _ = trained([[[0, 1, 2], [3, 4, 5]], [[6]], [[7]]])
    np.testing.assert_allclose(weighted[:8], 1, rtol=1e-6)
    assert read(weighted[:8], 1) == samples.Trained(8, 0, 0)
    # torch's mean isn't weighted, and its workers have as many samples each
    _, plain = trained([[[0, 1], [2, 3], [4, 5]], [[6, 7]]])
    assert read(plain[:8], 1) == samples.Trained(8, 0, 0)


def test_tally_finds_a_lost_sample_and_a_doubled_one() -> None:
    weighted, _ = trained([[[0, 1, 2], [3, 4, 4]], [[6, 7]]])  # 5 is lost, 4 twice in one step
    assert read(weighted[:8], 1) == samples.Trained(useful=7, lost=1, twice=1)
    weighted, _ = trained([[[0, 1], [2, 3]], [[2, 3], [4, 5]]])  # a step's share again in the next one
    assert read(weighted[:8], 1) == samples.Trained(useful=6, lost=2, twice=2)
    weighted, _ = trained([[[0, 1], [0, 1]]], total=2)  # two workers with the same samples
    assert read(weighted[:2], 1) == samples.Trained(useful=2, lost=0, twice=2)


def test_tally_that_is_no_whole_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"sample 1 was trained 0\.500 times"):
        read(np.array([1.0, 0.5]), 1)


def test_tally_carries_the_word_to_stop() -> None:
    each = [marks(4, np.array([0, 1]), 0, False), marks(4, np.array([2, 3]), 1, True)]
    assert counted(np.mean(each, axis=0))[-1] > 0
    assert counted(each[0].copy())[-1] == 0


# -- a run --


def rows(*times: float, first: int = 32) -> list[tuple[float, int]]:
    return [(time, first + 32 * number) for number, time in enumerate(times)]


def test_timeline_leaves_out_steps_that_a_restart_repeats() -> None:
    found = timeline({1: rows(1, 2, 3), 2: rows(1.1, 2.1, 3.1), 3: rows(9, 10, 11, first=64)})
    assert found.positions == (32, 32, 64, 64, 64, 96, 128)
    assert (found.at(5), found.at(9.5), found.at(10.5)) == (64, 64, 96)


def test_recovery_ends_with_a_step_that_began_after_the_kill() -> None:
    # Steps end at 1, 2, ...; the one that ends at 3 was in progress at the kill, the next one lasts until 7.
    assert recoveries(timeline({1: rows(1, 2, 3, 7, 8)}), [2.5], 20) == [4.5]
    # A restart repeats the steps since its checkpoint first: 96 was reached, 128 and 160 are new.
    restarted = timeline({1: rows(1, 2, 3), 2: rows(9, 10, 11, 12, first=64)})
    assert recoveries(restarted, [3.5], 20) == [pytest.approx(7.5)]
    assert recoveries(Timeline((1.0,), (32,)), [2.5], 20) == [17.5]  # never


def run_folder(folder: Path, tally: Any, epochs: float, times: list[float]) -> None:
    plan = Plan(str(folder), "lenet", 1, 1, "python")
    own = Worker(plan)
    full = np.zeros(own.workload.total + EXTRA, np.float32)
    full[: len(tally)] = tally
    own.end(full, [np.ones(3, np.float32)], epochs, 0.5)
    (folder / "steps" / f"{os.getpid()}.rows").write_bytes(b"".join(ROW.pack(*row) for row in rows(*times)))
    (folder / "usage.json").write_text('{"cpu_s": 2.0}')


def test_numbers_of_a_run_follow_from_its_files(tmp_path: Path) -> None:
    run_folder(tmp_path, np.ones(128), 0.5, [1.0, 2.0, 3.0, 4.0])
    found = numbers(tmp_path, Observed(1.5, 3.5, (1.9,), True, (2**20, 3 * 2**20)))
    assert (found["useful"], found["rate"], found["kills"]) == (64, 32.0, 1)
    assert found["next_step_p50_s"] == pytest.approx(1.1)
    assert (found["lost"], found["twice"], found["equal_weights"], found["accuracy"]) == (0, 0, True, 0.5)
    assert (found["cpu_ms_per_sample"], found["memory_mib"]) == (15.625, 2)
    assert (found["hung"], found["wrong"]) == (False, "")


def test_samples_that_were_trained_twice_are_useful_once(tmp_path: Path) -> None:
    run_folder(tmp_path, np.full(64, 2.0), 1, [1.0, 2.0, 3.0, 4.0])  # 128 in the weights, 64 of them again
    found = numbers(tmp_path, Observed(0.0, 4.0, (), True, ()))
    assert (found["useful"], found["twice"], found["lost"]) == (64, 64, 2048 - 64)


def test_run_without_an_end_is_wrong_and_makes_nothing_more(tmp_path: Path) -> None:
    (tmp_path / "steps").mkdir()
    (tmp_path / "steps" / "1.rows").write_bytes(b"".join(ROW.pack(*row) for row in rows(1.0, 2.0)))
    found = numbers(tmp_path, Observed(0.0, 10.0, (2.5,), False, ()))
    assert (found["rate"], found["hung"], found["wrong"]) == (6.4, True, "no worker came to its end")
    assert found["next_step_p50_s"] == 7.5
    assert dict(worker.read_steps(tmp_path)) == {1: rows(1.0, 2.0)}


# -- table and caption --


def row(system: str, scenario: str, rate: float, **more: Any) -> dict[str, Any]:
    return {
        "system": system, "workload": "lenet", "scenario": scenario, "every": 10.0 if scenario == "kill" else 0.0,
        "rate": rate, "switches": "", "hung": False, "wrong": "", "lost": 0, "twice": 0, "equal_weights": True,
        "next_step_p50_s": 0.1 if scenario == "kill" else None, "next_step_p99_s": 0.2, "accuracy": 0.9,
        "cpu_ms_per_sample": 3.0, "memory_mib": 900, "machine": "2 cores", "commit": "c", "date": "d", **more,
    }  # fmt: skip


def found(tmp_path: Path, *more: dict[str, Any]) -> list[table.Cell]:
    """The cells, by way of a CSV file."""
    path = tmp_path / "churn.csv"
    for each in [row("ms_kungfu", "none", 100), row("torchrun", "none", 300), *more]:
        table.append(path, each)
    return [cell for cell in table.cells(table.read(path)) if cell.scenario == "kill"]


def test_goodput_is_over_the_own_rate_and_the_median_of_runs(tmp_path: Path) -> None:
    ours, theirs = found(
        tmp_path, row("ms_kungfu", "kill", 90), row("ms_kungfu", "kill", 98), row("torchrun", "kill", 150),
        row("ms_kungfu", "kill", 1, switches="search"),
    )  # fmt: skip
    assert (ours.goodput, ours.runs, theirs.goodput) == (pytest.approx(0.94), 2, pytest.approx(0.5))
    text = table.markdown([ours, theirs], {"Elastic Horovod": "C++17 is required"})
    assert "| ms_kungfu | 0.94 | 94 | 0.10 s | 0.20 s | 0 | 0 | yes | 0.90 | 3.0 | 900 |" in text
    assert "| Elastic Horovod: not installed | - |" in text
    assert text.endswith("Elastic Horovod can't be installed: `C++17 is required`.\n")


def test_caption_names_each_column_in_which_a_peer_is_better(tmp_path: Path) -> None:
    cells = found(
        tmp_path, row("ms_kungfu", "kill", 94), row("torchrun", "kill", 297, memory_mib=600, next_step_p50_s=0.1001),
        row("msrun", "kill", 1, lost=3, next_step_p50_s=0.01, hung=True),
    )  # fmt: skip
    assert table.caption(cells) == (
        "ms_kungfu misses its target: goodput 0.94, 0.96 wanted. "
        "Goodput: better than ms_kungfu (0.94): torchrun (0.99). "
        "Useful samples a second: better than ms_kungfu (94): torchrun (297). "
        "Memory: better than ms_kungfu (900): torchrun (600)."
    )


def test_caption_without_a_better_peer_says_so(tmp_path: Path) -> None:
    cells = found(tmp_path, row("ms_kungfu", "kill", 99), row("torchrun", "kill", 90, accuracy=0.8, twice=4))
    assert table.caption(cells) == "No peer is better than ms_kungfu in any column."
    assert table.caption(cells[1:]) == "ms_kungfu has no run here."


def test_cell_of_runs_that_differ_in_their_check_has_the_worse_one(tmp_path: Path) -> None:
    (ours,) = found(
        tmp_path, row("ms_kungfu", "kill", 99, lost=1), row("ms_kungfu", "kill", 99, equal_weights=False),
    )  # fmt: skip
    assert (ours.lost, ours.equal_weights) == (1, False)
    (ours,) = found(tmp_path, row("ms_kungfu", "kill", 99, lost=None, hung=True, wrong="no worker came to its end"))
    assert (ours.lost, ours.hung, ours.wrong) == (None, 1, "no worker came to its end")


def test_price_of_a_part_is_the_ratio_within_rounds() -> None:
    rates = {("lenet", 2): {cost.BASE: [100.0, 50.0], "ms_kungfu": [80.0, 40.0], "torchrun (DDP)": [500.0]}}
    text = cost.markdown(rates)
    assert "| ms_kungfu | 60/s, 1.250 |" in text
    assert "| torchrun (DDP) | 500/s |" in text


def test_unknown_system_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--systems", "ms_kungfu,slurm"]) == 2
    assert "--systems slurm: there are ms_kungfu, ms_kungfu without shards, " in capsys.readouterr().err
