"""Histories of a cluster that trains MindSpore's networks in shards have the bits of one worker, and these are
the bits of MindSpore alone.

Random ones: ``python -m tests.campaigns histories``.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from ms_kungfu.dataset import audit
from tests.conftest import long
from tests.fault import histories
from tests.fault.faulty_jobs import BrokenError
from tests.fault.histories import History, Job, Stroke, history_of, jobs_of, undisturbed

PLAIN = Path(__file__).with_name("programs") / "plain.py"
pytestmark = pytest.mark.timeout(900)
needs_mindspore = pytest.mark.skipif(find_spec("mindspore") is None, reason="MindSpore is not installed")

# The lowest rank and another one at a time, in a sum over all; who dies behind its last shard; a stop, a slow worker;
# growing behind a death, and shrinking.
SCRIPT = Job(
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
    found, alone = histories.run(SCRIPT), histories.run(undisturbed("lenet", "graph", 2))
    assert found.sha256 == alone.sha256
    assert len(set(alone.sha256)) == 2
    # Nobody dies who is the last: the second history's last one isn't struck down.
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
    two = Job(kind, "graph", "shrink", (History(0, 2, (), ()),))
    assert histories.run(two).sha256 == done.stdout.split()[-1:]


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
    jobs = jobs_of("lenet", "graph", 7, 12)
    assert [history.seed for job in jobs for history in job.histories] == list(range(7, 19))
    assert [len(job.histories) for job in jobs] == [5, 5, 2]
    assert {job.recover for job in jobs_of("lenet", "graph", 0, 100)} == {"shrink", "replace"}
    job = Job("lenet", "graph", "shrink", (History(0, 2, ((3, 4),), ()), History(1, 3, ((11, 1),), ())))
    assert job.sizes() == {3: 4, 12: 3, 23: 1}


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the workers 11 and 12 leave of a job of one history in which 12 dies."""
    (tmp_path / "ledger").mkdir()
    epoch = audit.Epoch(0, 0, histories.STEPS, 100, True, 100)
    monkeypatch.setattr(histories.audit, "read", lambda folder: ({},))
    monkeypatch.setattr(histories.audit, "audit", lambda files: audit.Report(2, 1, [epoch], [], []))
    for name, line in {
        "member.11": {"pid": 11}, "member.12": {"pid": 12}, "fired.0.0": {"pid": 12},
        "end.0.11": {"pid": 11, "sha256": "aa", "sizes": {"1": 2}},
    }.items():  # fmt: skip
        (tmp_path / name).write_text(json.dumps(line))
    return tmp_path


DIES = Job("lenet", "graph", "shrink", (History(0, 2, (), (Stroke("kill", 1, 1), Stroke("kill", 2, 0))),))


def test_what_happened_is_told(left: Path) -> None:
    found = histories.check(DIES, left)
    assert found == histories.Outcome(["aa"], [{1: 2}], [[DIES.histories[0].strokes[0]]])
    assert histories.compare(found, replace(found, sha256=["aa"]), DIES) == []
    (said,) = histories.compare(found, replace(found, sha256=["bb"]), DIES)
    assert "history 0 ended with aa, one worker with bb" in said


@pytest.mark.parametrize(
    ("name", "line", "said"),
    [
        ("end.0.12", {"pid": 12, "sha256": "bb", "sizes": {}}, r"ends with \['aa', 'bb'\]"),
        ("member.13", {"pid": 13}, r"workers \[13\] are gone, and nothing was done to them"),
        ("end.0.11", None, "ends with nobody"),
    ],
)
def test_a_promise_that_is_not_kept_is_noticed(left: Path, name: str, line: dict | None, said: str) -> None:
    if line is None:
        (left / name).unlink()
    else:
        (left / name).write_text(json.dumps(line))
    with pytest.raises(BrokenError, match=said):
        histories.check(DIES, left)


def test_steps_that_are_missing_in_the_ledger_are_noticed(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = audit.Epoch(0, 0, histories.STEPS - 1, 100, True, 100)
    monkeypatch.setattr(histories.audit, "audit", lambda files: audit.Report(2, 1, [epoch], [], []))
    with pytest.raises(BrokenError, match=r"epochs of \[11\] steps"):
        histories.check(DIES, left)
