"""A growth by a schedule costs no start: the joining worker is ready, compiled, before the entry's step."""

import re

import pytest
from conftest import PROGRAMS, Reports

from tests.conftest import long

TWICE = "4:2,8:3,12:1"


@pytest.mark.parametrize(
    ("kind", "schedule"),
    [("shards", "8:2,12:1"), long("shards", TWICE), long("parts", TWICE), long("loop", TWICE)],
)
def test_joining_worker_of_a_schedule_is_ready_before_its_step(run_program, tmp_path, kind, schedule):
    log = tmp_path / "launcher.log"
    flags = ("-logfile", str(log))
    output = run_program(PROGRAMS / "ahead.py", tmp_path, log, kind, schedule, np=1, watch=True, flags=flags)
    lines = log.read_text().splitlines()

    def place(pattern):
        (found,) = (number for number, line in enumerate(lines) if re.search(pattern, line))
        return found

    most = 3 if schedule == TWICE else 2
    for version in range(1, most):
        wanted, chosen = (place(rf"cluster {what}: version={version}") for what in ("desired", "committed"))
        assert place(rf"worker ready: standby {version} ") < wanted
        between = "\n".join(lines[wanted:chosen])
        assert f"standby used: standby={version} rank={version} " in between
        assert "worker started: " not in between
    assert len([line for line in lines if "worker started: " in line]) == most
    reports = Reports(tmp_path, output)
    sizes = {step: len(rows) for step, rows in reports.by_step("step").items()}
    entries = [tuple(map(int, entry.split(":"))) for entry in schedule.split(",")]
    assert sizes == {step: [1, *(size for at, size in entries if at < step)][-1] for step in range(1, 17)}
    # Where steps are dealt in shards one shape does. Else a worker has compiled its parts before its first step.
    graphs = {
        rank: {row["graphs"] for rows in reports.by_step("step").values() for row in rows if row["rank"] == rank}
        for rank in range(most)
    }
    assert graphs == ({0: {3}, 1: {2}, 2: {1}} if kind == "parts" else {rank: {1} for rank in range(most)})
    for rows in reports.by_step("after").values():
        assert len({row["parameters"] for row in rows}) == 1
