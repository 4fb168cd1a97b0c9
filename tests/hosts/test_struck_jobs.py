"""A sample of `kills` and `losses`: random workers and hosts of a job are killed, cut off, paused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.conftest import long
from tests.hosts import kills, losses, struck_job

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("network")]  # which skips where there can't be hosts
SEED = 1  # others: python -m tests.campaigns host-kills, host-losses


@pytest.mark.parametrize("weights", [struck_job.LENET, long(struck_job.IN_SLICES)])
def test_workers_die_one_after_another_and_the_others_go_on(weights: int) -> None:
    counts = kills.Counts()
    kills.try_job(random.Random(SEED), weights, 3, counts)
    assert counts.broken == []
    assert counts.killed >= 3


def test_hosts_are_lost_one_after_another_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "PAUSE_S", losses.SHORT_TIMEOUT_S + 2)
    counts = losses.run(2, SEED)
    assert counts.broken == []
    assert counts.lost >= 2


@pytest.mark.long
def test_what_is_broken_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(struck_job, "weight_of", lambda ledger: (1, 0.5, 0.0))
    counts = kills.run(1, SEED)
    (text,) = counts.broken
    assert "by the ledger's 1 it is 0.5" in text
    kept = Path(text.rpartition("is in ")[2].rstrip(")"))
    assert {"output", "members.jsonl", "host0"} <= {path.name for path in kept.iterdir()}
    shutil.rmtree(kept)
