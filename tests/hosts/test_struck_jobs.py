"""A sample of the campaigns `host-kills` and `host-losses`: workers and hosts of a job are killed, cut off, paused."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.campaigns import driver, host_kills, host_losses, jobs
from tests.conftest import long

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("network")]  # which skips where there can't be hosts
SEED = 1  # others: python -m tests.campaigns host-kills, host-losses


@pytest.mark.parametrize("weights", [host_kills.LENET, long(host_kills.IN_SLICES)])
def test_workers_die_one_after_another_and_the_others_go_on(weights: int) -> None:
    campaign = host_kills.HostKills.made()
    campaign.lose_workers(random.Random(SEED), weights, 3)
    assert campaign.tally.broken == []
    assert campaign.tally.struck >= 3


def test_hosts_are_lost_one_after_another_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_losses, "PAUSE_S", host_losses.SHORT_TIMEOUT_S + 2)
    tally = driver.run(host_losses.HostLosses.made(), 2, SEED)
    assert tally.broken == []
    assert tally.struck >= 2


@pytest.mark.long
def test_broken_promise_of_a_struck_job_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "weight_of", lambda ledger: (1, 0.5, 0.0))
    (text,) = driver.run(host_kills.HostKills.made(), 1, SEED).broken
    assert "by the ledger's 1 it is 0.5" in text
    kept = Path(text.rpartition("is in ")[2].rstrip(")"))
    assert {"output", "events.jsonl", "host0"} <= {path.name for path in kept.iterdir()}
    shutil.rmtree(kept)
