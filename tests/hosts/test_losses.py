"""Hosts that are lost: cut off, deaf, paused, or out of each other's reach. The others go on."""

from __future__ import annotations

import signal
import socket
import time

import pytest

from ms_kungfu.launcher.channel import TCP_RTO_MAX_MS

TIMEOUT_S = 3.0
FLAGS = ("-host-timeout", f"{TIMEOUT_S:g}s")
SLACK_S = 30.0  # for a machine that has other things to do, and for shrinking; see the figures in docs/recovery.md


def survivors(job, before, lost, begin=None):
    """The first version without the lost host: of the same processes, as soon as it may be. After how long."""
    begin = begin or time.monotonic()
    after = job.newest(1, 4)
    took = time.monotonic() - begin
    assert {*after.values()} == {who for who in before.values() if who[0] != lost}
    return took


def fenced(job, lost, code=1):
    """Its launcher ends with a sentence, and leaves nothing."""
    launcher = job.launchers[lost]
    launcher.assert_exit(code)
    launcher.assert_gone(time.monotonic())
    assert launcher.stderr[-1].startswith("kungfu-run: ")


def without_the_head(job):
    """The other hosts leave it."""
    for number in (1, 2):
        fenced(job, number)


def head_goes_on(job, before):
    """With its own workers: the host that has the store goes on."""
    after = job.newest(1, 2)
    assert {*after.values()} == {before[0], before[1]}


def finish(job, lost):
    among = [number for number in range(3) if number != lost]
    assert len(job.finish(among=among)) == 4


@pytest.mark.parametrize("how", ["cut", pytest.param("unplugged", marks=pytest.mark.long)])
def test_host_that_is_cut_off_is_removed_and_ends_itself(how, jobs, network):
    job = jobs.over(network(3), 6, *FLAGS)
    before = job.in_version(0, 6)
    begin = time.monotonic()
    with getattr(job.network.hosts[1], how)():
        took = survivors(job, before, 1, begin)
        assert TIMEOUT_S - 1 < took < TIMEOUT_S + SLACK_S
        fenced(job, 1)
    finish(job, 1)


@pytest.mark.parametrize("deaf", ["the head", "the host"])
def test_one_direction_is_enough(deaf, jobs, network):
    job = jobs.over(network(3), 6, *FLAGS)
    before = job.in_version(0, 6)
    head, other = job.network.hosts[0], job.network.hosts[2]
    one, not_heard = (head, other) if deaf == "the head" else (other, head)
    with one.deaf_to(not_heard):
        assert survivors(job, before, 2) < TIMEOUT_S + SLACK_S
    fenced(job, 2)
    finish(job, 2)


@pytest.mark.parametrize(("cut_s", "timeout_s"), [(1, 2 * TIMEOUT_S), pytest.param(3, 5, marks=pytest.mark.long)])
def test_short_cable_outage_loses_no_host(cut_s, timeout_s, jobs, network):
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, TCP_RTO_MAX_MS, 1000)
        except OSError:
            if cut_s > timeout_s / 2:
                pytest.skip("this kernel's TCP waits for as long again before it tries the cable")
    job = jobs.over(network(3), 6, "-host-timeout", f"{timeout_s:g}s")
    before = job.in_version(0, 6)
    with job.network.hosts[1].cut():
        time.sleep(cut_s)  # is what is tried here
    time.sleep(timeout_s)  # for what would come of it
    assert len(job.finish()) == 6
    assert "host lost: " not in job.output
    assert before == job.in_version(0, 6)


def test_a_host_that_is_paused_for_longer_wakes_without_doing_harm(jobs, network):
    job = jobs.over(network(3), 6, *FLAGS)
    before = job.in_version(0, 6)
    with job.network.hosts[2].paused():
        assert survivors(job, before, 2) < TIMEOUT_S + SLACK_S
    fenced(job, 2)
    finish(job, 2)


def test_a_host_that_is_paused_for_less_is_waited_for(jobs, network):
    job = jobs.over(network(3), 6, "-host-timeout", "15s")
    before = job.in_version(0, 6)
    with job.network.hosts[2].paused():
        time.sleep(1)
    assert len(job.finish()) == 6
    assert before == job.in_version(0, 6)


def test_two_hosts_that_do_not_reach_each_other_are_parted(jobs, network):
    job = jobs.over(network(3), 6, *FLAGS)
    before = job.in_version(0, 6)
    one, other = job.network.hosts[1:]
    with one.deaf_to(other), other.deaf_to(one):
        assert survivors(job, before, 2) < TIMEOUT_S + 2 + SLACK_S
        fenced(job, 2)
        job.launchers[0].wait_for("can't reach each other")
    finish(job, 2)


def test_a_host_that_ends_by_itself_costs_no_other_its_place(jobs, network):
    """The head resets what host 1 sends, which ends for that: the head doesn't know, and hears of it by host 2."""
    job = jobs.over(network(3), 6, "-host-timeout", "10s")
    before = job.in_version(0, 6)
    head, other = job.network.hosts[:2]
    with head.refusing(other):
        fenced(job, 1)
        survivors(job, before, 1)
    finish(job, 1)


def test_head_node_without_its_address_continues_with_its_own_workers(jobs, network):
    job = jobs.over(network(3), 6, *FLAGS)
    before = job.in_version(0, 6)
    with job.network.hosts[0].without_address():
        without_the_head(job)
        head_goes_on(job, before)
    assert len(job.finish(among=[0])) == 2


def test_pause_of_all_launchers_loses_no_host(jobs, network):
    job = jobs.over(network(3), 6, *FLAGS)
    before = job.in_version(0, 6)
    for launcher in job.launchers:
        launcher.signal(signal.SIGSTOP)
    time.sleep(TIMEOUT_S + 1)  # is what is tried here
    for launcher in job.launchers:
        launcher.signal(signal.SIGCONT)
    time.sleep(TIMEOUT_S + 1)  # what must not happen takes that long
    assert len(job.finish()) == 6
    assert "host lost: " not in job.output
    assert before == job.in_version(0, 6)


def test_head_node_paused_for_too_long_is_left_by_all_hosts(jobs, network):
    job = jobs.over(network(3), 6, *FLAGS)
    before = job.in_version(0, 6)
    with job.network.hosts[0].paused():
        without_the_head(job)
    head_goes_on(job, before)
    assert len(job.finish(among=[0])) == 2


@pytest.mark.parametrize(
    "how", ["reset", pytest.param("cut", marks=pytest.mark.long), pytest.param("paused", marks=pytest.mark.long)]
)
def test_without_watch_mode_the_last_line_names_the_host(how, jobs, network):
    job = jobs.over(network(3), 6, *FLAGS, watch=False)
    job.in_version(0, 6)
    hosts = job.network.hosts
    with hosts[1].refusing(hosts[2]) if how == "reset" else getattr(hosts[1], how)():
        job.launchers[0].assert_exit(1)
    lost = hosts[2 if how == "reset" else 1].address
    assert job.launchers[0].stderr[-1].startswith(f"kungfu-run: host {lost} is lost: "), job.output
    for launcher in job.launchers[1:]:
        launcher.assert_exit(1)
    assert "goes on without" not in job.output
