"""What the coordinator knows of a job, without processes: places, failures, and what is to be written next."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.revisions import StoreWatcher
from ms_kungfu.launcher.options import parse_command_line
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.policy import Action, Headcount, Standing, WorkerExited

A, B, C, D = (PeerID("127.0.0.1", 10000 + i) for i in range(4))


def cluster(version, *workers):
    return Cluster(tuple(workers), (), version)


def coordinator(*workers, flags=("-recover", "replace")):
    options = parse_command_line(["-w", "-port-range", "10000-10009", *flags, "sh"])
    return Coordinator(options, cluster(0, *workers))


def written(by, version, *workers):
    return Cluster(tuple(workers), (), version, by)


def exited(code):
    return WorkerExited("worker 1", Standing.MEMBER, code)


def test_the_dead_are_left_out_first_and_replaced_in_the_next_version():
    job = coordinator(A, B)
    job.vacant = [1]
    first = job.revision(-1, ended=[B], living=[A], taken_ports={10000})
    assert first == cluster(1, A)
    assert job.accept(first, own=True, ended=[], living=[A]) == []
    job.last_version = 1
    second = job.revision(-1, ended=[], living=[A], taken_ports={10000, 10001})
    assert second == cluster(2, A, C)  # the port of a dead worker may not be free yet
    assert job.accept(second, own=True, ended=[], living=[A]) == [C]


def test_requested_size_is_not_filled_by_workers_that_failed_before():
    job = coordinator(A, B, C)
    job.vacant, job.pausing = [1], [2]
    assert job.accept(cluster(1, A, D), own=False, ended=[], living=[A]) == []
    assert (job.vacant, job.pausing) == ([], [])


def test_failed_worker_of_a_written_cluster_is_replaced():
    job = coordinator(A, B, C)
    job.vacant = [1, 2]
    job.accept(cluster(1, A, B), own=False, ended=[B], living=[A])
    assert len(job.vacant) == 1


def test_a_member_that_was_to_go_takes_the_place_of_one_that_died():
    job = coordinator(A)
    job.vacant = [0]
    assert job.accept(cluster(1, B), own=True, ended=[], living=[B]) == []
    assert job.vacant == []


def test_the_last_ones_stay_although_all_were_granted_to_leave():
    job = coordinator(A, B)
    job.leaving = {A, B}
    assert job.members_to_leave([A, B]) == set()
    assert job.members_to_leave([A, B, C]) == {A, B}


def test_version_that_another_writer_wrote_meanwhile_is_counted():
    job = coordinator(A, B)
    assert job.revision(7, ended=[B], living=[A], taken_ports=()).version == 8


def test_successive_late_joining_workers_are_counted_by_slot():
    job = coordinator(A, B)
    assert [job.count_late(slot, True) for slot in (0, 0, 1)] == [1, 2, 1]
    assert [job.count_late(0, is_late) for is_late in (False, True)] == [0, 1]  # one of them got ready between


def test_restarts_are_counted_for_five_minutes():
    job = coordinator(A)
    job.count_restart(0, 10.0)
    job.count_restart(0, 200.0)
    assert [job.restarts_of(0, now) for now in (200.0, 309.0, 311.0, 501.0)] == [2, 2, 1, 0]
    assert job.restarts_of(1, 200.0) == 0


@pytest.mark.parametrize(("error", "code", "is_the_programs"), [("", 3, True), ("", -9, False), ("hung", 1, False)])
def test_exit_code_of_a_surviving_job_is_set_by_program_failures_alone(error, code, is_the_programs):
    job = coordinator(A, B, flags=())
    assert job.member_failed(WorkerExited("worker 1", Standing.MEMBER, code, error)) is is_the_programs
    second = WorkerExited("worker 2", Standing.MEMBER, 4)
    assert not job.member_failed(second) or not is_the_programs  # the first one counts
    job.finishing = True
    verdict = job.decide(exited(0), Headcount(0, 0, 0))
    assert (verdict.action, verdict.exit_code) == (Action.FAIL, 3 if is_the_programs else 4)


def test_worker_lost_with_its_host_is_not_named_as_the_failed_one():
    job = coordinator(A, B, flags=("-recover", "shrink"))
    lost = "was on host a, which was lost: it is silent"
    job.member_failed(WorkerExited("worker 0", Standing.MEMBER, 1, lost))
    killed, leaver = WorkerExited("worker 2", Standing.MEMBER, -9), WorkerExited("worker 3", Standing.LEAVING, 0)
    failed = WorkerExited("worker 1", Standing.MEMBER, 3)
    assert job.decide(killed, Headcount()).reason.endswith(f"the first failure: worker 0 {lost}")
    verdict = job.decide(failed, Headcount())
    assert (verdict.reason, verdict.exit_code) == ("worker 1 exited with code 3", 3)
    job.member_failed(WorkerExited("worker 1", Standing.MEMBER, 3, logs="w.log"))
    for event in (killed, leaver):
        verdict = job.decide(event, Headcount())
        assert verdict.reason.endswith("no worker is left; the first failure: worker 1 exited with code 3, see w.log")
        assert verdict.exit_code == 3


def test_write_of_another_client_during_a_store_outage_is_kept():
    heard, kept = [], {}

    def put(wanted):  # as the store was opened for
        kept["newest"] = replace(wanted, writer=wanted.writer or "job")
        return kept["newest"]

    store = SimpleNamespace(get=lambda: written("", 3, A), put=put)
    machine = SimpleNamespace(start_thread=lambda name, run: None)
    StoreWatcher(store, lambda: cluster(3, A, B), heard.append, machine)._restore(cluster(3, A, B))
    assert [(one, one.writer) for one in heard] == [(cluster(4, A), "")]


@pytest.mark.parametrize("puts_back", [True, False])
def test_deleted_cluster_is_restored_except_in_etcd(puts_back):
    watcher, kept = None, []

    def watch(version, timeout_s):
        if kept or not puts_back:
            watcher.stop()

    store = SimpleNamespace(get=lambda: kept[-1] if kept else None, put=kept.append, watch=watch, url="")
    machine = SimpleNamespace(start_thread=lambda name, run: None, monotonic=lambda: 0.0, sleep=lambda seconds: None)
    watcher = StoreWatcher(store, lambda: cluster(3, A, B), [].append, machine, puts_back)
    watcher._run()
    assert kept == ([cluster(3, A, B)] if puts_back else [])


def over_hosts(*workers, flags=("-recover", "replace")):
    words = ["-w", "-port-range", "10000-10009", "-H", "127.0.0.1:2,127.0.0.2:2", "-self", "127.0.0.1", "-no-secret"]
    words += ["-config-server", "http://127.0.0.1:9100/config", "-builtin-config-port", "9100"]
    return Coordinator(parse_command_line([*words, *flags, "sh"]), cluster(0, *workers))


AWAY = tuple(PeerID("127.0.0.2", 10000 + i) for i in range(2))


def test_only_as_many_are_replaced_as_hosts_that_are_left_have_slots_for():
    job = over_hosts(A, *AWAY)
    job.hosts = job.hosts.without("127.0.0.2")
    job.vacant = [1, 2]
    first = job.revision(-1, ended=AWAY, living=[A], taken_ports={10000})
    assert (first.workers, first.slots) == ((A,), {"127.0.0.1": 2})
    job.accept(first, own=True, ended=[], living=[A])
    job.last_version = first.version
    second = job.revision(-1, ended=[], living=[A], taken_ports={10000})
    assert [worker.host for worker in second.workers] == ["127.0.0.1"] * 2
    job.accept(second, own=True, ended=[], living=[A])
    assert job.vacant[1:] == []
