"""What the broker answers, without sockets."""

from ms_kungfu.elastic.cluster import Cluster, PeerID
from ms_kungfu.launcher.broker import Detach, Grant, Membership, Refuse, Request, Wait

A, B, C = (PeerID("127.0.0.1", 10000 + i) for i in range(3))


def cluster(version, *workers):
    return Cluster(tuple(workers), (), version)


def started(*clusters):
    """A membership that knows `clusters`, the first of which has been chosen."""
    membership = Membership()
    for one in clusters:
        membership.admit(one)
    membership.choose(clusters[0].version)
    return membership


def newcomer(peer, incarnation):
    return Request(peer, incarnation, None, None)


def member(peer, of, version, incarnation=0):
    return Request(peer, incarnation, of, version)


def test_first_workers_get_the_version_that_the_launcher_chose():
    membership = started(cluster(3, A, B))
    assert membership.answer(newcomer(B, 3)) == Grant(cluster(3, A, B), 1)


def test_nobody_gets_in_before_a_version_is_chosen():
    membership = Membership()
    membership.admit(cluster(0, A))
    assert membership.answer(newcomer(A, 0)) == Wait()
    assert isinstance(membership.answer(member(A, 0, 1)), Refuse)


def test_newcomer_waits_until_members_choose_its_version():
    membership = started(cluster(0, A), cluster(1, A, B))
    assert membership.answer(newcomer(B, 1)) == Wait()
    assert membership.answer(member(A, 0, 1)) == Grant(cluster(1, A, B), 0)
    assert membership.answer(newcomer(B, 1)) == Grant(cluster(1, A, B), 1)


def test_members_may_skip_a_version():
    membership = started(cluster(0, A), cluster(1, A, B), cluster(2, A, C))
    assert membership.answer(member(A, 0, 2)) == Grant(cluster(2, A, C), 0)
    assert membership.answer(newcomer(B, 1)) == Detach()  # its version was never chosen
    assert membership.answer(newcomer(C, 2)) == Grant(cluster(2, A, C), 1)


def test_the_member_that_leaves_may_be_the_one_that_chooses():
    membership = started(cluster(0, A, B), cluster(1, A))
    assert membership.answer(member(B, 0, 1)) == Detach()
    assert membership.answer(member(A, 0, 1)) == Grant(cluster(1, A), 0)


def test_a_slow_leaver_is_detached_even_when_the_others_are_far_ahead():
    membership = started(cluster(0, A, B), cluster(1, A), cluster(2, A, C))
    membership.answer(member(A, 0, 1))
    membership.answer(member(A, 1, 2))
    assert membership.answer(member(B, 0, 1)) == Detach()


def test_a_peer_that_comes_back_is_another_process():
    membership = started(cluster(0, A, B), cluster(1, A), cluster(2, A, B))
    membership.answer(member(A, 0, 1))
    assert membership.is_out(B, 0)
    assert not membership.is_out(B, 2)
    assert membership.answer(newcomer(B, 2)) == Wait()
    membership.answer(member(A, 1, 2))
    assert membership.answer(newcomer(B, 2)) == Grant(cluster(2, A, B), 1)
    assert membership.answer(newcomer(B, 0)) == Detach()
    assert membership.answer(member(B, 0, 2, incarnation=0)) == Detach()


def test_unknown_version_has_to_be_looked_for():
    membership = started(cluster(0, A))
    assert membership.answer(member(A, 0, 5)) == Wait(unknown=5)
    membership.admit(cluster(5, A, B))
    assert isinstance(membership.answer(member(A, 0, 5)), Grant)


def test_a_version_that_the_host_cannot_run_is_refused_with_the_reason():
    membership = started(cluster(0, A))
    membership.refused[1] = "2 slots"
    assert membership.answer(member(A, 0, 1)) == Refuse("cluster version 1 is refused: 2 slots")


def test_who_is_not_a_member_of_the_chosen_version_cannot_choose():
    membership = started(cluster(0, A), cluster(1, A, B), cluster(2, B))
    assert isinstance(membership.answer(member(C, 0, 2)), Refuse)
    membership.answer(member(A, 0, 1))
    assert isinstance(membership.answer(member(A, 0, 2)), Refuse)  # it never came to version 1
    assert membership.chosen == 1


def test_a_version_that_is_over_is_refused():
    membership = started(cluster(0, A, B), cluster(1, A, B), cluster(2, A, B))
    membership.answer(member(A, 0, 1))
    membership.answer(member(A, 1, 2))
    answer = membership.answer(member(B, 0, 1))
    assert isinstance(answer, Refuse)
    assert "version 2 has been chosen since" in answer.reason


def test_versions_are_never_redefined_and_old_ones_are_forgotten():
    membership = started(cluster(0, A))
    for version in range(1, 100):
        membership.admit(cluster(version, A, B))
        membership.admit(cluster(version, A, C))
        assert membership.answer(member(A, version - 1, version)) == Grant(cluster(version, A, B), 0)
    assert len(membership.clusters) == 2


# ---- deaths and newcomers ----


def test_a_version_is_announced_when_its_newcomers_are_ready():
    membership = started(cluster(0, A), cluster(1, A, B, C))
    assert membership.announceable() == 0
    membership.ready.add((B, 1))
    assert membership.announceable() == 0
    membership.ready.add((C, 1))
    assert membership.announceable() == 1


def test_a_newer_version_that_needs_nobody_new_does_not_wait():
    membership = started(cluster(0, A, B), cluster(1, A, B, C), cluster(2, B))
    assert membership.announceable() == 2


def test_an_older_version_that_is_ready_is_announced_while_a_newer_one_is_not():
    membership = started(cluster(0, A), cluster(1, A, B), cluster(2, A, B, C))
    membership.ready.add((B, 1))
    assert membership.announceable() == 1


def test_the_dead_hold_up_nobody():
    membership = started(cluster(0, A, B), cluster(1, A, B, C))
    membership.ready.add((C, 1))
    membership.bury(B, 0)
    assert membership.announceable() == 1
    membership.bury(C, 1)
    assert membership.announceable() == 1
    assert membership.ended_in(cluster(1, A, B, C)) == [B, C]


def test_a_dead_worker_stays_dead_in_versions_whose_writers_had_not_heard_of_it():
    membership = started(cluster(0, A, B))
    membership.bury(B, 0)
    membership.admit(cluster(1, A, B, C))
    assert membership.ended_in(cluster(1, A, B, C)) == [B]
    assert membership.belongs(B, 0, 1)
    membership.admit(cluster(2, A, C))
    membership.admit(cluster(3, A, C, B))  # its peer ID is taken again
    assert membership.ended_in(cluster(3, A, C, B)) == []
    assert not membership.belongs(B, 0, 3)
    assert membership.is_out(B, 0)
    assert not membership.is_out(B, 3)


def test_the_replacement_waits_for_its_own_version():
    membership = started(cluster(0, A, B))
    membership.bury(B, 0)
    membership.admit(cluster(1, A))
    membership.admit(cluster(2, A, B))
    assert membership.announceable() == 1
    assert membership.answer(newcomer(B, 2)) == Wait()
    assert membership.answer(member(A, 0, 1)) == Grant(cluster(1, A), 0)
    assert membership.announceable() == 1
    membership.ready.add((B, 2))
    assert membership.announceable() == 2
    assert membership.answer(member(A, 1, 2)) == Grant(cluster(2, A, B), 0)
    assert membership.answer(newcomer(B, 2)) == Grant(cluster(2, A, B), 1)
    membership.bury(B, 2)
    assert membership.ended_in(cluster(2, A, B)) == [B]


def test_survivors_follow_one_another_although_a_newer_version_is_known():
    membership = started(cluster(0, A, B, C))
    membership.bury(C, 0)
    membership.admit(cluster(1, A, B))
    assert membership.answer(member(A, 0, 1)) == Grant(cluster(1, A, B), 0)
    membership.admit(cluster(2, A, B, C))
    assert membership.answer(member(B, 0, 1)) == Grant(cluster(1, A, B), 1)


def test_a_peer_that_was_buried_long_ago_does_not_bury_its_successor():
    membership = started(cluster(0, A, B), cluster(1, A), cluster(2, A, B))
    membership.answer(member(A, 0, 1))
    membership.answer(member(A, 1, 2))
    membership.bury(B, 0)  # the old process has lingered
    assert membership.ended_in(cluster(2, A, B)) == []
    assert membership.belongs(B, 2, 2)


def test_a_version_that_would_lose_the_state_is_not_announced():
    membership = started(cluster(0, A, B), cluster(1, B))
    membership.bury(B, 0)
    assert membership.announceable() == 0
    membership.admit(cluster(2, A))
    assert membership.announceable() == 2
