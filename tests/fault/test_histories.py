"""Histories of a cluster that trains MindSpore's networks in shards have the bits of one worker, and these are
the bits of MindSpore alone.

Random ones: ``python -m tests.campaigns histories``.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from ms_kungfu.dataset import audit
from tests.campaigns import histories
from tests.campaigns.histories import Histories, History, Plan, Stroke, history_of, outcome, plans_of, undisturbed
from tests.campaigns.jobs import BrokenError, check
from tests.conftest import long
from tests.fault.programs.training import AFTER

PLAIN = Path(__file__).with_name("programs") / "plain.py"
pytestmark = pytest.mark.timeout(900)
needs_mindspore = pytest.mark.skipif(find_spec("mindspore") is None, reason="MindSpore is not installed")

# The lowest rank and another one at a time, in a sum over all; a death behind the last shard; a stop, a slow worker;
# growing behind a death, and shrinking.
SCRIPT = Plan(
    "lenet",
    "graph",
    "shrink",
    (
        History(
            0, 3, ((6, 2),),
            (
                Stroke("slow", 1, 2, seconds=0.01), Stroke("kill", 3, 0, shard=1),
                Stroke("kill", 3, 2, shard=1, after_ms=3.0), Stroke("stop", 8, 1, after_ms=2.0, seconds=0.2),
            ),
        ),
        History(1, 2, ((9, 1),), (Stroke("kill", 1, 1, shard=7), Stroke("kill", 12, 0))),
    ),
)  # fmt: skip


@needs_mindspore
@pytest.mark.long
def test_a_job_that_is_struck_has_the_bits_of_one_worker() -> None:
    campaign = Histories.made()
    found, alone = campaign.run(SCRIPT), campaign.run(undisturbed("lenet", "graph", 2))
    assert found is not None, campaign.tally.broken
    assert alone is not None, campaign.tally.broken
    assert found.sha256 == alone.sha256
    assert len(set(alone.sha256)) == 2
    # The last worker is never killed: the second history's last one isn't struck down.
    assert found.happened == [list(SCRIPT.histories[0].strokes), [SCRIPT.histories[1].strokes[0]]]
    assert [found.sizes[0][step] for step in (1, 3, 7)] == [3, 3, 2]
    assert [found.sizes[1][step] for step in (1, 10)] == [2, 1]


@needs_mindspore
@pytest.mark.parametrize("kind", ["lenet", long("resnet-without-dropout")])
def test_shards_have_the_bits_of_mindspore_alone(kind: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, PLAIN, kind, "graph"],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    two = Plan(kind, "graph", "shrink", (History(0, 2, (), ()),))
    campaign = Histories.made()
    found = campaign.run(two)
    assert found is not None, campaign.tally.broken
    assert found.sha256 == done.stdout.split()[-1:]


def test_a_seed_is_a_history_of_its_own_and_of_every_kind_there_are_some() -> None:
    drawn = [history_of(seed) for seed in range(400)]
    assert drawn == [history_of(seed) for seed in range(400)]
    evidence = sum(count for _, _, count in histories.EVIDENCE)
    assert len({replace(history, seed=0) for history in drawn[:evidence]}) == evidence == 200
    assert {history.size for history in drawn} == {1, 2, 3, 4, 7}
    strokes = [stroke for history in drawn for stroke in history.strokes]
    assert {(stroke.kind, stroke.ends) for stroke in strokes} == {
        ("kill", True), ("stop", True), ("stop", False), ("slow", False)
    }  # fmt: skip
    assert {bool(stroke.after_ms) for stroke in strokes if stroke.kind == "kill"} == {True, False}
    grown = [
        after > before for h in drawn for before, (_, after) in zip((h.size, *(n for _, n in h.changes)), h.changes)
    ]
    assert {True, False} == set(grown)
    for history in drawn:
        assert history.changes or history.size > 1
        assert all(1 <= step < histories.STEPS for step, _ in history.changes)


def test_a_job_has_the_histories_of_its_seeds_one_after_the_other() -> None:
    jobs = plans_of("lenet", "graph", 7, 12)
    assert [history.seed for job in jobs for history in job.histories] == list(range(7, 19))
    assert [len(job.histories) for job in jobs] == [5, 5, 2]
    assert {job.recover for job in plans_of("lenet", "graph", 0, 100)} == {"shrink", "replace"}
    job = Plan("lenet", "graph", "shrink", (History(0, 2, ((3, 4),), ()), History(1, 3, ((11, 1),), ())))
    assert job.sizes() == {3: 4, 12: 3, 23: 1}


DIES = Plan("lenet", "graph", "shrink", (History(0, 2, (), (Stroke("kill", 1, 1), Stroke("kill", 2, 0))),))
LINES = [
    {"event": "member", "pid": 11, "step": 0}, {"event": "member", "pid": 12, "step": 0},
    {"event": "history", "pid": 11, "number": 0, "sha256": "aa", "sizes": {"1": 2}},
    {"event": "end", "pid": 11, "step": 12, "digest": "aa"},
]  # fmt: skip


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the workers 11 and 12 leave, with `LINES`, of a job of one history in which 12 dies."""
    (tmp_path / "fired.0.0").write_text("12")
    tell_of_steps(monkeypatch, histories.STEPS)
    return tmp_path


def tell_of_steps(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    monkeypatch.setattr(audit, "read", lambda folder: ({},))
    epoch = audit.Epoch(0, 0, steps, 100, True, 100)
    monkeypatch.setattr(audit, "audit", lambda files: audit.Report(2, 1, [epoch], [], []))


def test_outcome_of_histories_is_reported(left: Path) -> None:
    found = outcome(DIES, left, LINES)
    assert found == histories.Outcome(["aa"], [{1: 2}], [[DIES.histories[0].strokes[0]]])
    assert histories.compare(found, replace(found, sha256=["aa"]), DIES) == []
    (said,) = histories.compare(found, replace(found, sha256=["bb"]), DIES)
    assert "history 0 ended with aa, one worker with bb" in said
    assert check(left, LINES, {12}).exact


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"event": "history", "pid": 12, "number": 0, "sha256": "bb", "sizes": {}}, r"ends with \['aa', 'bb'\]"),
        ({"event": "member", "pid": 13}, r"workers \[13\] are gone, and nothing was done to them"),
        ({"event": "end", "pid": 12, "step": 12, "digest": "bb"}, "they differ at the end"),
        ({"event": "end", "pid": 12, "step": 11, "digest": "aa"}, "they differ at the end"),
        ({"event": "wrong", "pid": 11, "what": "mean"}, "wrong weights: .*mean"),
        ({"event": "failed", "pid": 11, "error": "ValueError: no"}, "failed: ValueError: no"),
        (None, "no worker has come to the end"),
    ],
)
def test_a_promise_that_is_not_kept_is_noticed(left: Path, line: dict | None, said: str) -> None:
    lines = [*LINES, line] if line else LINES[:-1]
    look = outcome if said.startswith("ends with") else lambda plan, *left: check(*left, {12})
    with pytest.raises(BrokenError, match=said):
        look(DIES, left, lines)


def test_weights_that_differ_after_a_step_are_found_also_of_a_lost_worker(left: Path) -> None:
    (left / "weights.11").write_bytes(AFTER.pack(1, 7) + AFTER.pack(2, 8))
    (left / "weights.12").write_bytes(AFTER.pack(1, 9))
    with pytest.raises(BrokenError, match=r"they differ after step 1: \[\[1[12]\], \[1[12]\]\]"):
        check(left, LINES, {12})


def test_steps_that_are_missing_in_the_ledger_are_noticed(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tell_of_steps(monkeypatch, histories.STEPS - 1)
    with pytest.raises(BrokenError, match=r"epochs of \[11\] steps"):
        outcome(DIES, left, LINES)


@pytest.mark.parametrize("count", [1, 5, 33, 200])
def test_histories_are_shared_out_over_the_networks(count: int) -> None:
    shares = histories.shares_of(count)
    assert sum(each for _, _, each in shares) == count
    assert count < 200 or shares == [*histories.EVIDENCE]
