"""What a member of a cluster knows, without a cluster."""

import math
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from ms_kungfu import comm, membership, runtime
from ms_kungfu.cluster import PeerID
from ms_kungfu.elastic import program, state_transfer
from ms_kungfu.errors import KungFuError
from ms_kungfu.membership import Member, Ports, children, step_agreement
from ms_kungfu.membership.reductions import Outcomes, Reductions


class Core:
    """Four ranks, of which rank 2 died first and rank 1 then; what came of the reductions is told once."""

    def __init__(self):
        self.next = (0, 0, 0, 0, 0)

    def take_reductions(self):
        told, self.next = self.next, (0, 0, 0, 0, 0)
        return told

    def members_of(self, generation):
        return [[0, 1, 2, 3], [0, 1, 3], [0, 3]][generation]


def test_each_owner_hears_of_what_came_since_it_asked():
    core = Core()
    outcomes = Outcomes(core)
    training, dataset = Reductions(outcomes), Reductions(outcomes)
    core.next = (1, 1, 1, 1, 1)
    assert training.take_participants() == [0, 1, 2, 3]
    core.next = (3, 3, 2, 2, 3)
    assert dataset.take_participants() == [0, 3]
    assert training.take_commits() == (3, [1, 2])
    assert dataset.take_commits() == (3, [1, 2])
    assert outcomes.of_nobody.take_participants() == [0, 3]


def test_owner_that_asked_before_the_join_gets_later_changes():
    core = Core()
    member = Member(Ports(core=core))
    dataset = Reductions(member.outcomes)  # a program makes its data before it joins
    member.reset()
    core.next = (2, 2, 1, 2, 2)
    assert dataset.take_participants() == [0, 1, 3]


def test_end_of_a_version_keeps_the_participants_and_drops_the_rest():
    core = Core()
    outcomes = Outcomes(core)
    mine = Reductions(outcomes)
    core.next = (2, 2, 1, 2, 2)
    outcomes.end_version(7)
    assert outcomes.by_version == {7: [0, 1, 3]}
    assert mine.take_commits() == (0, [])


def asked_as(member, question):
    """What `question` answers in another thread, which uses this member."""
    seen = []

    def other():
        membership.use(member)
        seen.append(question())

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    (answer,) = seen
    return answer


def test_a_member_that_is_used_is_this_contexts_alone():
    own = Member(Ports(core=Core()))
    assert asked_as(own, membership.current) is own
    assert membership.current() is not own


def test_process_without_a_launcher_has_no_name():
    with pytest.raises(KungFuError, match="not started by kungfu-run"):
        membership.identity()


def uid_of(version, address):
    member = Member(Ports(core=Core()))
    member.reset(PeerID.parse(address), version)
    return asked_as(member, membership.uid)


def test_a_uid_tells_version_host_and_port_apart():
    assert uid_of(3, "10.0.0.5:10001") == 3 << 48 | 0x0A000005 << 16 | 10001
    addresses = [f"{host}:{port}" for host in ("10.0.0.5", "10.0.0.6", "node-1", "node-2") for port in (10000, 10001)]
    assert len({uid_of(version, address) for version in (0, 1, 70000) for address in addresses}) == 24


def test_until_it_joins_a_worker_has_the_local_rank_it_was_started_for():
    environ = {"RANK_ID": "5", "WORLD_SIZE": "8", "KUNGFU_LOCAL_RANK": "1", "KUNGFU_LOCAL_SIZE": "4"}
    member = Member(Ports(core=Core(), environ=environ))
    member.deferred = True
    seen = []

    def other():
        membership.use(member)
        seen.extend((membership.rank(), membership.local_rank(), membership.size(), membership.local_size()))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == [5, 1, 8, 4]


def test_joining_worker_passes_barriers_until_it_has_joined():
    class WithBarrier(Core):
        barriers = 0

        def barrier(self, name):
            self.barriers += 1

    core = WithBarrier()
    member = Member(Ports(core=core, environ={}))
    member.begun = member.deferred = True
    for barrier in (runtime.run_barrier, comm.barrier):
        asked_as(member, barrier)
    assert core.barriers == 0
    member.deferred = False
    for barrier in (runtime.run_barrier, comm.barrier):
        asked_as(member, barrier)
    assert core.barriers == 2


class FailingCore(Core):
    """Rank 1 of three fails between the exchange of lengths and that of the parts."""

    def __init__(self):
        self.gathered = 0

    def size(self):
        return 3

    def all_gather(self, name, source, out, dtype, kind):
        out[:] = source
        self.gathered += 1
        if self.gathered == 2:
            out[1] = 0


@pytest.mark.parametrize(
    "gather", [lambda: comm.all_gather([7, 8], uneven=True), lambda: comm.all_gather_object([7, 8])]
)
def test_rank_that_fails_amid_uneven_gathering_brings_nothing(gather):
    member = Member(Ports(core=FailingCore(), environ={}))
    member.begun = True
    parts = asked_as(member, gather)
    assert [list(part) for part in parts if part is not None and len(part)] == [[7, 8], [7, 8]]
    assert len(parts) == 3
    assert parts[1] is None or parts[1].shape == (0,)


def test_worker_that_joined_too_early_passes_barriers_and_refuses_others(monkeypatch):
    class Called(Core):
        made = 0

        def barrier(self, *arguments):
            self.made += 1

        all_reduce = broadcast = all_gather = reduce_scatter = start_all_reduce = resize = barrier

        def size(self):
            return 2

    rows = {0: [2, 0, 0, 3], 1: [2, 1, 0, 1]}  # the others hand over the state in their third call

    def gather(row, name):
        return {rank: np.array(each) for rank, each in rows.items()}

    monkeypatch.setattr(state_transfer, "gather_living", gather)
    core = Called()
    member = Member(Ports(core=core, environ={}))
    member.begun = True

    def purpose(call):
        program.use(own)
        return state_transfer._agree_on_purpose(2, True, [], call)

    own = program.Program()
    assert asked_as(member, lambda: purpose(1)) == (False, True)
    for barrier in (runtime.run_barrier, comm.barrier):
        asked_as(member, barrier)
    collectives = {
        "score": lambda: comm.all_reduce(1.0, name="score"),
        "b": lambda: comm.broadcast(1.0, name="b"),
        "g": lambda: comm.all_gather(1.0, name="g"),
        "s": lambda: comm.reduce_scatter([1.0, 2.0], name="s"),
        "unnamed": lambda: comm.all_reduce_async(1.0),
        "kf.resize": lambda: runtime.resize(3),
    }

    def refusal(collective):
        with pytest.raises(KungFuError) as caught:
            collective()
        return str(caught.value)

    for name, collective in collectives.items():
        told = asked_as(member, partial(refusal, collective))
        assert name in told
        assert "in a later training call" in told
    assert core.made == 0
    asked_as(member, lambda: comm.all_gather(1.0, name="kungfu/state/purpose"))
    assert core.made == 1, "by which it comes to the others' call"
    rows[1] = rows[0]
    assert asked_as(member, lambda: purpose(3)) == (True, False)
    asked_as(member, runtime.run_barrier)
    asked_as(member, collectives["score"])
    assert core.made == 3


@pytest.mark.parametrize(("held_s", "takes_s"), [(0.0, 100), (0.5, 105), (math.inf, None)])
def test_hold_leaves_its_time_out_of_the_wait_for_an_announcement(monkeypatch, held_s, takes_s):
    """Held for as much of each ten seconds; until the store answers at 1000 s."""
    now = 0.0

    def sleep(seconds):
        nonlocal now
        now += seconds

    core = SimpleNamespace(
        deadlines_held=lambda: 0 < now % 10 <= held_s, announced_version=lambda: 7 if now > 1000 else 6
    )
    ports = SimpleNamespace(monotonic=lambda: now, sleep=sleep, poll_s=0.125)
    monkeypatch.setattr(step_agreement, "_patience_s", lambda member: 100.0)
    assert step_agreement._await_prepared(SimpleNamespace(core=core, ports=ports), 7) is (takes_s is None)
    assert takes_s is None or takes_s <= now <= takes_s + 1


def test_the_rank_is_that_of_the_start_until_this_process_has_joined():
    class Joined:
        def rank(self):
            return 1

    started = {"KUNGFU_BROKER": "unix:somewhere", "RANK_ID": "3"}
    ranks = []
    for environ, cluster in ((started, None), (started, object()), ({"RANK_ID": "3"}, None)):
        member = Member(Ports(core=Joined(), environ=environ))
        member.cluster = cluster
        ranks.append(asked_as(member, membership.rank))
    assert ranks == [3, 1, 1], "others than kungfu-run set RANK_ID, too"


def test_unguarded_child_raises_again_after_a_pause(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(children.time, "monotonic", lambda: now[0])
    handler, raised = children._Unguarded(), []
    for now[0] in (100.0, 100.5, 104.9, 105.0, 106.0, 111.0):
        try:
            handler(children.UNGUARDED_SIGNAL, None)
        except ValueError:
            raised.append(now[0])
    assert raised == [100.0, 105.0, 111.0]
