"""The pure parts of the bench of shards."""

from __future__ import annotations

import doctest
from typing import Any

import pytest

from benchmarks import __main__ as cli
from benchmarks import report, shards
from benchmarks.shards import Run, summary


def test_the_examples_of_ratio_table_and_efficiency_hold() -> None:
    assert doctest.testmod(shards) == (0, 3)


def rows(longest: float, steps: int = 12) -> list[tuple[int, float, float, float]]:
    """Steps of 10 ms, of which the first is long because it compiles, and the 8th takes `longest` seconds."""
    found, now = [], 0.0
    for number in range(1, steps + 1):
        took = 0.9 if number == 1 else longest if number == 8 else 0.01
        found.append((number, now, now, now + took))
        now += took
    return found


def lines(pid: int, at_the_end: int = 3, digest: str = "aa", before: int = 3) -> list[dict[str, Any]]:
    return [
        {"pid": pid, "step": 0, "compiled": 0},
        {"pid": pid, "step": 5, "compiled": before},
        {"pid": pid, "step": 10, "compiled": at_the_end},
        {"pid": pid, "step": -1, "compiled": at_the_end, "digest": digest},
    ]


def test_longest_step_after_the_first_epoch_counts_at_remaining_workers() -> None:
    steps = {1: rows(0.1), 2: rows(0.2), 3: rows(0.7, 8)}  # 3 was killed
    found = summary(steps, [*lines(1), *lines(2, 4), *lines(3)[:2]], [1, 2], 5)
    assert (round(found.longest_ms), found.at_step, found.compiled, found.compiled_before) == (200, 8, 1, 3)
    assert round(found.medians) == 20
    assert found.limit_ms == 150
    assert Run(20.0, 200.0, 8, 0, 3, "aa").limit_ms == 240


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ([*lines(1), *lines(2, digest="bb")], r"differ between workers: \['aa', 'bb'\]"),
        ([*lines(1), *lines(2)[:3]], "has not come to the end"),
        ([*lines(1, before=0, at_the_end=0), *lines(2)], "nothing was compiled in the first epoch"),
    ],
)
def test_wrong_run_of_the_shards_bench_is_refused_with_the_reason(told: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        summary({1: rows(0.1), 2: rows(0.1)}, told, [1, 2], 5)


def struck(runs: list[Run], capsys: pytest.CaptureFixture[str], wrong: list[str] | None = None) -> tuple[Any, str]:
    out = report.Report()
    shards._struck("kill", 4, runs, 2, wrong or [], out)
    return out.records[0], capsys.readouterr().out


def test_runs_are_judged_by_the_worst_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    record, said = struck([Run(10.0, 60.0, 70, 0, 3, "aa"), Run(10.0, 151.0, 80, 2, 3, "aa")], capsys)
    assert (record["worst_ms"], record["within_limit"], record["compiled"], record["verified"]) == (151, 1, 2, True)
    assert "at worst 151.0 ms = 15.1 medians (limit 150, EXCEEDED, 1 within it)" in said
    record, said = struck([Run(10.0, 60.0, 70, 0, 3, "aa")], capsys, ["run 2: killed"])
    assert not record["verified"]
    assert "EXCEEDED" not in said
    assert "WRONG: run 2: killed" in said
    record, said = struck([], capsys)
    assert not record["verified"]


def test_a_run_with_other_bits_than_one_worker_is_wrong() -> None:
    expected = Run(10.0, 10.0, 9, 0, 3, "aa")

    def attempt(rng: Any) -> Run:
        if rng.random() < 0.5:
            raise ValueError("lost")
        return Run(10.0, 10.0, 9, 0, 3, "bb")

    runs, wrong = shards._tried(range(20), attempt, expected)
    assert 0 < len(runs) < 20
    assert len(wrong) == 20
    assert {text.partition(": ")[2] for text in wrong} == {"lost", "the parameters are bb, one worker's aa"}


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--part", "speed"], "no part 'speed'; there are cost, table, straggler, kill, grow, kill-plain, grow-plain"),
     (["--networks", "vgg"], "no network 'vgg'; there are lenet, resnet, transformer, resnet50, transformer2")],
)  # fmt: skip
def test_bad_input_is_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["shards", *words]) == 2
    assert capsys.readouterr().err == f"bench: {said}\n"


def test_a_wrong_result_is_an_exit_status_of_1(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(options: Any, out: report.Report) -> None:
        asked.append((options.ranks, options.part, options.rounds, options.count))
        out.records.append(shards._record("cost", "lenet", 2, "other bits" if len(asked) > 1 else None))

    monkeypatch.setattr(shards, "run", run)
    assert [cli.main(["shards"]), cli.main(["shards", "-np", "3", "--part", "kill"])] == [0, 1]
    assert asked == [([2, 4], list(shards.PARTS), 5, 20), ([3], ["kill"], 5, 20)]
