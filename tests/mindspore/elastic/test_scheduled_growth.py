"""A growth that a schedule has told ahead costs no start: who is new is ready, compiled, before the entry's step."""

import re

import pytest
from conftest import PROGRAMS, Reports


@pytest.mark.parametrize("shards", [0, 4])
def test_who_is_new_by_a_schedule_is_ready_before_its_step(run_program, tmp_path, shards):
    log = tmp_path / "launcher.log"
    schedule = "4:2,8:3,12:1"
    output = run_program(PROGRAMS / "ahead.py", tmp_path, log, shards, schedule, np=1, watch=True,
                         flags=("-logfile", str(log)))  # fmt: skip
    reports = Reports(tmp_path, output)
    lines = log.read_text().splitlines()

    def place(pattern):
        (found,) = (number for number, line in enumerate(lines) if re.search(pattern, line))
        return found

    for version, (number, size) in enumerate(((1, 2), (2, 3)), start=1):
        wanted, chosen = (place(rf"cluster version {version} {what}") for what in ("is wanted", "has been chosen"))
        assert place(rf"standby {number} .* is ready") < wanted
        between = "\n".join(lines[wanted:chosen])
        assert f"standby {number} becomes worker {size - 1}" in between
        assert " started" not in between
        assert len(reports.by_step("step")[4 * version + 1]) == size
    assert "standby 3" not in log.read_text()
    # Nobody who is new compiles anything but what it had compiled before it joined.
    for worker in reports.workers[1:]:
        ...
    for rows in reports.by_step("after").values():
        assert len({row["parameters"] for row in rows}) == 1
