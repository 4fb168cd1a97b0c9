"""When a job on Ray ends, and what its driver makes of Ray's own failures; agents and Ray are stand-ins."""

from __future__ import annotations

import signal
from types import SimpleNamespace

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import LeadershipState, StoreUnreachableError
from ms_kungfu.launcher.options import parse_command_line
from ms_kungfu.launcher.state.hosts import Host
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot
from ms_kungfu.launcher.state.versions import ClusterVersions
from ms_kungfu.ray.placing import Node

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


def snapshot(end=None, port=PORT):
    first = Cluster(runners=(PeerID("a", port), PeerID("b", port)), workers=(PeerID("a", 1), PeerID("b", 1)))
    versions = ClusterVersions({0: first}, 0)
    return LeaderSnapshot("job", "a", first, (Host("a", 1), Host("b", 1)), versions, end=end).to_json()


@pytest.fixture
def follow(monkeypatch):
    """Follows a job on the hosts a, the controller and the driver's, and b; `kept`: what the store has, or raises."""

    def run(url, a, b, kept=None, signals=None):
        def look():
            if isinstance(kept, Exception):
                raise kept
            return LeadershipState(kept, 1)

        monkeypatch.setattr(driver, "open_leadership", lambda *_, **__: SimpleNamespace(look=look))
        job = driver.Driver(parse_command_line(["-engine=ray", "true"]))
        hosts = {name: driver._Host(name, name, 1, agent=agent) for name, agent in (("a", a), ("b", b))}
        job._hosts, job._head, job._url, job._port = hosts, hosts["a"], url, PORT
        job._watch = SimpleNamespace(answer=lambda: None, silent_s=lambda: 0.0)
        job._signals = [] if signals is None else signals
        for host in hosts.values():
            host.listen()
        return job._follow()

    # The controller is heard first.
    monkeypatch.setattr(driver.ray, "wait", lambda calls, timeout: (calls[:1], calls[1:]))
    monkeypatch.setattr(driver.ray, "get", lambda call: call())
    monkeypatch.setattr(cluster, "own_node", lambda: "a")
    monkeypatch.setattr(cluster, "end_agent", lambda agent: None)
    monkeypatch.setattr(driver, "_LAST_WORDS_S", 0.05)
    return run


@pytest.mark.parametrize(
    "kept", [None, snapshot(end=(0, None)), snapshot(port=PORT + 1), StoreUnreachableError("away")]
)
def test_job_ends_with_its_head_node_unless_other_hosts_may_lead(follow, kept):
    assert follow(ETCD, Agent(3), Agent(), kept) == 3
    assert follow(HTTP, Agent(3), Agent(), kept) == 3


def test_exit_status_without_the_head_node_is_that_of_the_last_host(follow):
    assert follow(ETCD, Agent(0), Agent(3), snapshot()) == 3
    assert follow(ETCD, Agent(137), Agent(0), snapshot()) == 0


def test_a_sigterm_ends_the_job_and_has_no_host_leave_it(follow):
    head = Agent(codes={INT: 130, TERM: 0})
    assert follow(ETCD, head, Agent(), snapshot(), [TERM]) == 143
    assert head.signals == [INT]


def test_sigterm_is_passed_on_if_the_controller_cannot_move(follow):
    head = Agent(codes={INT: 130, TERM: 143})
    assert follow(HTTP, head, Agent(), None, [TERM]) == 143
    assert head.signals == [TERM]


def test_signal_reaches_the_other_hosts_if_the_head_node_is_lost(follow):
    other, signals = Agent(codes={INT: 130}), []

    def output():
        if not signals:
            signals.append(TERM)
        return [] if other.ends is None else None

    other.output = Agent._method(output)
    assert follow(ETCD, Agent(0), other, snapshot(), signals) == 143
    assert other.signals == [INT]


def test_an_agent_that_ray_never_started_is_not_asked_what_it_has(monkeypatch):
    """It would never answer."""
    monkeypatch.setattr(cluster, "end_agent", lambda agent: None)
    job = driver.Driver(parse_command_line(["-engine=ray", "true"]), b"function")
    job._hosts["b"] = driver._Host("b", "b", 1, agent=object())
    job._drop(job._hosts["b"])
    assert not job._hosts


# ---- a Ray that can't be had ----


@pytest.fixture
def refusal(monkeypatch):
    """What the user is told where `ray.init` raises `error`."""

    def run(error=None, words=(), environment=None):
        def init(address, **_):
            asked.append(address)
            raise error

        asked = []
        monkeypatch.setattr(driver.ray, "init", init)
        monkeypatch.delenv("RAY_ADDRESS", raising=False)
        if environment is not None:
            monkeypatch.setenv("RAY_ADDRESS", environment)
        with pytest.raises(driver.JobError) as found:
            driver.run(parse_command_line(["-engine=ray", *words, "true"]))
        return str(found.value), asked

    return run


def test_exception_of_ray_at_the_start_is_reported_in_a_sentence(refusal):
    """It has a bare `Exception` for a raylet that takes too long."""
    assert refusal(Exception("The node timed out.\nMore"))[0] == "Ray doesn't start: The node timed out."
    assert refusal(OSError(28, "No space left"), ["-address=local"])[0].startswith("-address local: ")


@pytest.mark.parametrize("address", ["nonsense", "nonsense:", ":80", "a:b", "a:0", "a:65536"])
def test_an_address_that_is_none_is_refused_by_what_one_is(refusal, address):
    told = (
        f"{address}: that is not an address; give HOST:PORT, 'auto' (a cluster that runs here) or 'local' (a new one)"
    )
    assert refusal(words=[f"-address={address}"]) == (f"-address {told}", [])
    assert refusal(words=[], environment=address) == (f"RAY_ADDRESS={told}", [])


def test_missing_address_means_the_variable_the_local_cluster_or_a_new_one(refusal):
    assert refusal(ConnectionError("none runs"))[1] == ["auto", "local"]
    assert refusal(ValueError("no"), environment="local")[1] == ["local"]
    told, asked = refusal(environment="127.0.0.1:1")
    assert told.startswith("RAY_ADDRESS=127.0.0.1:1: no Ray cluster answers there (Connection refused); start one")
    assert not asked  # and no other one instead


def test_unnamed_ray_cluster_is_marked_as_found(monkeypatch):
    monkeypatch.setattr(cluster.ray, "init", lambda *_, **__: None)
    assert cluster.connect(None, None) == cluster.Connection(ours=True, found=True)
    assert cluster.connect("auto", None) == cluster.connect("local", None) == cluster.Connection(True, False)


def test_node_that_ray_has_just_declared_dead_is_reported(monkeypatch):
    monkeypatch.setattr(cluster, "wish", lambda *_: None)
    monkeypatch.setattr(cluster, "nodes", lambda: [Node("b", "10.0.0.2", {"CPU": 1.0})])
    monkeypatch.setattr(cluster, "own_node", lambda: "a")
    with pytest.raises(driver.JobError, match="Ray has just declared this program's node dead"):
        driver.Driver(parse_command_line(["-engine=ray", "true"])).run()
