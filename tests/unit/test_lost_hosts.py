"""Which hosts are lost: whose lease has run out, and which go if some don't reach each other."""

from __future__ import annotations

import itertools
import random

import pytest

from ms_kungfu.launcher.state.lost_hosts import Leases, to_evict

A, B, C, D, E = "abcde"
ORDER = (A, B, C, D, E)


def look(leases, begin, end, heard):
    """Looks as often as one should; the first answer that isn't empty, and when."""
    for step in range(round((end - begin) / leases.period_s) + 1):
        now = begin + step * leases.period_s
        lost = leases.run_out(now, {who: min(when, now) for who, when in heard.items()})
        if lost:
            return lost, now
    return [], end


def test_only_the_silent_host_is_lost_after_the_limit():
    lost, when = look(Leases(10), 0, 30, {A: 3, B: 100})
    assert lost == [A]
    assert 13 <= when <= 13.5


def test_short_limit_is_checked_often_enough():
    leases = Leases(0.4)
    assert leases.period_s <= 0.1
    assert look(leases, 0, 2, {A: 1})[1] == pytest.approx(1.4, abs=0.06)


def test_paused_observer_gives_every_host_the_whole_time_again():
    leases = Leases(10)
    assert look(leases, 0, 5, {A: 5, B: 5}) == ([], 5)
    # Stopped from 5 to 40. B is heard again, A isn't.
    lost, when = look(leases, 40, 60, {A: 5, B: 100})
    assert lost == [A]
    assert 50 <= when <= 50.5


def test_fenced_host_has_only_a_moment_to_read():
    leases = Leases(10, after_pause_s=0.5)
    assert look(leases, 0, 5, {A: 5}) == ([], 5)
    assert leases.run_out(40, {A: 5}) == []
    assert look(leases, 40.5, 60, {A: 5}) == ([A], 40.5)


def test_a_look_that_is_a_little_late_changes_nothing():
    leases = Leases(10)
    leases.run_out(9, {A: 0})
    assert leases.run_out(10.2, {A: 0}) == [A]


# ---- the hosts that go ----

ONE_EACH = dict.fromkeys(ORDER, 1)


def test_fully_connected_hosts_all_stay():
    assert to_evict([], ONE_EACH, ORDER, A) == []


def test_head_node_stays():
    assert to_evict([(B, A)], ONE_EACH, ORDER, A) == [B]
    assert to_evict([(A, B), (C, B), (A, D)], ONE_EACH, ORDER, A) == [B, D]


def test_host_that_several_do_not_reach_is_removed():
    assert to_evict([(B, C), (D, C), (C, E)], ONE_EACH, ORDER, A) == [C]
    assert to_evict([(B, C), (D, C), (C, E)], {**ONE_EACH, C: 9}, ORDER, A) == [C]  # fewest hosts, whatever they have


def test_of_two_the_one_with_fewer_workers_goes_and_of_equals_the_later():
    assert to_evict([(B, C)], ONE_EACH, ORDER, A) == [C]
    assert to_evict([(C, B)], {**ONE_EACH, C: 2}, ORDER, A) == [B]
    assert to_evict([(B, C), (C, D)], ONE_EACH, ORDER, A) == [C]


def test_host_removed_for_the_head_node_heals_other_pairs():
    assert to_evict([(A, B), (B, C), (C, D)], ONE_EACH, ORDER, A) == [B, D]


def test_removed_hosts_are_the_best_choice_of_all():
    choose = random.Random(7)
    hosts = [f"h{number}" for number in range(8)]
    for _ in range(300):
        pairs = list(itertools.combinations(hosts, 2))
        apart = choose.sample(pairs, choose.randrange(10))
        workers = {host: choose.randrange(1, 4) for host in hosts}
        found = to_evict(apart, workers, hosts, hosts[0])
        possible = [
            set(some)
            for count in range(len(hosts))
            for some in itertools.combinations(hosts[1:], count)
            if all(set(pair) & set(some) for pair in apart)
        ]
        best = min((len(some), sum(workers[host] for host in some)) for some in possible)
        assert set(found) in possible
        assert (len(found), sum(workers[host] for host in found)) == best


def test_many_hosts_cut_in_halves_are_healed_without_trying_everything():
    hosts = [f"h{number:02}" for number in range(64)]
    apart = [(one, other) for one in hosts[:32] for other in hosts[32:]]
    assert to_evict(apart, dict.fromkeys(hosts, 1), hosts, hosts[0]) == hosts[32:]
    assert to_evict(apart[32:], dict.fromkeys(hosts, 1), hosts, hosts[0]) == hosts[1:32]
    apart = [(hosts[number], hosts[number + 1]) for number in range(2, 62, 2)]
    assert to_evict(apart, dict.fromkeys(hosts, 1), hosts, hosts[0]) == hosts[3:62:2]
