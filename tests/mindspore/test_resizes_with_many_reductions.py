"""Joiners beside veterans, with the per-tensor all-reduces of older programs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("programs") / "map_resizes.py"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_resizes_with_a_map_of_all_reduces_neither_hang_nor_sum_wrongly(run_program, everything) -> None:
    pytest.importorskip("mindspore", reason="MindSpore is not installed")
    sizes = list(itertools.islice(itertools.cycle([2, 1, 3, 2, 4, 1, 2, 3, 1]), 50 if everything else 6))
    output = run_program(PROGRAM, *sizes, np=1, watch=True, timeout_s=550)
    assert output.count("finished") == sizes[-1]
    assert output.count("left") == sum(max(0, a - b) for a, b in zip([1, *sizes], sizes))
