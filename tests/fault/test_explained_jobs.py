"""`kungfu-run explain` of simulated jobs: what the script did is in the story, with cause, rank, step and cost, and no
more. The launchers that write the event log are the real ones; the steps are those that the simulator has on record.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

import pytest

pytest.importorskip("greenlet", reason="the simulator's threads are greenlets: pip install ms-kungfu[test]")
pytest.importorskip("mindspore", reason="MindSpore is not installed")

from ms_kungfu.dataset.ledger import Claim
from ms_kungfu.launcher.explain_command import events_in
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.state.story import Chapter, story_of
from tests.fault.simulator.hosts_world import HostsSetup, HostsWorld
from tests.fault.simulator.setting import Happening, Setup
from tests.fault.simulator.world import World

JOB = Setup(size=3, samples=120, step_s=0.1)
HOSTS = HostsSetup(size=6, hosts=3, slots=2, samples=120, step_s=0.1)
SIGKILL = "was killed by SIGKILL"
STOOD_STILL = r"hung for 1 s \(-peer-timeout\) and was killed"


@dataclass
class Told:
    """What a chapter has to say. `during`: its step is the one that the others were in then; `version`: it is the last
    one before that version; `cost_s`: within a tenth."""

    kind: str
    cause: str = ""
    decision: str | None = None
    rank: int | None = None
    waited: tuple[int, ...] = ()
    during: float | None = None
    version: int | None = None
    step: int | None = None
    cost_s: float | None = None


def failed(rank: int, cause: str, survivors: tuple[int, ...], at: float = 1.0) -> Told:
    return Told("failure", cause, "shrink", rank, survivors, during=at)


def resized(version: int, decision: str, cause: str) -> Told:
    return Told("resize", cause, decision, version=version)


@dataclass
class Script:
    setup: Setup
    happenings: tuple[Happening, ...]
    story: list[Told] = field(default_factory=list)
    exit_code: int = 0


def killed(rank: int, at: float = 1.0) -> Script:
    story = [failed(rank, SIGKILL, tuple({0, 1, 2} - {rank}), at), resized(1, "3 -> 2", SIGKILL)]
    return Script(JOB, (Happening(at, "kill member", rank),), story)


def replaced(rank: int) -> Script:
    one = killed(rank)
    one.story[0].decision = "replace"
    story = [*one.story, resized(2, "3 -> 3", "launcher")]
    return Script(replace(JOB, recover=Recover.REPLACE), one.happenings, story)


def left(kind: str, rank: int, **more: float) -> Script:
    cause = "the program evicts it" if kind == "policy evicts" else "it got a SIGTERM"
    draining = Told("resize", cause, "shrink", rank)
    happening = Happening(1.0, kind, 0 if kind == "policy evicts" else rank, rank if kind == "policy evicts" else 0.0)
    return Script(JOB, (happening,), [draining, resized(1, "3 -> 2", "is leaving")])


def resize(before: int, after: int) -> Script:
    setup = replace(JOB, size=before)
    return Script(setup, (Happening(1.0, "resize", after),), [resized(1, f"{before} -> {after}", "client: .*resize")])


BY_PROGRAM = "program: the program requested it"
SCRIPTS = {
    "nothing happens": Script(JOB, ()),
    "rank 0 is killed": killed(0),
    "rank 1 is killed": killed(1),
    "rank 2 is killed later": killed(2, at=1.7),
    "rank 0 is replaced": replaced(0),
    "rank 2 is replaced": replaced(2),
    "two ranks are killed": Script(
        replace(JOB, size=4),
        (Happening(1.0, "kill member", 3), Happening(2.5, "kill member", 1)),
        [
            failed(3, SIGKILL, (0, 1, 2)),
            resized(1, "4 -> 3", SIGKILL),
            failed(1, SIGKILL, (0, 2), at=2.5),
            resized(2, "3 -> 2", SIGKILL),
        ],
    ),
    "all are killed": Script(
        replace(JOB, size=1, min_size=1),
        (Happening(1.0, "kill all"),),
        [Told("failure", SIGKILL, "fail", 0)],
        exit_code=137,
    ),
    "rank 0 is stopped": Script(
        JOB, (Happening(1.0, "stop", 0),), [failed(0, STOOD_STILL, (1, 2)), resized(1, "3 -> 2", STOOD_STILL)]
    ),
    "rank 2 is stopped": Script(
        JOB, (Happening(1.0, "stop", 2),), [failed(2, STOOD_STILL, (0, 1)), resized(1, "3 -> 2", STOOD_STILL)]
    ),
    "rank 1 pauses": Script(
        JOB,
        (Happening(1.0, "pause", 1, 8.0),),
        [Told("stall", "stopped by a signal", None, 1, (0, 2), step=5, cost_s=8.0)],
    ),
    "rank 0 pauses": Script(
        JOB,
        (Happening(1.0, "pause", 0, 8.0),),
        [Told("stall", "stopped by a signal", None, 0, (1, 2), step=5, cost_s=8.0)],
    ),
    "rank 1 never comes": Script(
        JOB,
        (Happening(1.0, "loop", 1),),
        [
            Told("stall", "", None, 1, (0, 2)),
            failed(1, "did not reach the collective", (0, 2)),
            resized(1, "3 -> 2", "did not reach the collective"),
        ],
    ),
    "rank 1 gets a SIGTERM": left("terminate", 1),
    "rank 2 gets a SIGTERM": left("terminate", 2),
    "a policy evicts rank 2": left("policy evicts", 2),
    "growth from outside": resize(2, 4),
    "shrinking from outside": resize(4, 2),
    "a schedule": Script(
        replace(JOB, size=1, schedule=((6, 2), (13, 4)), wait=True, prepare_s=0.1),
        (),
        [resized(1, "1 -> 2", BY_PROGRAM), resized(2, "2 -> 4", BY_PROGRAM)],
    ),
    "a policy grows the cluster": Script(
        replace(JOB, size=2, grown=((5, 3),)),
        (),
        [Told("policy", "it is time", "size=3 keeps_local_batch=True", step=5), resized(1, "2 -> 3", BY_PROGRAM)],
    ),
    "the config server goes away": Script(
        replace(JOB, external=True), (Happening(1.0, "server away", 0, 3.0),), [Told("store", "Connection refused")]
    ),
    "a kill, then growth": Script(
        JOB,
        (Happening(1.0, "kill member", 1), Happening(3.0, "resize", 4)),
        [failed(1, SIGKILL, (0, 2)), resized(1, "3 -> 2", SIGKILL), resized(2, "2 -> 4", "client: .*resize")],
    ),
    "a host is switched off": Script(
        HOSTS,
        (Happening(2.0, "switch off", 0, 20.0),),
        [
            Told("host", r"no message came from it for 2 s \(-host-timeout\)"),
            failed(4, "10.0.0.3, which was lost", (0, 1, 2, 3), at=2.0),
            failed(5, "10.0.0.3, which was lost", (0, 1, 2, 3), at=2.0),
            resized(1, "6 -> 4", "host 10.0.0.3 is lost"),
        ],
    ),
    "the controller's host is killed": Script(
        replace(HOSTS, moves=True),
        (Happening(2.0, "kill head"),),
        [
            Told("controller", "10.0.0.1 controlled it before"),
            Told("host", "the connection was closed"),
            Told("host", "didn't register with the job's new controller"),
            failed(0, "10.0.0.1, which was lost", (2, 3, 4, 5), at=2.0),
            failed(1, "10.0.0.1, which was lost", (2, 3, 4, 5), at=2.0),
            resized(1, "6 -> 4", "host 10.0.0.1 is lost"),
        ],
    ),
}  # fmt: skip


def play(script: Script) -> tuple[World, list[Chapter]]:
    world = (HostsWorld if isinstance(script.setup, HostsSetup) else World)(1, script.setup, script.happenings)
    assert world.run().exit_code == script.exit_code
    events, unread = events_in(world.event_lines)
    assert unread == 0
    return world, story_of(events)


def step_of(told: Told, world: World) -> int | None:
    """From the simulator's record of each step: its version, and when the workers had it."""
    if told.during is not None:
        last: dict[tuple[int, int], float] = {}  # (epoch, step in it) -> when the last worker had it
        for record in (line for lines in world.records.values() for line in lines if isinstance(line.claim, Claim)):
            where = record.epoch, record.step
            last[where] = max(last.get(where, 0.0), record.time)
        return 1 + sum(time <= told.during for time in last.values())
    if told.version is not None:
        return max(number for number, (version, *_) in world.steps.items() if version < told.version)
    return told.step


@pytest.mark.parametrize("name", SCRIPTS)
def test_story_of_a_job_is_the_scripts(name: str) -> None:
    script = SCRIPTS[name]
    world, (began, *chapters, ended) = play(script)
    assert (began.text.partition(" workers")[0], ended.decision) == (
        f"The job started with {script.setup.size}" + ("" if script.setup.size > 1 else " worker."),
        f"exit code {script.exit_code}",
    )
    assert ended.step == (max(world.steps) if script.exit_code == 0 else None) or script.exit_code
    text = "\n".join(chapter.text for chapter in chapters)
    assert [chapter.kind for chapter in chapters] == [told.kind for told in script.story], text
    for chapter, told in zip(chapters, script.story):
        assert re.search(told.cause, chapter.cause or ""), chapter
        assert (chapter.rank, chapter.decision) == (told.rank, told.decision), chapter
        # Survivors that noticed a failure at the end of a step that was no longer than usual didn't wait.
        waited = () if told.kind == "failure" and not chapter.cost_s else told.waited
        assert chapter.waited == list(waited), chapter
        if told.during is not None or told.version is not None or told.step is not None:
            assert chapter.step == step_of(told, world), (chapter, world.steps)
        if told.cost_s is not None:
            assert chapter.cost_s == pytest.approx(told.cost_s, rel=0.1), chapter


def test_there_are_twenty_scripts() -> None:
    assert len(SCRIPTS) >= 20
