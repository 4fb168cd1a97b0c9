"""What one worker decides or changes alone: all stop together, and what has to be equal is looked after."""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest

from ms_kungfu.elastic.sameness import PERIOD, Piece, Sameness, check
from ms_kungfu.errors import DivergenceError
from ms_kungfu.trained.claims import content
from tests.conftest import long


@pytest.mark.parametrize(
    ("what", "when", "step", "np"),
    [
        long("stop", "before", 7, 3),
        ("stop", "after", 8, 2),
        long("epoch-stop", "before", 10, 3),
        long("epoch-stop", "after", 10, 2),
    ],
)
def test_a_stop_that_one_worker_asks_for_is_everyones(run_elastic, what, when, step, np):
    reports = run_elastic("apart.py", what, when, np=np, ledger=False)
    assert [row["step"] for row in reports.of("end")] == [step] * np
    assert len({row["weights"] for row in reports.of("end")}) == 1
    # A later call of training begins as ever, and the rest of the epoch is its own.
    assert [row["step"] for row in reports.of("again")] == [step + 5 - step % 5] * np


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ("rate", r"the learning rate 'learning_rate' has to be equal .* ranks 0, 2: 0.02\d*; rank 1: 0.5, and so do"),
        long("weight", r"the weight '0.weight' has to be equal .* ranks 0, 2; rank 1\."),
    ],
)
def test_what_one_worker_changes_alone_is_an_error_that_names_it(run_elastic, what, named):
    reports = run_elastic("apart.py", what, "after", np=3, ledger=False, status=1)
    assert not reports.of("end")
    found = [match for line in reports.output.splitlines() if (match := re.search(rf"step (\d+): {named}", line))]
    assert found, reports.output[-3000:]
    # A weight that differs makes the others differ, too.
    assert all(int(match[1]) <= 3 + PERIOD for match in found)


def test_when_training_ends_all_is_compared(run_elastic):
    """Ten steps, in which not every weight's turn comes."""
    reports = run_elastic("apart.py", "weight", "after", "2", np=2, ledger=False, status=1)
    assert not reports.of("end")
    assert re.search(r"step 10: the weight '0.weight' has to be equal .* rank 0; rank 1", reports.output)


@pytest.mark.parametrize("what", [long("nothing"), "sma"])
def test_what_differs_by_design_is_no_error(run_elastic, what):
    reports = run_elastic("apart.py", what, "after", np=2, ledger=False)
    ends = reports.of("end")
    assert [row["step"] for row in ends] == [125] * 2
    assert len({row["weights"] for row in ends}) == (2 if what == "sma" else 1)


def test_each_piece_comes_once_in_a_period_and_large_ones_apart():
    looked_at = []
    pieces = [
        Piece(f"piece {i}", 10**6 if i < 5 else 8, numbers=lambda i=i: looked_at[-1].append(i)) for i in range(350)
    ]
    sameness = Sameness(pieces)
    for step in range(7, 7 + PERIOD):
        looked_at.append([])
        sameness.word(step)
    assert sorted(i for due in looked_at for i in due) == list(range(350))
    assert max(map(len, looked_at)) <= 4
    assert all(len(set(range(5)) & set(due)) <= 1 for due in looked_at), "large ones not together"


def test_who_has_what_is_said():
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
