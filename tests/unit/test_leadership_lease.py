"""Which host leads, whatever becomes of leases and answers; a small store in memory stands for etcd."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import replace
from types import SimpleNamespace

import pytest

from ms_kungfu.cluster_store import LeadershipLease, LeadershipLostError, LeadershipState, StoreUnreachableError
from ms_kungfu.launcher.controller import etcd_lease

LEASE_S = 8.0
MOST_OF_A_LEASE_S = 5.0  # two of them are more than one lease


class Keys:
    """The lease's two keys, as etcd keeps them: one revision for all, and leases that expire without a
    renewal.

    `fates`: what becomes of the next writes: "answer lost"; "sent twice", to the next member where the first one's
    answer is lost; "under way", if it is unknown whether it will be done: by `done_late`, with its number.
    """

    def __init__(self):
        self.now_s = 0.0
        self.snapshots = []  # all that were written
        self.fates = []
        self._state = LeadershipState()
        self._leases = {}  # -> when it is over
        self._hangs_on = 0
        self._under_way = []

    def look(self):
        if self._state.holder and self._leases[self._hangs_on] <= self.now_s:
            self._state = replace(self._state, holder="", since=0)
        return self._state

    def swap(self, seen, snapshot, holder="", lease=0):
        fate = self.fates.pop(0) if self.fates else ""
        write = functools.partial(self._swap, seen, snapshot, holder, lease)
        if fate == "under way":
            self._under_way.append(write)
            raise StoreUnreachableError("nobody answers")
        answer = write()
        if fate == "answer lost":
            raise StoreUnreachableError("nobody answers")
        return write() if fate == "sent twice" else answer

    def _swap(self, seen, snapshot, holder, lease):
        now = self.look()
        if (now.revision, now.since) != (seen.revision, seen.since):
            return False, now
        self.snapshots.append(snapshot)
        self._state = replace(now, snapshot=snapshot, revision=100 + len(self.snapshots))
        if lease:
            self._state = replace(self._state, holder=holder, since=now.since or self._state.revision)
            self._hangs_on = lease
        return True, self._state

    def done_late(self, number):
        assert self._under_way[number]()[0]

    def grant(self, seconds):
        lease = len(self._leases) + 1
        self._leases[lease] = self.now_s + seconds
        return lease, seconds

    def renew(self, lease):
        if self._leases.get(lease, 0.0) <= self.now_s:
            return False
        self._leases[lease] = self.now_s + LEASE_S
        return True

    def revoke(self, lease):
        self._leases[lease] = 0.0

    @property
    def steps(self):
        return [snapshot["step"] for snapshot in self.snapshots]


@pytest.fixture
def keys():
    return Keys()


def held(keys, host="one"):
    lease = LeadershipLease(keys, host, LEASE_S)
    lease.take(keys.look(), {"step": 0})
    return lease


def assert_keeps_the_lease(lease, keys):
    """For longer than a lease, as it is the holder's that is renewed, and until it leaves."""
    state = keys.look()
    assert (state.holder, state.since) == ("one", lease.since)
    for _ in range(3):
        keys.now_s += MOST_OF_A_LEASE_S
        lease.renew()
    assert keys.look() == state
    lease.leave()
    assert keys.look().holder == ""


ACTS = {
    "write": lambda lease: lease.write({"step": 9}),
    "renew": lambda lease: lease.renew(),
}
of_either = pytest.mark.parametrize("act", ACTS.values(), ids=ACTS.keys())


@of_either
@pytest.mark.parametrize("is_there", [True, False])
def test_controller_does_not_return_after_another_one_has_decided(keys, act, is_there):
    """Not when that one has died, either: he may have chosen what this one doesn't know."""
    one = held(keys)
    keys.now_s += LEASE_S
    other = LeadershipLease(keys, "other", LEASE_S)
    other.take(keys.look(), {"step": 1})
    other.write({"step": 2})
    if not is_there:
        keys.now_s += LEASE_S
    for _ in range(2):
        with pytest.raises(LeadershipLostError):
            act(one)
    assert keys.steps == [0, 1, 2]
    assert keys.look().holder == ("other" if is_there else "")


@of_either
def test_controller_with_an_expired_lease_returns_to_its_own_writes(keys, act):
    one = held(keys)
    one.write({"step": 1})
    keys.now_s += LEASE_S
    act(one)
    assert keys.steps == [0, 1, 9 if act is ACTS["write"] else 1]
    assert_keeps_the_lease(one, keys)


@of_either
@pytest.mark.parametrize("again", ACTS.values(), ids=ACTS.keys())
def test_returning_controller_recognizes_its_unanswered_lease(keys, act, again):
    one = held(keys)
    keys.now_s += LEASE_S
    keys.fates = ["answer lost"]
    if act is ACTS["write"]:
        keys.fates.insert(0, "")  # the first try finds that the lease is over
    with pytest.raises(StoreUnreachableError):
        act(one)
    again(one)
    if again is ACTS["write"]:
        assert keys.steps[-1] == 9
    assert_keeps_the_lease(one, keys)


def test_two_hosts_that_saw_a_free_lease_elect_one_leader(keys):
    seen = keys.look()
    one = held(keys)
    other = LeadershipLease(keys, "other", LEASE_S)
    for found in (seen, keys.look()):
        with pytest.raises(LeadershipLostError, match="one has the lease"):
            other.take(found, {"step": 1})
    assert keys.steps == [0]
    assert_keeps_the_lease(one, keys)


def test_a_holder_of_the_same_name_is_not_this_one(keys):
    """A controller that was started again on its host, while the lease of its life before lasts."""
    held(keys)
    again = LeadershipLease(keys, "one", LEASE_S)
    with pytest.raises(LeadershipLostError, match="one has the lease"):
        again.take(keys.look(), {"step": 0})
    assert again.since == 0
    keys.now_s += LEASE_S
    again.take(keys.look(), {"step": 1})
    assert keys.steps == [0, 1]
    assert_keeps_the_lease(again, keys)


def test_a_write_that_was_sent_twice_is_known_by_its_mark(keys):
    """To two members of the store: the first has done it, so the second refuses it."""
    keys.fates = ["sent twice"]
    one = held(keys)
    keys.fates = ["sent twice"]
    one.write({"step": 1})
    assert keys.steps == [0, 1], "each once"
    assert_keeps_the_lease(one, keys)


def test_remains_of_an_unanswered_write_are_overwritten(keys):
    one = held(keys)
    keys.fates = ["answer lost"]
    with pytest.raises(StoreUnreachableError):
        one.write({"step": 1})
    one.write({"step": 2})
    assert keys.steps == [0, 1, 2]
    assert_keeps_the_lease(one, keys)


@pytest.mark.parametrize("done", [0, 1, 2])
def test_successful_one_of_several_tries_has_the_lease(keys, done):
    """Each has a lease of its own, and only one of them keeps the lease."""
    one = LeadershipLease(keys, "one", LEASE_S)
    keys.fates = ["under way"] * 3
    for step in range(3):
        with pytest.raises(StoreUnreachableError):
            one.take(keys.look(), {"step": step})
    keys.done_late(done)
    one.take(keys.look(), {"step": 3})
    assert keys.steps == [done], "it has the lease already"
    assert_keeps_the_lease(one, keys)


def test_a_lease_lasts_as_long_as_the_store_says(keys, monkeypatch):
    monkeypatch.setattr(keys, "grant", lambda seconds: (1, seconds + 2))
    monkeypatch.setattr(keys, "_leases", {1: LEASE_S + 2})
    assert held(keys).lease_s == LEASE_S + 2


def test_cancelled_call_holds_deadlines_until_the_store_answers(monkeypatch):
    """The call goes on in its thread."""
    monkeypatch.setattr(etcd_lease, "_LONG_S", 0.001)
    holds = []

    async def run():
        answer, held = asyncio.Event(), asyncio.Event()

        def on_store_awaited(yes):
            holds.append(yes)
            held.set()

        machine = SimpleNamespace(in_thread=lambda function: answer.wait())
        term = SimpleNamespace(lease=SimpleNamespace(lease_s=0.002), snapshot=None)
        leader = etcd_lease.EtcdLease(term, machine, "", "a", lambda why: None, lambda: None, on_store_awaited)
        call = asyncio.ensure_future(leader._call(lambda: None))
        await held.wait()
        call.cancel()
        await asyncio.wait([call])
        assert call.cancelled()
        assert holds == [True]
        answer.set()
        await leader._call(lambda: None)
        assert holds == [True, False]
        assert not leader.awaits_store

    asyncio.run(run())
