"""What KungFu has for TensorFlow, under MindSpore: rank, size and barrier in a graph, consensus, variables, an
algorithm of one's own."""

from __future__ import annotations

import pytest

from tests.conftest import long


@pytest.mark.parametrize("mode", ["graph", long("pynative")])
def test_kungfus_calls_hold_in_graphs_and_over_resizes(run_workers, mode: str) -> None:
    assert run_workers("kungfus_calls.py", 2, mode, watch=True).count("fine") == 3
