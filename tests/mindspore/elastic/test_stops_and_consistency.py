"""What one worker decides or changes alone: all stop together, and what has to be equal is looked after."""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest

from ms_kungfu.elastic.consistency import PERIOD, ConsistencyCheck, Piece, check
from ms_kungfu.errors import DivergenceError
from ms_kungfu.trained.claims import content
from tests.mindspore.elastic.conftest import check_each


def check_stop(reports, what, step, np):
    """A stop that one worker asks for is everyone's."""
    ends = reports.of("end", what=what)
    assert [row["step"] for row in ends] == [step] * np
    assert len({row["weights"] for row in ends}) == 1
    # A later training call begins as ever, and the rest of the epoch is its own.
    assert [row["step"] for row in reports.of("again", what=what)] == [step + 5 - step % 5] * np


def check_by_design(reports, what, np):
    """What differs by design is no error."""
    ends = reports.of("end", what=what)
    assert [row["step"] for row in ends] == [125] * np
    assert len({row["weights"] for row in ends}) == (np if what == "sma" else 1)


def check_weight_at_the_end(reports, np):
    """When training ends all is compared: after ten steps, in which not every weight's turn comes."""
    assert not reports.of("end", what="weight")
    errors = [row["said"] for row in reports.of("error", what="weight")]
    assert len(errors) == np
    named = r"DivergenceError: .*step 10: the weight '0.weight' must be equal .* ranks 0, 2; rank 1"
    assert all(re.search(named, said) for said in errors), errors


def check_error(reports, what, named):
    """What one worker changes alone is an error that names it, and the program's end."""
    assert not reports.of("end", what=what)
    found = [match for line in reports.output.splitlines() if (match := re.search(rf"step (\d+): {named}", line))]
    assert found, reports.output[-3000:]
    # A weight that differs makes the others differ, too.
    assert all(int(match[1]) <= 3 + PERIOD for match in found)


RATE = r"the learning rate 'learning_rate' must be equal .* ranks 0, 2: 0.02\d*; rank 1: 0.5, and [0-9]+ more"
WEIGHT = r"the weight '0.weight' must be equal .* ranks 0, 2; rank 1\."


def test_change_by_one_worker_applies_to_all_or_is_an_error(run_elastic):
    """Four trainings, one after the other, on three workers."""
    cases = ["stop:after:25", "sma:after:25", "weight:after:2", "rate:after:25"]
    reports = run_elastic("apart.py", *cases, np=3, ledger=False, status=1)
    check_each(
        stop=lambda: check_stop(reports, "stop", 8, 3),
        sma=lambda: check_by_design(reports, "sma", 3),
        weight=lambda: check_weight_at_the_end(reports, 3),
        rate=lambda: check_error(reports, "rate", RATE),
    )


@pytest.mark.long
@pytest.mark.parametrize(
    ("what", "when", "step", "np"),
    [("stop", "before", 7, 3), ("epoch-stop", "before", 10, 3), ("epoch-stop", "after", 10, 2)],
)
def test_a_stop_that_one_worker_asks_for_is_everyones(run_elastic, what, when, step, np):
    check_stop(run_elastic("apart.py", f"{what}:{when}:25", np=np, ledger=False), what, step, np)


@pytest.mark.long
def test_a_weight_that_one_worker_changes_alone_is_an_error_that_names_it(run_elastic):
    check_error(run_elastic("apart.py", "weight:after:25", np=3, ledger=False, status=1), "weight", WEIGHT)


@pytest.mark.long
def test_equal_values_on_all_workers_are_no_error(run_elastic):
    check_by_design(run_elastic("apart.py", "nothing:after:25", np=2, ledger=False), "nothing", 2)


def test_each_piece_comes_once_in_a_period_and_large_ones_apart():
    looked_at = []
    pieces = [
        Piece(f"piece {i}", 10**6 if i < 5 else 8, numbers=lambda i=i: looked_at[-1].append(i)) for i in range(350)
    ]
    consistency = ConsistencyCheck(pieces)
    for step in range(7, 7 + PERIOD):
        looked_at.append([])
        consistency.word(step)
    assert sorted(i for due in looked_at for i in due) == list(range(350))
    assert max(map(len, looked_at)) <= 4
    assert all(len(set(range(5)) & set(due)) <= 1 for due in looked_at), "large ones not together"


def test_divergence_error_names_ranks_and_their_values():
    told = {rank: {"the loss scale": (rank // 2, str(1024 >> rank // 2))} for rank in range(5)}
    with pytest.raises(
        DivergenceError, match="step 9: the loss scale .* ranks 0, 1: 1024; ranks 2, 3: 512; rank 4: 256"
    ):
        check(9, told)
    check(9, {rank: {"a": (1, "")} for rank in (1, 2)})


@pytest.mark.parametrize("count", [1, 3, 255, 256, 70_000])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int8])
def test_content_is_another_one_where_any_bits_are(count, dtype):
    rng = np.random.default_rng(count)
    values = rng.integers(0, 100, count).astype(dtype)
    own = content([ms.Tensor(values)])
    assert own == content([ms.Tensor(values.copy())]) < 1 << 63
    bits = values.view(np.uint8)
    for _ in range(200):
        there = bits.copy()
        a, b = rng.integers(0, bits.size, 2)
        there[a] += 1
        if a != b:
            there[b] -= 1  # which a sum over all can't tell
        assert content([ms.Tensor(there.view(dtype))]) != own
    if count > 3:
        assert content([ms.Tensor(np.roll(values, 1))]) != own
