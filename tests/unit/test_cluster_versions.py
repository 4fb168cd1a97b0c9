"""What the broker answers, without sockets."""

import random

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.state.versions import ClusterVersions, Grant, Refuse, Request, Wait
from ms_kungfu.launcher.wire.codec import Reads, encode
from ms_kungfu.launcher.wire.documents import Versions
from ms_kungfu.launcher.wire.messages import Detached, Stay

A, B, C = (PeerID("127.0.0.1", 10000 + i) for i in range(3))


def json_of(versions):
    return encode(versions.kept())


read_versions = Reads(Versions)


def cluster(version, *workers):
    return Cluster(tuple(workers), (), version)


def started(*clusters):
    """Versions that know `clusters`, the first of which has been committed."""
    versions = ClusterVersions()
    for one in clusters:
        versions.admit(one)
    versions.commit_version(clusters[0].version)
    return versions


def joining_worker(peer, incarnation):
    return Request(peer, incarnation, None, None)


def member(peer, of, version, incarnation=0):
    return Request(peer, incarnation, of, version)


def test_first_workers_get_the_version_that_the_launcher_chose():
    versions = started(cluster(3, A, B))
    assert versions.answer(joining_worker(B, 3)) == Grant(cluster(3, A, B), 1)


def test_no_worker_is_admitted_before_a_version_is_committed():
    versions = ClusterVersions()
    versions.admit(cluster(0, A))
    assert versions.answer(joining_worker(A, 0)) == Wait()
    assert isinstance(versions.answer(member(A, 0, 1)), Refuse)


def test_joining_worker_waits_until_members_commit_its_version():
    versions = started(cluster(0, A), cluster(1, A, B))
    assert versions.answer(joining_worker(B, 1)) == Wait()
    assert versions.answer(member(A, 0, 1)) == Grant(cluster(1, A, B), 0)
    assert versions.answer(joining_worker(B, 1)) == Grant(cluster(1, A, B), 1)


def test_members_may_skip_a_version():
    versions = started(cluster(0, A), cluster(1, A, B), cluster(2, A, C))
    assert versions.answer(member(A, 0, 2)) == Grant(cluster(2, A, C), 0)
    assert versions.answer(joining_worker(B, 1)) == Detached()  # its version was never chosen
    assert versions.answer(joining_worker(C, 2)) == Grant(cluster(2, A, C), 1)


def test_version_whose_commit_is_being_written_is_not_superseded():
    versions = started(cluster(0, A, B), cluster(1, A, B, C))
    versions.committing = 1
    versions.admit(cluster(2, A))
    assert sorted(versions.clusters) == [0, 1, 2]
    assert not versions.is_out(C, 1)
    versions.stop_committing()
    assert sorted(versions.clusters) == [0, 2]
    assert versions.is_out(C, 1)


def test_commit_supersedes_what_no_longer_leads_to_the_newest_version():
    versions = started(cluster(0, A, B), cluster(1, A, B, C))
    versions.committing = 1
    versions.admit(cluster(2, A))
    versions.admit(cluster(3, A, C))
    versions.commit_version(1)
    assert sorted(versions.clusters) == [0, 1, 3]


def test_member_leaves_once_a_staying_one_has_adopted_the_version():
    versions = started(cluster(0, A, B), cluster(1, A))
    assert versions.answer(member(B, 0, 1)) == Wait()
    assert versions.committed == 0
    assert versions.answer(member(A, 0, 1)) == Grant(cluster(1, A), 0)
    assert versions.answer(member(B, 0, 1)) == Detached()


def test_a_slow_leaver_is_detached_even_when_the_others_are_far_ahead():
    versions = started(cluster(0, A, B), cluster(1, A), cluster(2, A, C))
    versions.answer(member(A, 0, 1))
    versions.answer(member(A, 1, 2))
    assert versions.answer(member(B, 0, 1)) == Detached()


def test_a_peer_that_comes_back_is_another_process():
    versions = started(cluster(0, A, B), cluster(1, A))
    versions.answer(member(A, 0, 1))
    versions.admit(cluster(2, A, B))
    assert versions.is_out(B, 0)
    assert not versions.is_out(B, 2)
    assert versions.answer(joining_worker(B, 2)) == Wait()
    versions.answer(member(A, 1, 2))
    assert versions.answer(joining_worker(B, 2)) == Grant(cluster(2, A, B), 1)
    assert versions.answer(joining_worker(B, 0)) == Detached()
    assert versions.answer(member(B, 0, 2, incarnation=0)) == Detached()


def test_unknown_version_has_to_be_looked_for():
    versions = started(cluster(0, A))
    assert versions.answer(member(A, 0, 5)) == Wait(unknown=5)
    versions.admit(cluster(5, A, B))
    assert isinstance(versions.answer(member(A, 0, 5)), Grant)


def test_a_version_that_the_host_cannot_run_is_refused_with_the_reason():
    versions = started(cluster(0, A))
    versions.refused[1] = "2 slots"
    assert versions.answer(member(A, 0, 1)) == Refuse("cluster version 1 is rejected: 2 slots")


def test_worker_outside_the_committed_version_cannot_commit():
    versions = started(cluster(0, A), cluster(1, A, B), cluster(2, B, C))
    assert isinstance(versions.answer(member(C, 0, 2, incarnation=2)), Refuse)
    versions.answer(member(A, 0, 1))
    assert isinstance(versions.answer(member(A, 0, 2)), Refuse)  # it never came to version 1
    assert versions.committed == 1


def test_a_version_that_is_over_is_refused():
    versions = started(cluster(0, A, B), cluster(1, A, B), cluster(2, A, B))
    versions.answer(member(A, 0, 1))
    versions.answer(member(A, 1, 2))
    answer = versions.answer(member(B, 0, 1))
    assert isinstance(answer, Refuse)
    assert "version 2 has been committed since" in answer.reason


def test_versions_are_never_redefined_and_old_ones_are_forgotten():
    versions = started(cluster(0, A))
    for version in range(1, 100):
        versions.admit(cluster(version, A, B))
        versions.admit(cluster(version, A, C))
        assert versions.answer(member(A, version - 1, version)) == Grant(cluster(version, A, B), 0)
    assert len(versions.clusters) == 2


def test_excluded_process_is_not_its_successor():
    versions = started(cluster(0, A, B), cluster(1, A))
    versions.commit_version(1)
    versions.admit(cluster(2, A, B))
    assert versions.belongs(B, 0, 0)
    assert not versions.belongs(B, 0, 2)
    assert versions.belongs(B, 2, 2)


def test_exclusions_of_versions_long_over_are_forgotten():
    versions = started(cluster(0, A, B))
    for version in range(1, 100):
        versions.admit(cluster(version, A, *([B] if version % 2 == 0 else [])))
        versions.commit_version(version)
    assert len(versions.excluded[B]) <= 3
    assert versions.meant_by(B, 100) == 100


# ---- deaths and newcomers ----


def test_version_is_prepared_once_its_joining_workers_are_ready():
    versions = started(cluster(0, A), cluster(1, A, B, C))
    assert versions.preparable() == 0
    versions.ready.add((B, 1))
    assert versions.preparable() == 0
    versions.ready.add((C, 1))
    assert versions.preparable() == 1


def test_newer_version_without_joining_workers_does_not_wait():
    versions = started(cluster(0, A, B), cluster(1, A, B, C), cluster(2, B))
    assert versions.preparable() == 2


def test_older_ready_version_is_prepared_while_a_newer_one_waits():
    versions = started(cluster(0, A), cluster(1, A, B), cluster(2, A, B, C))
    versions.ready.add((B, 1))
    assert versions.preparable() == 1


def test_failed_member_delays_no_version():
    versions = started(cluster(0, A, B), cluster(1, A, B, C))
    versions.ready.add((C, 1))
    versions.record_end(B, 0)
    assert versions.preparable() == 1
    assert versions.ended_in(cluster(1, A, B, C)) == [B]
    assert versions.answer(member(A, 0, 1)) == Grant(cluster(1, A, B, C), 0)


def test_failed_joining_worker_is_not_admitted():
    """Its place would count as filled, and a step would be trained without its samples."""
    versions = started(cluster(0, A, B), cluster(1, A, B, C))
    versions.ready.add((C, 1))
    assert versions.preparable() == 1  # all agree on it, and then:
    versions.record_end(C, 1)
    assert versions.preparable() == 0
    assert versions.answer(member(A, 0, 1)) == Stay()
    assert versions.answer(member(B, 0, 1)) == Stay()
    versions.admit(cluster(2, A, B))
    versions.admit(cluster(3, A, B, C))  # another process
    assert versions.preparable() == 2
    versions.ready.add((C, 3))
    assert versions.preparable() == 3
    assert versions.answer(member(A, 0, 3)) == Grant(cluster(3, A, B, C), 0)


def test_joining_worker_that_fails_after_the_commit_is_failed_for_all():
    versions = started(cluster(0, A, B), cluster(1, A, B, C))
    versions.ready.add((C, 1))
    assert versions.answer(member(A, 0, 1)) == Grant(cluster(1, A, B, C), 0)
    versions.record_end(C, 1)
    assert versions.answer(member(B, 0, 1)) == Grant(cluster(1, A, B, C), 1)


def test_failed_worker_stays_failed_in_versions_of_unaware_writers():
    versions = started(cluster(0, A, B))
    versions.record_end(B, 0)
    versions.admit(cluster(1, A, B, C))
    assert versions.ended_in(cluster(1, A, B, C)) == [B]
    assert versions.belongs(B, 0, 1)
    versions.admit(cluster(2, A, C))
    versions.admit(cluster(3, A, C, B))  # its peer ID is taken again
    assert versions.ended_in(cluster(3, A, C, B)) == []
    assert not versions.belongs(B, 0, 3)
    assert versions.is_out(B, 0)
    assert not versions.is_out(B, 3)


def test_the_replacement_waits_for_its_own_version():
    versions = started(cluster(0, A, B))
    versions.record_end(B, 0)
    versions.admit(cluster(1, A))
    versions.admit(cluster(2, A, B))
    assert versions.preparable() == 1
    assert versions.answer(joining_worker(B, 2)) == Wait()
    assert versions.answer(member(A, 0, 1)) == Grant(cluster(1, A), 0)
    assert versions.preparable() == 1
    versions.ready.add((B, 2))
    assert versions.preparable() == 2
    assert versions.answer(member(A, 1, 2)) == Grant(cluster(2, A, B), 0)
    assert versions.answer(joining_worker(B, 2)) == Grant(cluster(2, A, B), 1)
    versions.record_end(B, 2)
    assert versions.ended_in(cluster(2, A, B)) == [B]


def test_survivors_follow_one_another_although_a_newer_version_is_known():
    versions = started(cluster(0, A, B, C))
    versions.record_end(C, 0)
    versions.admit(cluster(1, A, B))
    assert versions.answer(member(A, 0, 1)) == Grant(cluster(1, A, B), 0)
    versions.admit(cluster(2, A, B, C))
    assert versions.answer(member(B, 0, 1)) == Grant(cluster(1, A, B), 1)


def test_a_peer_that_ended_long_ago_does_not_end_its_successor():
    versions = started(cluster(0, A, B), cluster(1, A))
    versions.answer(member(A, 0, 1))
    versions.admit(cluster(2, A, B))
    versions.answer(member(A, 1, 2))
    versions.record_end(B, 0)  # the old process has lingered
    assert versions.ended_in(cluster(2, A, B)) == []
    assert versions.belongs(B, 2, 2)


def test_a_version_that_would_lose_the_state_is_not_announced():
    versions = started(cluster(0, A, B), cluster(1, B))
    versions.record_end(B, 0)
    assert versions.preparable() == 0
    versions.admit(cluster(2, A))
    assert versions.preparable() == 2


# ---- several wishes outstanding ----


def test_newest_resize_request_wins_at_once():
    versions = started(cluster(0, A), cluster(1, A, B, C))
    versions.ready.add((B, 1))
    versions.admit(cluster(2, A, B))  # the first was a mistake
    assert versions.preparable() == 2
    assert versions.is_out(C, 1)  # a worker that is not needed any more
    assert versions.answer(joining_worker(C, 1)) == Detached()
    assert not versions.is_out(B, 1)
    assert versions.answer(member(A, 0, 2)) == Grant(cluster(2, A, B), 0)
    assert versions.answer(joining_worker(B, 1)) == Grant(cluster(2, A, B), 1)


def test_worker_unneeded_for_a_moment_returns_as_another_process():
    versions = started(cluster(0, A))
    for wanted in (cluster(1, A, B), cluster(2, A), cluster(3, A, B)):
        versions.admit(wanted)
    assert versions.is_out(B, 1)
    versions.record_end(B, 1)  # it was ended, and that is no death of the one that is wanted now
    assert versions.ended_in(cluster(3, A, B)) == []
    versions.ready.add((B, 3))
    assert versions.preparable() == 3


def test_members_stay_where_what_they_agreed_on_has_been_superseded():
    versions = started(cluster(0, A, B), cluster(1, A))
    assert versions.preparable() == 1
    versions.admit(cluster(2, A, B, C))  # keeps B, which would have left
    assert versions.preparable() == 0
    assert versions.answer(member(A, 0, 1)) == Stay()
    assert versions.answer(member(B, 0, 1)) == Stay()
    assert versions.committed == 0
    versions.ready.add((C, 2))
    assert versions.preparable() == 2
    assert versions.answer(member(B, 0, 2)) == Grant(cluster(2, A, B, C), 1)


def test_one_death_does_not_lose_the_job_while_others_have_the_state():
    """`resize 1`, and rank 0 dies when all have agreed on it: ranks 1 and 2 don't go over to a cluster of the dead."""
    versions = started(cluster(0, A, B, C), cluster(1, A))
    assert versions.preparable() == 1
    versions.record_end(A, 0)
    assert versions.answer(member(B, 0, 1)) == Stay()
    assert versions.answer(member(C, 0, 1)) == Stay()
    assert versions.committed == 0
    versions.admit(cluster(2, B))
    assert versions.answer(member(C, 0, 2)) == Wait()
    assert versions.answer(member(B, 0, 2)) == Grant(cluster(2, B), 0)


def test_a_process_is_dead_only_in_versions_that_mean_it():
    """`resize 1` has been committed, 3 and 4 are wanted; the new B was started for version 3 and dies while it starts.
    A version 2 would wait for it for ever: its loss was never marked there."""
    versions = started(cluster(0, A, B), cluster(1, A))
    versions.answer(member(A, 0, 1))
    versions.clusters[2] = cluster(2, A, B, C)
    versions.admit(cluster(3, A, B, C))
    versions.record_end(B, 3)
    versions.ready.add((C, 2))
    for version in (2, 3):
        known = versions.clusters[version]
        assert (B in versions.ended_in(known)) == versions.belongs(B, 3, version), version
    assert versions.preparable() == 1
    versions.admit(cluster(4, A, C))  # what the launcher writes of its death
    assert versions.preparable() == 4


def test_ended_process_is_remembered_after_its_successor_has_ended():
    versions = started(cluster(0, A, B))
    versions.record_end(B, 0)
    versions.admit(cluster(1, A))
    versions.admit(cluster(2, A, B))
    versions.record_end(B, 2)
    assert versions.ended_in(cluster(0, A, B)) == [B]  # the members are still there, and wait for no worker
    assert versions.ended_in(cluster(2, A, B)) == [B]


def test_remaining_workers_are_the_living_members_that_stay():
    versions = started(cluster(0, A, B, C))
    assert versions.staying_without(A, ()) == 2
    assert versions.staying_without(A, {B}) == 1
    assert versions.staying_without(A, {A, B}) == 1
    versions.record_end(C, 0)
    assert versions.staying_without(A, {B}) == 0
    versions.admit(cluster(1, A, PeerID("127.0.0.1", 10003)))  # the joining worker has no state yet
    assert versions.staying_without(A, ()) == 0


def test_worker_that_comes_after_all_have_finished_is_another_process():
    versions = started(cluster(0, A, B), cluster(1, A, B, C))
    versions.record_end(A, 0)
    versions.exclude_everybody()
    assert versions.is_out(C, 1)
    assert versions.is_out(B, 0)  # it can't even be killed
    versions.admit(cluster(2, A, B, C))
    versions.commit_version(2)
    assert versions.answer(joining_worker(C, 1)) == Detached()
    assert versions.answer(joining_worker(C, 2)) == Grant(cluster(2, A, B, C), 2)


def test_no_version_over_a_lost_host_is_chosen_any_more():
    away = PeerID("127.0.0.2", 10000)
    versions = started(cluster(0, A, away), cluster(1, A, B, away))
    versions.ready.add((B, 1))
    assert versions.preparable() == 1
    versions.lose_host(away.host)
    versions.record_end(away, 0)
    assert versions.would_commit(member(A, 0, 1)) is None
    assert versions.answer(member(A, 0, 1)) == Stay()
    assert versions.answer(member(away, 0, 1)) == Detached()
    versions.admit(cluster(2, A, B))
    assert versions.answer(member(A, 0, 2)) == Grant(cluster(2, A, B), 0)


def test_version_committed_before_a_host_loss_is_adopted_by_all():
    away = PeerID("127.0.0.2", 10000)
    versions = started(cluster(0, A, B, away), cluster(1, A, B, away))
    assert isinstance(versions.answer(member(away, 0, 1)), Grant)
    versions.lose_host(away.host)
    versions.record_end(away, 0)
    assert versions.answer(member(A, 0, 1)) == Grant(cluster(1, A, B, away), 0)


class Unforgetting(ClusterVersions):
    """Keeps an entry for each peer and host that was ever removed."""

    def _forget(self):
        pass


@pytest.mark.parametrize("seed", range(12))
def test_forgetting_departed_peers_changes_no_answer(seed):
    """Hosts join, leave and come back; now and then the next controller goes on with the record."""
    rng = random.Random(seed)
    both = [ClusterVersions(), Unforgetting()]
    hosts, living, every, lost = ["h0", "h1"], {}, set(), set()

    def do(method, *arguments):
        first, second = (getattr(versions, method)(*arguments) for versions in both)
        assert first == second
        return first

    def write(workers):
        newest = both[0].newest
        version = 0 if newest is None else newest.version + 1
        slots = dict.fromkeys([host for host in hosts if host not in lost], 4)
        written = Cluster(tuple(workers), (), version, slots=slots)
        do("admit", written)
        ended = do("ended_in", written)
        for peer in written.workers:
            mine = [i for p, i in living if p == peer and do("belongs", peer, i, version)]
            if not mine and peer not in ended:
                every.add((peer, version))
                living[peer, version] = True

    def commit_version(version):
        do("commit_version", version)
        for process in list(living):
            if do("is_out", *process):
                living.pop(process)

    write(PeerID(host, 1) for host in hosts)
    commit_version(0)
    for _ in range(120):
        newest, present = both[0].newest, [host for host in hosts if host not in lost]
        members = [process for process in living if both[0].belongs(*process, both[0].committed)]
        members = sorted(process for process in members if process[0] in both[0].current.workers)
        what = rng.choice(
            ("write", "write", "commit_version", "commit_version", "end", "lose", "join", "come back", "take over")
        )
        if what == "write":
            stays = rng.choice(members)[0]
            kept = [p for p in newest.workers if p != stays and rng.random() < 0.7 and p.host in present]
            free = [PeerID(host, port) for host in present for port in (1, 2)]
            ended = do("ended_in", both[0].newest)
            new = [p for p in rng.sample(free, min(2, len(free))) if p not in newest.workers or p in ended]
            write(dict.fromkeys([stays, *kept, *new]))
        elif what == "commit_version":
            may = [v for v in both[0].clusters if v > both[0].committed and do("may_be_committed", v)]
            if may:
                commit_version(rng.choice(may))
        elif what == "end" and len(members) > 1:
            process = rng.choice(sorted(living))
            living.pop(process)
            do("record_end", *process)
        elif what == "lose" and len({peer.host for peer, _ in members}) > 1:
            lost.add(host := rng.choice(present))
            do("lose_host", host)
            for process in [process for process in living if process[0].host == host]:
                living.pop(process)
                do("record_end", *process)
        elif what == "join" and len(present) < 4:
            hosts.append(f"h{len(hosts)}")
        elif what == "come back" and lost:
            lost.remove(host := rng.choice(sorted(lost)))
            do("host_is_back", host)
        elif what == "take over" and not any(version > both[0].committed for version in both[0].clusters):
            both = [type(v).of(read_versions(json_of(v))) for v in both]
        for version, known in both[0].clusters.items():
            assert do("lost_host_of", known) in (None, *hosts)
            do("ended_in", known)
            for peer, incarnation in every:
                if peer in known.workers:
                    do("belongs", peer, incarnation, version)
        for process in every:
            do("is_out", *process)
            do("concerns", *process)
        do("preparable")
    assert len(json_of(both[0])) < len(json_of(both[1]))


def test_record_after_many_hosts_is_bounded():
    """Each host brings a worker; every second host is lost with it, the others leave first."""
    versions, lengths = started(cluster(0, A)), []
    for number in range(1, 600):
        comes = PeerID(f"10.1.{number // 200}.{number % 200}", 10000)
        slots = {A.host: 2, comes.host: 2}
        versions.admit(Cluster((A, comes), (), 3 * number, slots=slots))
        versions.commit_version(3 * number)
        if number % 2:
            versions.lose_host(comes.host)
            versions.record_end(comes, 3 * number)
        versions.admit(cluster(3 * number + 1, A))
        versions.commit_version(3 * number + 1)
        versions.lose_host(comes.host)
        versions = ClusterVersions.of(read_versions(json_of(versions)))
        lengths.append(len(json_of(versions)))
        assert versions.is_out(comes, 3 * number)
    assert max(lengths) < lengths[0] + 100
