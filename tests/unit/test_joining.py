"""Hosts that leave a job and join it: what is said on the command line, and what is decided."""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import msgspec
import pytest
from msgspec.structs import replace as replace_fields
from test_cluster_versions import A, B, cluster, joining_worker, member, started
from test_launcher_coordinator import AWAY, over_hosts

from ms_kungfu._decoding import ProtocolError
from ms_kungfu._flags import UsageError
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import LeadershipState, StoreUnreachableError
from ms_kungfu.launcher import joining
from ms_kungfu.launcher.agent import agent, departure, job_status, succession
from ms_kungfu.launcher.control import RefusedError
from ms_kungfu.launcher.controller.nodes import JobNodes
from ms_kungfu.launcher.joining import joining_host, options_from, terms_of
from ms_kungfu.launcher.options import JoinRequest, parse_command_line
from ms_kungfu.launcher.state.hosts import Host, HostError, Hosts, parse_hosts
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot
from ms_kungfu.launcher.state.policy import Action, hosts_leave, signal_name
from ms_kungfu.launcher.state.versions import ClusterVersions, Grant, Stay
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.codec import encode

URL = "http://10.0.0.1:9100/config"
SECRET = "ab" * 16


# ---- the command line ----


def test_join_flags_make_a_join_request(monkeypatch):
    monkeypatch.setenv("KUNGFU_JOB_SECRET", SECRET)
    request = parse_command_line(["-join", URL, "-self", "[fd00::3]:4", "-q", "-logdir", "logs", "-logfile", "run.log"])
    assert isinstance(request, JoinRequest)
    assert (request.url, request.own, request.interface, request.secret) == (URL, Host("[fd00::3]", 4), None, SECRET)
    assert request.own_flags["quiet"]
    assert str(request.own_flags["logfile"]) == "logs/run.log"
    assert parse_command_line(["-join", URL, "-nic", "eth0"]).interface == "eth0"
    assert parse_command_line(["-self=10.0.0.3", f"-join={URL}"]).own == Host("10.0.0.3", 1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-np", "2"], "-np comes from the head node of the joined job"),
        (["-w"], "-w comes from the head node"),
        (["-H", "10.0.0.1:2"], "-H comes from the head node"),
        (["python", "train.py"], "-join runs the program of the job; leave python train.py out"),
        (["-self", "10.0.0.3:4,10.0.0.4:4"], "is not one host with slots"),
        (["-self", "10.0.0.3:4:10.1.0.3"], "is not one host with slots"),
        (["-self", "10.0.0.3:none"], "-self: .* is not host:slots"),
        (["-self", "10.0.0.3", "-nic", "eth0"], "-self and -nic both set"),
    ],
)
def test_flag_that_contradicts_join_is_refused(monkeypatch, words, sentence):
    monkeypatch.setenv("KUNGFU_JOB_SECRET", SECRET)
    with pytest.raises(UsageError, match=sentence):
        parse_command_line(["-join", URL, *words])


def test_a_host_that_joins_needs_the_secret(monkeypatch):
    monkeypatch.delenv("KUNGFU_JOB_SECRET", raising=False)
    with pytest.raises(UsageError, match="require a shared secret"):
        parse_command_line(["-join", URL])
    assert parse_command_line(["-join", URL, "-no-secret"]).secret is None


# ---- what the controller makes of it ----


@pytest.mark.parametrize(
    ("name", "slots"),
    [("a", 0), ("a", "2"), ("a", True), ("a", None), ("a,b", 1), ("A", 1), ("a:1", 1), ("", 1)],
)
def test_no_host_has_such_a_name_or_so_many_slots(name, slots):
    with pytest.raises(ProtocolError, match="a host can't join as"):
        joining_host(name, slots)


def test_joining_host_gets_the_job_and_its_hosts():
    options = parse_command_line(["-port", "4000", "-cores-per-worker", "1", "sh", "-c", "true"])
    hosts = Hosts(parse_hosts("a:1,b:2,c:3"), "a").without("b").joined_by(joining_host("d", 4))
    terms = terms_of(options, hosts)
    assert (terms.command, terms.head) == ([b"sh", b"-c", b"true"], "a")
    assert terms.hosts == [("a", 1), ("c", 3), ("d", 4)]
    assert (terms.flags["control_port"], terms.flags["cores_per_worker"]) == (4000, 1)


def test_a_host_that_joins_goes_by_the_flags_that_the_others_have():
    """Each that its launcher looks at is from the controller, or a host's own affair, or a job's that it can join."""
    trees = [ast.parse(inspect.getsource(module)) for module in (agent, departure, job_status, succession)]
    used = {
        node.attr
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("options", "self._options", "self.options")
    }
    own = {"host", "hosts", "secret", "in_slurm", "joins", "delay_s", "timeout_s"}
    own |= {"config_server"}  # which it was told, and may reach by another name
    given = parse_command_line(
        ["-np", "3", "-port", "4000", "-cores-per-worker", "2", "-allow-nvlink", "-leave-grace", "7s", "-w",
         "-config-server", URL, "-host-timeout", "3s", "-strategy", "ring", "-recover", "replace", "-min-np", "2",
         "-port-range", "4001-4100", "-peer-timeout", "5s", "-max-restarts", "7", "-cpu-isa", "avx2",
         "-dashboard", ":8000", "sh"]
    )  # fmt: skip
    hosts = replace_fields(
        Hosts(parse_hosts("10.0.0.1:2,10.0.0.2:2"), "10.0.0.1"), most=5, placement="fill", ports=range(5, 9)
    )
    request, own_host = JoinRequest(URL, None, None, None, {}), Host("10.0.0.3", 4)
    told = m.TERMS(encode(terms_of(given, hosts, 60.0)))
    options = options_from(told, request, own_host)
    assert {name: getattr(options, name) for name in used - own} == {name: getattr(given, name) for name in used - own}
    assert used > own
    # And, should it have to lead the job, what only the controller looks at.
    differ = {name for name, value in vars(options).items() if value != getattr(given, name)}
    assert differ == {"hosts", "joins", "timeout_s"}
    assert (options.timeout_s, options.hosts.named("10.0.0.2").slots) == (60.0, 2)
    assert (options.hosts.most, options.hosts.placement, options.hosts.ports) == (5, "fill", range(5, 9))
    for name, value in [
        ("strategy", "FASTEST"), ("strategy", 1), ("leave_grace_s", "7s"), ("recover", "x"), ("ports", 3),
        ("cpu_isa", "fastest"), ("cpu_isa", 2), ("dashboard", "x"), ("dashboard", 1),
    ]:  # fmt: skip
        with pytest.raises((ValueError, TypeError)):
            options_from(msgspec.structs.replace(told, flags={**told.flags, name: value}), request, own_host)


def test_hosts_come_and_go():
    hosts = Hosts(parse_hosts("a:2,b:2,c:2"), "a").letting_go("b")
    assert hosts.slots_by_host == {"a": 2, "c": 2}
    a, b = PeerID("a", 7), PeerID("b", 7)
    with pytest.raises(HostError, match="worker b:7 is on host b, which is leaving the job; remove the worker"):
        hosts.check(Cluster((a, b), (), 1), (a,))
    hosts.check(Cluster((a, b), (), 1), (a, b), going=[b])  # it is there yet
    gone = hosts.without("b")
    assert (gone.leaving, gone.lost) == (set(), {"b"})
    back = gone.joined_by(Host("b", 5)).joined_by(Host("d", 1))
    assert back.slots_by_host == {"a": 2, "b": 5, "c": 2, "d": 1}  # in its old place
    assert back.limit == "a:2,b:5,c:2,d:1"
    told = back.described(Cluster((a,), (PeerID("a", 9), PeerID("c", 9)), 1))
    assert [str(runner) for runner in told.runners] == ["a:9", "b:9", "c:9", "d:9"]


@pytest.mark.parametrize(("left", "least", "goes"), [(2, 2, True), (1, 2, False), (1, 1, True), (0, 1, False)])
def test_a_host_leaves_where_enough_stay_and_else_the_job_ends(left, least, goes):
    verdict = hosts_leave("b", left, least)
    if goes:
        assert (verdict.action, verdict.reason) == (Action.CONTINUE, "")
    else:
        assert (verdict.action, verdict.exit_code) == (Action.FAIL, 143)
        assert verdict.reason.startswith("interrupted by SIGTERM on host b, without which ")


@pytest.mark.parametrize(
    ("number", "code", "reason"), [(15, 143, "has not released this host"), (2, 130, "has not ended the job")]
)
def test_leader_that_ends_late_names_the_store(monkeypatch, number, code, reason):
    ended, nothing = [], lambda *_: None
    now = SimpleNamespace(call_later=lambda seconds, function, *arguments: function(*arguments))
    monkeypatch.setattr(departure.asyncio, "get_running_loop", lambda: now)
    controller = SimpleNamespace(is_over=False, has_stepped_down=False, moves=True, store_error=None,
                                 host_leaves=nothing, interrupted=nothing)  # fmt: skip
    for error in (None, StoreUnreachableError("etcd://e/job: Connection refused")):
        controller.store_error = error
        own = SimpleNamespace(controller=controller, for_ever=None)
        options = parse_command_line(["-np", "1", "-w", "sh"])
        leaving = departure.Departure(options, own, nothing, lambda *how: ended.append(how), lambda: False, lambda: 0.0)
        leaving.on_signal(number)
    words = f"kungfu-run: interrupted by {signal_name(number)}, but the controller {reason}"
    because = ", because the store accepts no change: etcd://e/job: Connection refused"
    assert ended == [(code, words), (code, words + because)]


@pytest.mark.parametrize(("awaits", "when"), [(False, "after this step"), (True, "when the store answers")])
def test_host_that_leaves_is_logged_with_when_its_workers_leave(monkeypatch, caplog, awaits, when):
    job = MagicMock(resumes=False)
    job.course.is_over, job.leadership.awaits_store = False, awaits
    leaving = JobNodes(job, *[MagicMock()] * 5)
    monkeypatch.setattr(leaving, "has_enough_who_stay", lambda: False)
    leaving.host_leaves("a")
    assert caplog.messages == [f"host leaving: host=a reason=SIGTERM. Its workers leave {when}"]


# ---- what is written to the store ----


def test_each_revision_omits_a_leaving_host():
    own = PeerID("127.0.0.1", 10000)
    job = over_hosts(own, *AWAY, flags=())
    job.hosts = job.hosts.letting_go("127.0.0.2")
    first = job.revision(-1, ended=[], living=[own, *AWAY], taken_ports=())
    assert (first.workers, first.slots) == ((own,), {"127.0.0.1": 2})
    again = Cluster((own, AWAY[0]), (), 2, slots=first.slots)
    job.accept(again, own=False, ended=[], living=[own, *AWAY])
    job.last_version = 2
    second = job.revision(-1, ended=[], living=[own, *AWAY], taken_ports=())
    assert (second.workers, second.version) == ((own,), 3)
    job.accept(second, own=True, ended=[], living=[own])
    job.last_version = 3
    assert job.revision(-1, ended=[], living=[own], taken_ports=()) is None


def test_last_host_is_not_removed():
    own = PeerID("127.0.0.1", 10000)
    job = over_hosts(own, *AWAY, flags=())
    job.hosts = job.hosts.letting_go("127.0.0.2")
    assert job.members_to_leave(AWAY) == set()
    assert job.members_to_leave([own, *AWAY]) == {*AWAY}


def test_slots_of_a_joining_host_make_a_version_of_the_same_workers():
    own = PeerID("127.0.0.1", 10000)
    job = over_hosts(own, flags=())
    job.newest = job.hosts.described(job.newest)
    assert job.revision(-1, ended=[], living=[own], taken_ports=()) is None
    job.hosts = job.hosts.joined_by(Host("127.0.0.3", 4))
    told = job.revision(-1, ended=[], living=[own], taken_ports=())
    assert (told.workers, told.slots) == ((own,), {"127.0.0.1": 2, "127.0.0.2": 2, "127.0.0.3": 4})
    job.accept(told, own=True, ended=[], living=[own])
    job.last_version = told.version
    assert job.revision(-1, ended=[], living=[own], taken_ports=()) is None


# ---- versions ----


def test_versions_that_were_known_when_a_host_came_back_mean_the_old_one():
    away = PeerID("127.0.0.2", 10000)
    versions = started(cluster(0, A, away), cluster(1, A, B, away))
    versions.lose_host(away.host)
    versions.record_end(away, 0)
    versions.host_is_back(away.host)
    assert versions.answer(member(A, 0, 1)) == Stay()
    versions.admit(cluster(2, A))
    assert isinstance(versions.answer(member(A, 0, 2)), Grant)
    versions.admit(cluster(3, A, away))
    versions.ready.add((away, 3))
    assert versions.preparable() == 3
    assert versions.answer(member(A, 2, 3)) == Grant(cluster(3, A, away), 0)
    assert versions.answer(joining_worker(away, 3)) == Grant(cluster(3, A, away), 1)


def test_a_host_that_is_lost_again_is_in_no_version():
    away = PeerID("127.0.0.2", 10000)
    versions = started(cluster(0, A))
    for _ in range(2):
        versions.lose_host(away.host)
        versions.host_is_back(away.host)
    versions.admit(cluster(1, A, away))
    assert versions.lost_host_of(cluster(1, A, away)) is None
    versions.lose_host(away.host)
    assert versions.lost_host_of(cluster(1, A, away)) == away.host
    versions.host_is_back("127.0.0.9")  # that was never there
    assert versions.lost_host_of(cluster(0, PeerID("127.0.0.9", 1))) is None


# ---- hosts that are asked, where the controller moves ----

ETCD = "etcd://e:2379/job"
TERMS = m.Terms([b"sh"], [("127.0.0.2", 2)], "127.0.0.2", None, "even", None, {}, None)
RUNS = Cluster((PeerID("127.0.0.1", 10000),), (PeerID("127.0.0.1", 38080), PeerID("127.0.0.2", 38080)), 0, "j",
               slots={"127.0.0.1": 2, "127.0.0.2": 2})  # fmt: skip


def asked(monkeypatch, leaders, answers, url=ETCD):
    """What a joining host is told, and which hosts were asked. `leaders`: the leader, look by look, or how the job has
    ended; `answers`: of each host, look by look; a host without one doesn't answer. The last ones stay."""
    hosts, now = tuple(Host(f"127.0.0.{n}", 2) for n in (1, 2)), [0.0]
    snapshot = LeaderSnapshot("j", "127.0.0.1", RUNS, hosts, ClusterVersions(clusters={0: RUNS}, committed=0))
    calls, looks = [], iter(leaders)
    last = []

    def look():
        last[:] = [next(looks, last[0] if last else "")]
        if isinstance(last[0], Exception):
            raise last[0]
        end = last[0] if isinstance(last[0], tuple) else None
        return LeadershipState(replace_fields(snapshot, end=end).to_json(), 1, "" if end else last[0], 1)

    async def ask_controller(request, cluster, head, limit_s):
        calls.append(head.host)
        now[0] += limit_s
        said = answers.get(head.host)
        if not said:
            raise joining._NoLeaderError(f"{head} doesn't answer")
        return Host("127.0.0.3", 1), said.pop(0) if len(said) > 1 else said[0]

    async def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(joining, "open_leadership", lambda _: SimpleNamespace(look=look))
    monkeypatch.setattr(joining, "_ask_controller", ask_controller)
    monkeypatch.setattr(joining.asyncio, "sleep", sleep)
    monkeypatch.setattr(joining.asyncio, "get_running_loop", lambda: SimpleNamespace(time=lambda: now[0]))
    store = SimpleNamespace(url=url, servers=("e",), get=lambda: RUNS)
    try:
        asking = joining._terms(JoinRequest(url, None, None, None, {}), store, RUNS)
        with pytest.raises(StopIteration) as done:
            asking.send(None)
        return done.value.value[2], calls
    except RefusedError as error:
        return str(error), calls


def test_host_that_joins_without_a_leader_waits_for_the_next_controller(monkeypatch):
    terms, gone = TERMS, ["127.0.0.1", "", "", "127.0.0.2"]
    assert asked(monkeypatch, gone, {"127.0.0.2": [terms]}) == (terms, ["127.0.0.1"] * 3 + ["127.0.0.2"])
    # The new leader may not know it yet.
    answers = {"127.0.0.2": [m.RegistrationRejected("127.0.0.2 hasn't got the job"), terms]}
    assert asked(monkeypatch, gone, answers)[0] == terms
    # A leader of etcd that has died with the controller.
    assert asked(monkeypatch, [StoreUnreachableError("no leader"), "127.0.0.2"], {"127.0.0.2": [terms]})[0] == terms


def test_joining_host_waits_while_the_head_node_leaves(monkeypatch):
    leaving = msgspec.structs.replace(TERMS, head="127.0.0.1")  # which `hosts` no longer lists
    # The host that has just left doesn't control the job any more, though the lease may still name it.
    answers = {"127.0.0.1": [leaving, m.RegistrationRejected("no job here")], "127.0.0.2": [TERMS]}
    leaders = ["127.0.0.1", "127.0.0.1", "127.0.0.2"]
    assert asked(monkeypatch, leaders, answers) == (TERMS, leaders)
    told, calls = asked(monkeypatch, ["127.0.0.1"], {"127.0.0.1": [leaving]})
    assert told.startswith("the head node of the job, 127.0.0.1:38080, is leaving the job, and no other host has taken")
    assert len(calls) > 8


def test_joining_host_learns_after_some_leases_that_the_job_has_no_leader(monkeypatch):
    told, calls = asked(monkeypatch, [""], {"127.0.0.1": [m.RegistrationRejected("127.0.0.1 hasn't got the job")]})
    assert told.startswith(f"no host controls the job that uses {ETCD}: 127.0.0.1, which controlled it, has failed")
    assert len(calls) > 8
    told, calls = asked(monkeypatch, ["127.0.0.2"], {})
    assert (told, len(calls) > 8) == ("127.0.0.2:38080 doesn't answer", True)


def test_controller_of_a_running_job_is_asked_once(monkeypatch):
    refused = {"127.0.0.1": [m.RegistrationRejected("the job is about to end")]}
    assert asked(monkeypatch, ["127.0.0.1"], refused) == ("the job is about to end", ["127.0.0.1"])
    assert asked(monkeypatch, [""], {}, URL) == ("127.0.0.1:38080 doesn't answer", ["127.0.0.1"])


def test_ended_job_accepts_no_joining_host(monkeypatch):
    told = asked(monkeypatch, [(3, "kungfu-run: worker 0 failed")], {})
    assert told == (f"the job that uses {ETCD} has ended (exit code 3, kungfu-run: worker 0 failed)", [])
    # The next job of this name may be one that doesn't move its controller, and leaves no record.
    snapshot = LeaderSnapshot("j", "a", RUNS, (), ClusterVersions(clusters={0: RUNS}, committed=0))
    assert [snapshot.has(replace(RUNS, version=5, writer=who)) for who in ("j", "another")] == [True, False]
