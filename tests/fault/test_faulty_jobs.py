"""Faults that happen to real processes, as scripts say; see `scripts` and `programs.faults`.

Random ones: ``python -m tests.campaigns faults``; one of them: ``faults --count 1 --seed SEED``.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import replace

import pytest

from tests.campaigns import jobs
from tests.campaigns.scripts import Script, Scripts, script_of
from tests.conftest import long
from tests.fault.programs.faults import (
    COLLECTIVE_PLACES,
    PLACES_BETWEEN_HOSTS,
    PLACES_OF_A_LINK,
    PLACES_OF_SHARDS,
    RARE_PLACES,
    Fault,
    parse,
    to_text,
)
from tests.multiprocess.launching import ROOT

pytestmark = pytest.mark.timeout(600)

SCRIPTS = {
    "deaths in an operation, in its redo, and of the replacement": Script(
        parse(
            """kill rank=1 step=10 place=after_the_post:2; kill rank=2 step=10 place=before_the_next_generation
            kill newcomer=0 place=sharing; kill newcomer=1 place=before_the_others_have_come"""
        )
    ),
    "deaths between the groups of a step in the background": Script(
        parse("kill rank=0 step=20 place=before_it_leaves; kill rank=2 from=20 place=adopting"),
        size=4,
        manner="background",
    ),
    "a member, and a newcomer that has hardly begun, are stopped": Script(
        parse("stop rank=0 step=10 place=before_the_post:2; stop newcomer=0 place=imported"), size=2
    ),
    "moments of waiting change nothing": Script(
        parse(
            """slow rank=0 step=5 place=after_a_staging_buffer_is_bound seconds=0.2; resize step=10 size=3
            slow newcomer=0 place=parked seconds=0.3; stop rank=1 step=20 place=after_the_post seconds=0.3"""
        ),
        size=2,
        recover="shrink",
    ),
    "refused connections and lost answers": Script(
        parse(
            """refuse rank=0 step=5 place=config; refuse rank=0 step=5 place=config_answer; resize step=6 size=4
            refuse rank=2 step=8 place=broker_answer; refuse newcomer=0 place=broker"""
        )
    ),
    "a worker that leaves and one that is evicted": Script(
        parse("leave rank=0 step=10; evict rank=1 step=30; kill rank=0 step=70 place=recorded"), size=4, standbys=1
    ),
}


def broken_by(script: Script) -> tuple[list[int], list[str]]:
    """Which lines happened, and what was broken then."""
    campaign = Scripts.made()
    fired = campaign.try_script(script)
    for text in campaign.tally.broken:
        shutil.rmtree(text.rpartition("is in ")[2].rstrip(")"))
    return fired, campaign.tally.broken


@pytest.mark.parametrize("name", [long(n) if n.startswith("refused") else n for n in SCRIPTS])
def test_survivors_go_on_in_the_same_processes(name: str) -> None:
    assert broken_by(SCRIPTS[name]) == ([*range(len(SCRIPTS[name].faults))], [])


def test_a_promise_that_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    dies = Script(parse("kill rank=1 step=3 place=begin"), size=2, steps=10, recover="fail")
    assert "exit status 137" in broken_by(dies)[1][0]
    survived = replace(dies, recover="shrink")
    with monkeypatch.context() as patch:
        patch.setattr(Fault, "ends", False)
        assert "are gone, and nothing was done to them" in broken_by(survived)[1][0]
    monkeypatch.setattr(jobs, "weight_of", lambda ledger: (10, 0.5, 0.0))
    assert "it is 0.5" in broken_by(survived)[1][0]


def test_a_script_is_read_as_it_is_written() -> None:
    scripts = [script_of(seed) for seed in range(300)]
    for script in scripts:
        assert parse(to_text(script.faults)) == script.faults
    assert {fault.kind for script in scripts for fault in script.faults} == {
        "kill", "stop", "slow", "refuse", "resize", "leave", "evict"
    }  # fmt: skip
    for text, wrong in (
        ("kill rank=1 step=2 place=nowhere", "kill has no place 'nowhere'"),
        ("kill rank=1 place=begin", "kill needs rank and step, or newcomer"),
        ("hang rank=1 step=2", "no fault is called 'hang'"),
        ("kill rank=1 step=2 when=3 place=begin", "'when' means nothing"),
        ("slow rank=1 step=2 place=begin", "slow needs seconds"),
    ):
        with pytest.raises(ValueError, match=wrong):
            parse(text)


def test_the_places_of_the_collectives_are_those_that_are_marked() -> None:
    marked = {
        place.replace(" ", "_")
        for kind in ("*.cc", "*.h")
        for path in (ROOT / "ops_src").rglob(kind)
        for place in re.findall(r'KUNGFU_FAULT_POINT\("([^"]+)"\)', path.read_text())
    }
    lists = (COLLECTIVE_PLACES, RARE_PLACES, PLACES_OF_SHARDS, PLACES_BETWEEN_HOSTS, PLACES_OF_A_LINK)
    assert sorted(place for each in lists for place in each) == sorted(marked)
