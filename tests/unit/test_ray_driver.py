"""When a job on Ray ends, and what its driver makes of Ray's own failures; agents and Ray are stand-ins."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import Sitting, StoreUnreachableError
from ms_kungfu.launcher.hosts import Host
from ms_kungfu.launcher.options import parse_command_line
from ms_kungfu.launcher.seat import Record
from ms_kungfu.launcher.versions import ClusterVersions

pytest.importorskip("ray")
from ms_kungfu.ray import cluster, driver

ETCD, HTTP = "etcd://127.0.0.1:2379/job", "http://127.0.0.1:9100/config"
PORT = 12345
INT, TERM = signal.SIGINT, signal.SIGTERM


class Agent:
    """Of a host whose kungfu-run ends with `codes[signal]` by a signal. `ends`: with that, as soon as it is heard."""

    def __init__(self, ends=None, codes=None):
        self.ends, self.codes, self.signals = ends, codes or {}, []
        self.output = self._method(lambda: [(1, b"step\n")] if self.ends is None else None)
        self.code = self._method(lambda: self.ends)
        self.signal = self._method(self._take)

    @staticmethod
    def _method(call):
        return SimpleNamespace(remote=lambda *words: call if not words else call(*words))

    def _take(self, number):
        self.signals.append(number)
        self.ends = self.codes.get(number)


def record(end=None, port=PORT):
    first = Cluster(runners=(PeerID("a", port), PeerID("b", port)), workers=(PeerID("a", 1), PeerID("b", 1)))
    versions = ClusterVersions(chosen=0)
    return Record("job", "a", first, (Host("a", 1), Host("b", 1)), versions, end=end).to_json()


@pytest.fixture
def follow(monkeypatch):
    """Follows a job on the hosts a, the head and the driver's, and b; `kept`: what the store has, or raises."""

    def run(url, a, b, kept=None, signals=None):
        def look():
            if isinstance(kept, Exception):
                raise kept
            return Sitting(kept, 1)

        monkeypatch.setattr(driver, "open_seat", lambda *_, **__: SimpleNamespace(look=look))
        job = driver.Driver(parse_command_line(["-engine=ray", "true"]))
        hosts = {name: driver._Host(name, name, 1, agent=agent) for name, agent in (("a", a), ("b", b))}
        job._hosts, job._head, job._url, job._port = hosts, hosts["a"], url, PORT
        job._watch = SimpleNamespace(answer=lambda: None, silent_s=lambda: 0.0)
        job._signals = [] if signals is None else signals
        for host in hosts.values():
            host.listen()
        return job._follow()

    # The head is heard first.
    monkeypatch.setattr(driver.ray, "wait", lambda calls, timeout: (calls[:1], calls[1:]))
    monkeypatch.setattr(driver.ray, "get", lambda call: call())
    monkeypatch.setattr(cluster, "own_node", lambda: "a")
    monkeypatch.setattr(cluster, "end_agent", lambda agent: None)
    monkeypatch.setattr(driver, "_LAST_WORDS_S", 0.05)
    return run


@pytest.mark.parametrize("kept", [None, record(end=(0, None)), record(port=PORT + 1), StoreUnreachableError("away")])
def test_the_job_ends_with_its_head_unless_the_store_says_that_others_go_on(follow, kept):
    assert follow(ETCD, Agent(3), Agent(), kept) == 3
    assert follow(HTTP, Agent(3), Agent(), kept) == 3


def test_where_the_heads_host_leaves_or_is_lost_the_status_is_that_of_who_ends_with_the_job(follow):
    assert follow(ETCD, Agent(0), Agent(3), record()) == 3
    assert follow(ETCD, Agent(137), Agent(0), record()) == 0


def test_a_sigterm_ends_the_job_and_has_no_host_leave_it(follow):
    head = Agent(codes={INT: 130, TERM: 0})
    assert follow(ETCD, head, Agent(), record(), [TERM]) == 143
    assert head.signals == [INT]


def test_a_sigterm_is_passed_on_as_one_where_no_seat_moves(follow):
    head = Agent(codes={INT: 130, TERM: 143})
    assert follow(HTTP, head, Agent(), None, [TERM]) == 143
    assert head.signals == [TERM]


def test_a_signal_reaches_the_others_where_the_head_has_gone(follow):
    other, signals = Agent(codes={INT: 130}), []

    def output():
        if not signals:
            signals.append(TERM)
        return [] if other.ends is None else None

    other.output = Agent._method(output)
    assert follow(ETCD, Agent(0), other, record(), signals) == 143
    assert other.signals == [INT]
