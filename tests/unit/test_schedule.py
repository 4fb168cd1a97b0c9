from __future__ import annotations

import numpy as np
import pytest

from ms_kungfu.elastic.schedule import entries, newcomers_ahead, parse_schedule


@pytest.mark.parametrize(
    "schedule", ["10:2, 20:4,40:1", {10: 2, 20: 4, 40: 1}, {np.int64(10): 2, 20: np.int32(4), 40: 1}]
)
def test_each_entry_fires_at_its_step_only(schedule):
    size_after = parse_schedule(schedule)
    fired = {step: size_after(step) for step in range(100) if size_after(step) is not None}
    assert fired == {10: 2, 20: 4, 40: 1}


def test_a_function_of_the_step_decides():
    size_after = parse_schedule(lambda step: np.int64(step // 10) if step % 10 == 0 and step else None)
    assert [size_after(s) for s in (0, 5, 10, 20)] == [None, None, 1, 2]


@pytest.mark.parametrize(
    ("step", "size", "ahead"),
    [
        (0, 1, (1, 2)),
        (60, 1, (1, 2)),  # at its step it is still the next one
        (60, 2, (2, 4)),
        (61, 1, (3, 4)),  # it has not come true, and the next one takes its place
        (100, 3, (1, 4)),
        (100, 4, (0, 4)),
        (141, 4, (0, 4)),  # it shrinks next, and what comes then isn't looked at yet
        (301, 1, (2, 3)),
        (401, 1, (0, 1)),
    ],
)
def test_joining_workers_of_the_next_schedule_entry_are_known_ahead(step, size, ahead):
    known = entries("140:4,60:2,300:1,400:3")
    assert newcomers_ahead(known, step, size) == ahead


def test_of_a_function_nothing_is_known_ahead():
    assert entries(lambda step: 4) == entries(None) == []
    assert newcomers_ahead([], 0, 2) == (0, 2)


def test_no_schedule_keeps_the_size():
    assert parse_schedule(None)(10) is None


@pytest.mark.parametrize(
    ("schedule", "error", "named"),
    [
        ("10:0", ValueError, "'10:0'.*at least 1 worker"),
        ({10: 0}, ValueError, "'10:0'.*at least 1 worker"),
        ("10:-2", ValueError, "'10:-2'.*at least 1 worker"),
        ("-1:2", ValueError, "'-1:2'.*step is 0 or more"),
        ("10:2,10:4", ValueError, "two entries for step 10"),
        ("10:2,banana", ValueError, "'banana'"),
        ("10:2.5", ValueError, "'10:2.5'"),
        ("10:2,", ValueError, "''"),
        ("10:2:3", ValueError, "'10:2:3'"),
        ("", ValueError, "step:size"),
        ({}, ValueError, "empty"),
        ({10: 2.5}, TypeError, "2.5"),
        ({10: True}, TypeError, "True"),
        ({"10": 2}, TypeError, "'10'"),
        (7, TypeError, "7"),
    ],
)
def test_bad_input_is_one_sentence_with_the_value(schedule, error, named):
    with pytest.raises(error, match=named) as caught:
        parse_schedule(schedule)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("returned", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), ("4", TypeError)])
def test_size_returned_by_a_schedule_function_is_checked(returned, error):
    with pytest.raises(error, match="size"):
        parse_schedule(lambda step: returned)(3)
