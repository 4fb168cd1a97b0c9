"""Scripts of simulated jobs, and the check that `kungfu-run explain` tells what a script did and nothing else.

The launchers that write the event log are the real ones. The steps and their times are those that the simulator has on
record. `python -m tests.fault.stories FIRST COUNT` checks that many drawn scripts, by seeds.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass, field, replace
from statistics import median
from unittest import mock

from ms_kungfu.dataset.ledger import Claim
from ms_kungfu.launcher.explain_command import events_in
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.state.story import Chapter, story_of
from ms_kungfu.membership.member import EndedSteps
from tests.fault.simulator.hosts_world import HostsSetup, HostsWorld
from tests.fault.simulator.setting import Happening, Setup
from tests.fault.simulator.world import World

JOB = Setup(size=3, samples=120, step_s=0.1)
HOSTS = HostsSetup(size=6, hosts=3, slots=2, samples=120, step_s=0.1)
SIGKILL = "was killed by SIGKILL"
_ABOUT_S = 0.06  # half of the shortest step
_REPORT_S = 0.5  # the longest time between two reports of an agent
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
    "a rank pauses while it sleeps in an operation": Script(
        replace(JOB, size=4),
        (Happening(1.677, "pause", 2, 4.0),),
        [Told("stall", "stopped by a signal", None, 2, (0, 1, 3), during=1.677, cost_s=4.0)],
    ),
    "a rank is stopped in its third step": Script(
        JOB, (Happening(0.635, "stop", 1),), [failed(1, STOOD_STILL, (0, 2), 0.635), resized(1, "3 -> 2", STOOD_STILL)]
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


def play(script: Script, ends: dict[int, list[tuple[int, float]]] | None = None) -> tuple[World, list[Chapter]]:
    """Run the job. `ends`: filled with each worker's steps, and when they ended by its clock."""
    world = (HostsWorld if isinstance(script.setup, HostsSetup) else World)(1, script.setup, script.happenings)
    ended = EndedSteps.ended

    def noted(self: EndedSteps, step: int, now: float) -> None:
        if ends is not None:
            ends.setdefault(id(self), []).append((step, now))
        ended(self, step, now)

    with mock.patch.object(EndedSteps, "ended", noted):
        assert world.run().exit_code == script.exit_code
    events, unread = events_in(world.event_lines)
    assert unread == 0
    return world, story_of(events)


def ends_of_steps(world: World) -> dict[int, dict[int, float]]:
    """Return for each step when each rank had it, by the simulator's record."""
    found: dict[tuple[int, int], dict[int, float]] = {}  # by epoch and step in it
    for record in (line for lines in world.records.values() for line in lines if isinstance(line.claim, Claim)):
        found.setdefault((record.epoch, record.step), {})[record.rank] = record.time
    return dict(enumerate(sorted(found.values(), key=lambda times: max(times.values())), 1))


def steps_of(told: Told, world: World) -> set[int | None]:
    """Return the steps that a chapter may name: two if the script's moment is within `_ABOUT_S` of a step's end."""
    if told.during is not None:
        ends = list(ends_of_steps(world).values())
        moments = (min, told.during + _ABOUT_S), (max, told.during - _ABOUT_S)
        return {1 + sum(end(times.values()) <= moment for times in ends) for end, moment in moments}
    if told.version is not None:
        if all(version != told.version for version, *_ in world.steps.values()):
            return {None}  # the next version replaced it
        return {max(number for number, (version, *_) in world.steps.items() if version < told.version)}
    return {told.step}


def longer_s(times: list[tuple[int, float]], step: int | None) -> float | None:
    """Return by how much a worker's step took longer than the median of the eight before; None if it can't be said."""
    last = [now for number, now in times if step is not None and step - 8 <= number <= step]
    took = [after - before for before, after in zip(last, last[1:])]
    return max(0.0, took[-1] - median(took[:-1])) if len(took) > 1 and (step, last[-1]) in times else None


def drawn(seed: int) -> Script:
    """Return a script with ranks, sizes and times from a seed."""
    rng = random.Random(seed)
    size, at = rng.randint(3, 6), round(rng.uniform(0.6, 2.0), 3)
    rank = rng.randrange(size)
    setup = replace(JOB, size=size)
    others = tuple(each for each in range(size) if each != rank)
    shrinks = resized(1, f"{size} -> {size - 1}", "")
    kind = rng.choice(("kill", "replace", "two kills", "stop", "pause", "terminate", "evict", "resize", "schedule",
                       "grow", "store", "kill and resize", "pause and kill"))  # fmt: skip
    kill = Happening(at, "kill member", rank)
    dies = failed(rank, SIGKILL, others, at)
    if kind == "kill":
        return Script(setup, (kill,), [dies, shrinks])
    if kind == "replace":
        story = [replace(dies, decision="replace"), shrinks, resized(2, f"{size} -> {size}", "launcher")]
        return Script(replace(setup, recover=Recover.REPLACE), (kill,), story)
    if kind == "two kills":
        second, later = rng.randrange(size - 1), round(at + rng.uniform(1.5, 2.5), 3)
        left = tuple(each for each in range(size - 1) if each != second)
        story = [dies, shrinks, failed(second, SIGKILL, left, later), resized(2, f"{size - 1} -> {size - 2}", SIGKILL)]
        return Script(setup, (kill, Happening(later, "kill member", second)), story)
    if kind == "stop":
        return Script(setup, (Happening(at, "stop", rank),), [failed(rank, STOOD_STILL, others, at), shrinks])
    pauses = Happening(at, "pause", rank, for_s := rng.choice((4.0, 6.0, 9.0)))
    stall = Told("stall", "stopped by a signal", None, rank, others, during=at, cost_s=for_s)
    if kind == "pause":
        return Script(setup, (pauses,), [stall])
    if kind == "pause and kill":
        later = round(at + for_s + 3, 3)
        return Script(setup, (pauses, replace(kill, at=later)), [stall, replace(dies, during=later), shrinks])
    if kind in ("terminate", "evict"):
        cause = "the program evicts it" if kind == "evict" else "it got a SIGTERM"
        does = Happening(at, "policy evicts", 0, rank) if kind == "evict" else Happening(at, "terminate", rank)
        return Script(setup, (does,), [Told("resize", cause, "shrink", rank), shrinks])
    wanted = rng.choice([each for each in range(1, 8) if each != size])
    if kind == "resize":
        change = resized(1, f"{size} -> {wanted}", "client: .*resize")
        return Script(setup, (Happening(at, "resize", wanted),), [change])
    if kind == "kill and resize":
        wanted = rng.choice([each for each in range(1, 8) if each != size - 1])
        later = round(at + rng.uniform(1.5, 3.0), 3)
        change = resized(2, f"{size - 1} -> {wanted}", "client: .*resize")
        return Script(setup, (kill, Happening(later, "resize", wanted)), [dies, shrinks, change])
    if kind == "schedule":
        first, second = rng.sample([each for each in range(1, 7) if each != size], 2)
        story = [resized(1, f"{size} -> {first}", BY_PROGRAM), resized(2, f"{first} -> {second}", BY_PROGRAM)]
        steps = sorted(rng.sample(range(3, 16), 2))
        schedule = ((steps[0], first), (steps[1], second))
        return Script(replace(setup, schedule=schedule, wait=True, prepare_s=0.1), (), story)
    if kind == "grow":
        step = rng.randint(3, 9)
        decides = Told("policy", "it is time", f"size={size + 1} keeps_local_batch=True", step=step)
        grows = resized(1, f"{size} -> {size + 1}", BY_PROGRAM)
        return Script(replace(setup, grown=((step, size + 1),)), (), [decides, grows])
    away = Happening(at, "server away", 0, rng.choice((2.0, 3.0, 5.0)))
    return Script(replace(setup, external=True), (away,), [Told("store", "Connection refused")])


def is_kill_in_a_step(told: Told, may_be: set[int | None]) -> bool:
    """Return whether the survivors must notice this failure in a step, because it isn't near a step's end."""
    return told.kind == "failure" and told.cause == SIGKILL and told.decision != "fail" and len(may_be) == 1


def check(script: Script) -> None:
    """Raise AssertionError if the story of the job isn't the script's."""
    ends: dict[int, list[tuple[int, float]]] = {}
    world, (began, *chapters, ended) = play(script, ends)
    size = script.setup.size
    assert began.text.startswith(f"The job started with {size} worker"), began
    assert ended.decision == f"exit code {script.exit_code}", ended
    assert ended.step == (max(world.steps) if script.exit_code == 0 else None) or script.exit_code
    text = "\n".join(chapter.text for chapter in chapters)
    assert [chapter.kind for chapter in chapters] == [told.kind for told in script.story], text
    for chapter, told in zip(chapters, script.story):
        assert re.search(told.cause, chapter.cause or ""), chapter
        assert (chapter.rank, chapter.decision) == (told.rank, told.decision), chapter
        # Survivors that noticed a failure at the end of a step that was no longer than usual didn't wait.
        waited = () if told.kind == "failure" and not chapter.cost_s else told.waited
        assert chapter.waited == list(waited), chapter
        may_be = steps_of(told, world)
        if is_kill_in_a_step(told, may_be):
            assert "The others noticed it in step" in chapter.text, chapter
        if told.during is not None and "the controller knew of" in chapter.text:
            before = steps_of(replace(told, during=told.during - _REPORT_S), world)
            assert min(filter(None, before)) - 1 <= (chapter.step or 0) < max(filter(None, may_be)), chapter
        elif told.kind == "stall" and told.cost_s is not None and chapter.cost_s is None:
            assert (chapter.step or 0) + 1 in may_be, chapter  # no usual duration yet: the last step before the stall
            continue
        elif told.during is not None or told.version is not None or told.step is not None:
            assert chapter.step in may_be, (chapter, may_be)
        if told.cost_s is not None:
            assert abs((chapter.cost_s or 0.0) - told.cost_s) <= 0.1 * told.cost_s, chapter
        if told.kind == "failure" and chapter.cost_s is not None:
            measured = [found for times in ends.values() if (found := longer_s(times, chapter.step)) is not None]
            assert not measured or any(abs(chapter.cost_s - each) <= max(0.01, 0.1 * each) for each in measured), (
                chapter,
                measured,
            )


def main(first: int, count: int) -> int:
    """Check drawn scripts; print those whose story is another one. Return how many they are."""
    broken = 0
    for seed in range(first, first + count):
        try:
            check(drawn(seed))
        except AssertionError as error:
            broken += 1
            print(f"seed {seed}: {drawn(seed)}\n  {error}", flush=True)
    print(f"{count} scripts, {broken} with another story")
    return broken


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])) > 0)
