"""Workers are started as standbys before they are wanted, by what the members tell of their schedule."""

import os
import re
import signal
from pathlib import Path

import pytest

from ms_kungfu.broker_protocol import BrokerClient
from ms_kungfu.errors import KungFuError

pytestmark = pytest.mark.timeout(120)
FEW_CORES = len(os.sched_getaffinity(0)) < 8


def place(one, pattern):
    """In the output, from its beginning."""
    return re.search(pattern, one.program.output, re.MULTILINE).start()


def standby(one, number):
    return int(one.wait_for(rf"worker started: standby {number} \(pid (\d+)\)")[0][1])


def client(pid):
    """Of the broker that a worker has."""
    given = dict(line.partition("=")[::2] for line in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return BrokerClient(given["KUNGFU_BROKER"], bytes.fromhex(given["KUNGFU_JOB_SECRET"]))


def test_the_workers_of_the_next_entry_are_there_before_it(job, tmp_path):
    ready = tmp_path / "ready"
    one = job("-np", 1, program=["schedule=20:3,40:4", "wait", "ahead", f"hold=20:{ready}"])
    pids = one.in_version(0, 1)
    started = [standby(one, number) for number in (1, 2)]
    one.wait_for(r"worker ready: standby [12]", 2)
    if FEW_CORES:  # one after the other
        assert place(one, r"worker ready: standby 1") < place(one, r"worker started: standby 2 \(pid \d+\)")
    ready.touch()
    assert one.in_version(1, 3) == {0: pids[0], 1: started[0], 2: started[1]}
    # They have prepared for the ranks and the size that they got.
    assert {(int(m[1]), m[2]) for m in one.wait_for(r"^parked pid (\d+) rank (\d of \d)", 2)} == {
        (started[0], "1 of 3"),
        (started[1], "2 of 3"),
    }
    one.in_version(2, 4)
    one.finish(4)
    assert not re.search(r"worker started: worker [12] ", one.program.output)


def test_prestarted_worker_killed_before_its_use_is_replaced(job):
    one = job("-np", 1, program=["schedule=1000000:3", "ahead"])
    pids = one.in_version(0, 1)
    first = standby(one, 1)
    one.wait_for(r"worker ready: standby 1")
    one.wait_for(r"worker ready: standby 2")
    os.kill(first, signal.SIGKILL)
    one.wait_for(r"standby 1 .* was killed by SIGKILL before it was needed; another worker is started")
    third = standby(one, 3)
    one.wait_for(r"worker ready: standby 3")
    # Somebody else wants another size: they are there for whoever is needed, first of all who prepared for the rank.
    one.command("resize", "2")
    joined = one.in_version(1, 2)
    assert joined == {0: pids[0], 1: third}
    assert one.finish(2) == set(joined.values())
    assert not re.search(r"standby 4|standby 2 .*(killed|exited)|worker started: worker 1 ", one.program.output)


def test_the_newest_word_counts_and_only_in_its_version(job):
    one = job("-np", 1, "-standby", 1, "-max-restarts", 1)
    pids = one.in_version(0, 1)
    kept = standby(one, 1)
    one.wait_for(r"worker ready: standby 1")
    members = client(pids[0])
    members.expect(1, 3, 4, 30)  # of a version that there isn't
    members.expect(0, 2, 3, 30)
    one.wait_for(r"worker ready: standby 2")
    members.expect(0, 0, 1, 30)
    one.wait_for(r"worker dismissed: standby 2 .* reason=.not needed any more")
    members.expect(0, 2, 3, 30)
    again = standby(one, 3)
    one.wait_for(r"worker ready: standby 3")
    one.command("resize", "3")
    assert set(one.in_version(1, 3).values()) == {pids[0], kept, again}
    one.wait_for(r"worker started: standby 4 \(pid \d+\)")  # of -standby, and nobody beside it
    one.wait_for(r"worker ready: standby 4")
    for expected in ({"newcomers": -1, "size": 3}, {"newcomers": 1, "size": "3"}, {"newcomers": True, "size": 3}):
        with pytest.raises(KungFuError, match="a message is malformed"):
            members._tell("expected", {"version": 1, **expected}, 30)
    one.finish(3)
    assert not re.search(r"standby 5|standby 2 .*before it was needed", one.program.output)


def test_worker_that_fails_repeatedly_is_no_longer_prestarted(job):
    one = job("-np", 1, "-recover", "replace", "-max-restarts", 1, program=["fail=1"])
    pids = one.in_version(0, 1)
    client(pids[0]).expect(0, 1, 2, 30)
    one.wait_for(r"standby 1 .* exited with code 5 before it was needed; another worker is started")
    one.wait_for(r"standby 2 .* exited with code 5 before it was needed, like 1 other recently; it isn't replaced")
    one.finish(1)
    assert "standby 3" not in one.program.output
