"""Prestarted workers of jobs over several hosts on a virtual clock: where they wait, and what becomes of them."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest

pytest.importorskip("greenlet", reason="the simulator's threads are greenlets: pip install ms-kungfu[test]")
pytest.importorskip("mindspore", reason="MindSpore is not installed")

from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.state.policy import Recover
from tests.fault.schedules import Schedule, story, variations
from tests.fault.simulator.hosts_world import HostsSetup, HostsWorld
from tests.fault.simulator.setting import Happening, Setup
from tests.fault.simulator.world import World

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
SCHEDULED = HostsSetup(size=2, hosts=2, slots=3, schedule=((6, 4), (13, 5)), wait=True, samples=120, prepare_s=0.1)
KEPT = HostsSetup(size=4, hosts=2, slots=3, standbys=2, recover=Recover.REPLACE, samples=120, prepare_s=0.1)
MOVES = HostsSetup(
    size=3, hosts=3, slots=2, standbys=2, recover=Recover.REPLACE, moves=True, samples=240, prepare_s=0.1
)
STARTED = re.compile(r"worker started: standby \d+ \(pid (\d+)\)")
SLOT = re.compile(r"standby used: standby=(\d+) rank=\d+ peer=(\S+):\d+ pid=(\d+)")


def run(schedule: Schedule) -> tuple[World, str]:
    """To its end, which has to be a good one."""
    kind = HostsWorld if isinstance(schedule.setup, HostsSetup) else World
    world = kind(schedule.seed, schedule.setup, schedule.happenings, told := [])
    assert world.run().exit_code == 0, story(schedule)
    return world, "\n".join(told)


def hosts_of(world: World) -> dict[int, str]:
    """Of each process that there ever was, by its pid."""
    return {process.pid: process.host.address for process in world.everybody}


def test_workers_of_a_schedule_are_ready_on_their_hosts() -> None:
    for seed in range(20):
        world, told = run(Schedule(seed, SCHEDULED, ()))
        found, running = SLOT.findall(told), hosts_of(world)
        assert [host for _, host, _ in found] == [A, B, A], told
        assert all(running[int(pid)] == host for _, host, pid in found), told
        for version in (1, 2):
            wanted, committed = (told.index(f"cluster {what}: version={version}") for what in ("desired", "committed"))
            assert "worker started: " not in told[wanted:committed], told


def test_each_host_prestarts_as_many_as_it_has_memory_for() -> None:
    for processes, slots in ((2, 0), (3, 2), (4, 3)):
        _, told = run(Schedule(1, replace(SCHEDULED, processes=processes), ()))
        assert len(SLOT.findall(told)) == slots, told
        assert ("no memory for a standby host=10.0.0.1" in told) == (slots < 3), told


def test_replacement_is_a_standby_of_the_same_host() -> None:
    for schedule in variations(KEPT, (Happening(0.9, "kill member", 3),), 10, 0.2):  # rank 3, of the second host
        world, told = run(schedule)
        ((_, host, pid),) = SLOT.findall(told)
        assert (host, hosts_of(world)[int(pid)]) == (B, B), told
        assert told.count("standby 3 ") > 0, told  # and another one in its place


def test_standbys_of_a_lost_host_are_replaced_elsewhere() -> None:
    """At once, and not as processes that have failed."""
    setup = replace(MOVES, standbys=3, moves=False, max_restarts=0, recover=Recover.SHRINK)
    for schedule in variations(setup, (Happening(0.9, "kill launcher", 1),), 10, 0.2):
        world, told = run(schedule)
        lost = re.search(r"host lost: host=(\S+)", told)
        assert lost is not None, told
        running = hosts_of(world)
        before = [running[int(pid)] for pid in STARTED.findall(told[: lost.start()])]
        after = [running[int(pid)] for pid in STARTED.findall(told[lost.start() :])]
        assert (len(before), len(after)) == (3, 1), told
        assert lost[1] in before, told
        assert lost[1] not in after, told
        assert "before it was needed" not in told, told


def test_standbys_of_a_leaving_host_are_ended_first() -> None:
    for schedule in variations(replace(MOVES, standbys=3), (Happening(0.9, "host leaves", 1),), 10, 0.2):
        world, told = run(schedule)
        leaving, left = (re.search(rf"host {what}: host=(\S+)", told) for what in ("leaving", "left"))
        assert leaving is not None, told
        assert left is not None, told
        assert "not needed any more" in told[leaving.start() : left.start()], told
        assert "for more than 3 s (-leave-grace)" not in told, told
        after = [hosts_of(world)[int(pid)] for pid in STARTED.findall(told[leaving.start() :])]
        assert len(after) == 1, told
        assert leaving[1] not in after, told


@pytest.mark.parametrize("loss", ["kill head", "head leaves"])
def test_next_controller_keeps_the_standbys_of_other_hosts(loss: str) -> None:
    """And gives them slots."""
    happenings = (Happening(0.9, loss), Happening(1.0, "kill member", 1, term=2))
    for schedule in variations(MOVES, happenings, 10, 0.3):
        world, told = run(schedule)
        term = told.index("has the lease", told.index("has the lease") + 1)
        started = set(STARTED.findall(told[:term]))
        kept = {pid for pid in started if hosts_of(world)[int(pid)] != A}
        assert kept, told
        assert kept & {pid for _, _, pid in SLOT.findall(told[term:])}, told


@pytest.mark.parametrize("at", [1.6, 4.0])  # before it is in the cluster, and when it is
def test_standby_that_got_a_slot_survives_its_controller(at: float) -> None:
    setup = replace(MOVES, standbys=3, samples=60, step_s=0.3)
    for schedule in variations(setup, (Happening(1.5, "resize", 5), Happening(at, "kill head")), 10, 0.3):
        world, told = run(schedule)
        slots = SLOT.findall(told[: told.index("The workers here wait for the next controller")])
        elsewhere = [number for number, host, _ in slots if host != A]
        assert elsewhere, told
        for number in elsewhere:
            assert re.search(rf"\(standby {number}\) is rank \d", told), told
            assert re.search(rf"\(standby {number}\) is done", told), told


SLOW = {"schedule": ((9, 4),), "wait": True, "step_s": 1.5, "prepare_s": 0.1, "samples": 60}


@pytest.mark.parametrize(
    ("setup", "change"),
    [
        (Setup(size=1, **SLOW), Happening(7.0, "resize", 2)),
        (HostsSetup(size=2, hosts=2, slots=4, moves=True, **SLOW), Happening(7.0, "kill head")),
    ],
)
def test_standbys_wait_for_the_next_report_of_the_members(setup: Setup, change: Happening) -> None:
    """It comes a step after the version that another change has led to."""
    for schedule in variations(setup, (change,), 5, 1.5):
        _, told = run(schedule)
        assert "not needed any more" not in told, told
        assert len(SLOT.findall(told)) == 3, told


def test_standby_that_may_yet_be_refused_gets_no_slot() -> None:
    processes = ProcessTable(SimpleNamespace(requests=SimpleNamespace(ready_standbys=set())), {})
    launched, running = Process(1, "", A, standby=1), Process(2, "", A, standby=2, pid=7)
    for process in (launched, running):
        processes.add(process)
    assert processes.standby_for(1, A) is running
    processes.remove(running)
    assert processes.standby_for(1, A) is None
