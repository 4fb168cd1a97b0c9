"""Each entity of a job has one state, and changes it only as the table of transitions says."""

from __future__ import annotations

import itertools

import pytest

from ms_kungfu.launcher.state.course import JobCourse
from ms_kungfu.launcher.state.hosts import Host, Hosts
from ms_kungfu.launcher.state.policy import Action, Verdict
from ms_kungfu.launcher.state.states import (
    IllegalTransitionError,
    JobState,
    NodeState,
    State,
    VersionState,
    WorkerState,
)

STATES = [state for kind in (JobState, WorkerState, NodeState, VersionState) for state in kind]


def may_follow(before: State, after: State) -> bool:
    try:
        return before.to(after, "it") is after
    except IllegalTransitionError:
        return False


def test_no_state_follows_itself_or_one_of_another_kind() -> None:
    pairs = list(itertools.product(STATES, STATES))
    legal = [(a, b) for a, b in pairs if may_follow(a, b)]
    assert 30 < len(legal) < 60
    assert all(type(a) is type(b) and a is not b for a, b in legal)


def test_every_state_but_the_first_of_its_kind_can_be_reached() -> None:
    for kind, first in (
        (JobState, JobState.STARTING),
        (WorkerState, WorkerState.STARTING),
        (NodeState, NodeState.ACTIVE),
        (VersionState, VersionState.DESIRED),
    ):
        reached = {first} | {after for before in kind for after in kind if may_follow(before, after)}
        assert reached | {VersionState.REJECTED} >= set(kind)


@pytest.mark.parametrize("state", [each for each in WorkerState if each is not WorkerState.KILLED])
def test_only_a_killed_worker_becomes_unkillable(state: WorkerState) -> None:
    assert not may_follow(state, WorkerState.UNKILLABLE)


def test_host_rejoins_after_it_was_removed_and_not_before() -> None:
    hosts = Hosts((Host("a", 1), Host("b", 1)), "a")
    draining = hosts.letting_go("b")
    assert (draining.state_of("b"), draining.leaving, draining.lost) == (NodeState.DRAINING, {"b"}, set())
    removed = draining.without("b")
    assert (removed.state_of("b"), removed.leaving, removed.lost) == (NodeState.REMOVED, set(), {"b"})
    with pytest.raises(IllegalTransitionError, match="host b: NodeState REMOVED -> REMOVED"):
        removed.without("b")
    assert removed.joined_by(Host("b", 2)).state_of("b") is NodeState.ACTIVE


def test_job_ends_once_and_finishes_after_it_has_begun() -> None:
    ends: list[int] = []
    course = JobCourse(lambda reason: None, lambda: ends.append(1))
    with pytest.raises(IllegalTransitionError, match="job: JobState STARTING -> FINISHING"):
        course.finishes()
    course.to(JobState.RUNNING)
    course.resizes()
    assert course.state is JobState.RESIZING
    course.resized(is_newest=True)
    assert course.state is JobState.RUNNING
    course.finishes()
    course.resizes()
    assert course.state is JobState.FINISHING
    assert not course.settle(Verdict(Action.FAIL, "first", 3))
    assert not course.settle(Verdict(Action.FAIL, "second", 4))
    assert (course.verdict.exit_code if course.verdict else None, ends) == (3, [1])


def test_job_that_ends_before_its_first_version_stays_ended() -> None:
    """The first version may be committed in the loop's turn in which the job is interrupted."""
    course = JobCourse(lambda reason: None, lambda: None)
    course.interrupted(2)
    course.begins()
    assert course.state is JobState.ENDING
