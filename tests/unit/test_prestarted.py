"""How many workers are prestarted, on which hosts, when, and whether there is memory for them."""

import math

import pytest

from ms_kungfu.cluster import FILL, Cluster, PeerID
from ms_kungfu.elastic import ahead
from ms_kungfu.launcher.memory import free_bytes, taken_bytes
from ms_kungfu.launcher.state.prestarted import lack_of_memory, next_slots, start_at_once, to_start

MIB = 2**20


def cluster(workers, slots, placement="even"):
    peers = [PeerID(host, 10000 + number) for number, host in enumerate(workers)]
    return Cluster(tuple(peers), slots=slots, placement=placement)


@pytest.mark.parametrize(
    ("workers", "slots", "hosts"),
    [
        ("a", None, "aaa"),  # one host without a limit
        ("aab", {"a": 3, "b": 3}, "bab"),
        ("ab", {"b": 2, "a": 4}, "baa"),  # of equals the first in the order of -H, not of the ranks
        ("aab", {"a": 2, "b": 2, "c": 1}, "cba"),  # all slots are taken by the first two
        ("aabb", {"a": 2, "b": 2}, "aba"),
        ("b", {"a": 0, "b": 1}, "bbb"),  # a controller without workers
        ("aac", {"a": 2, "b": 1}, "baa"),  # c leaves: it has no slots any more
        ("a", {"a": 0}, ""),
    ],
)
def test_standbys_are_where_the_next_workers_would_be(workers, slots, hosts):
    assert "".join(next_slots(cluster(workers, slots), 3)) == hosts


@pytest.mark.parametrize("placement", ["even", FILL])
def test_next_slots_with_free_slots_are_those_of_a_resize(placement):
    present = cluster("aabc", {"c": 4, "a": 3, "b": 3}, placement)
    grown = present.resized(10, range(10000, 10100))
    assert next_slots(present, 6) == [worker.host for worker in grown.workers[4:]]


@pytest.mark.parametrize(
    ("kept", "expected", "ready", "starting", "at_once", "first", "more"),
    [
        (0, 0, 0, 0, 1, 0, 0),
        (2, 0, 0, 0, 1, 2, 0),  # -standby: at once, whatever it takes
        (2, 0, 1, 1, 1, 0, 0),
        # On few cores one after the other, each when the one before is ready.
        (0, 3, 0, 0, 1, 0, 1),
        (0, 3, 0, 1, 1, 0, 0),
        (0, 3, 1, 0, 1, 0, 1),
        (0, 3, 3, 0, 1, 0, 0),
        (0, 3, 0, 0, 2, 0, 2),
        (0, 3, 0, 0, 16, 0, 3),
        # Those of -standby count among the expected ones, and come first.
        (2, 3, 0, 0, 1, 2, 0),
        (2, 3, 2, 0, 1, 0, 1),
        (5, 3, 5, 0, 1, 0, 0),
        (1, 3, 0, 0, 16, 1, 2),
    ],
)
def test_as_many_are_started_as_cores_allow(kept, expected, ready, starting, at_once, first, more):
    assert to_start(kept, expected, ready, starting, at_once) == (first, more)


def test_a_quarter_of_the_cores_and_idle_ones_are_for_starts():
    assert [start_at_once(*each) for each in ((2, 0), (8, 0), (64, 0), (4, 3))] == [1, 2, 16, 3]


def test_memory_is_compared_with_what_workers_take():
    assert lack_of_memory(2, 200 * MIB, 100 * MIB) == ""
    assert lack_of_memory(2, 199 * MIB, 100 * MIB) == "free_mib=199 worker_mib=100"
    assert lack_of_memory(3, 0.0, 0) == ""  # not known what a worker takes
    assert lack_of_memory(3, math.inf, 100 * MIB) == ""


class Members:
    """What `Ahead` asks of the membership."""

    def __init__(self, size):
        self.present, self.version, self.changing, self.lowest = size, 0, False, True
        self.told = []

    def size(self):
        return self.present

    def cluster_version(self):
        return self.version

    def is_changing(self):
        return self.changing

    def speaks_for_all(self):
        return self.lowest

    def expect(self, newcomers, size):
        self.told.append((newcomers, size))


@pytest.fixture
def members(monkeypatch):
    members = Members(1)
    monkeypatch.setattr(ahead, "membership", members)
    return members


def test_next_schedule_entry_is_sent_once_in_a_version(members):
    training = ahead.Ahead("60:2,140:4,300:1")
    for step in range(1, 61):
        training.look(step)
    assert members.told == [(1, 2)]
    members.changing = True  # those of step 60 are starting, or on their way in
    training.look(61)
    members.changing, members.version, members.present = False, 1, 2
    for step in range(62, 141):
        training.look(step)
    assert members.told == [(1, 2), (2, 4)]
    members.version, members.present = 2, 4
    training.look(141)
    assert members.told[2:] == [(0, 4)]


def test_next_entry_is_sent_again_after_an_unscheduled_change(members):
    training = ahead.Ahead({100: 4})
    training.look(1)
    members.version, members.present = 1, 3
    training.look(2)
    members.version = 2  # one has died, and another one has taken the place
    training.look(3)
    assert members.told == [(3, 4), (1, 4), (1, 4)]


def test_the_lowest_rank_tells_and_the_next_one_after_it(members):
    training = ahead.Ahead({100: 4})
    members.lowest = False
    training.look(1)
    assert members.told == []
    members.lowest = True
    training.look(2)
    assert members.told == [(3, 4)]


def test_unknown_next_entry_is_not_sent(members):
    for schedule in (None, lambda step: 4 if step == 100 else None):
        ahead.Ahead(schedule).look(1)
    assert members.told == []


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path):
    """MiB that are free where 1000 are on the machine, in these groups."""

    def free(groups):
        write(tmp_path / "proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable:   1024000 kB\n")
        write(tmp_path / "proc/self/cgroup", groups)
        return free_bytes(tmp_path / "proc", tmp_path / "cgroup") / MIB

    return free


def test_memory_is_the_machines_or_that_of_a_group(machine, tmp_path):
    assert machine("") == 1000
    assert machine("0::/job/one\n") == 1000  # no controller there
    group = tmp_path / "cgroup/job"
    write(group / "memory.max", f"{300 * MIB}\n")
    write(group / "memory.current", f"{250 * MIB}\n")
    write(group / "memory.stat", f"anon 5\ninactive_file {20 * MIB}\nactive_file 7\n")
    assert machine("0::/job/one\n") == 70  # of the group above, whose files' pages can be given up
    write(group / "one/memory.max", "max\n")
    assert machine("0::/job/one\n") == 70
    assert machine("0::/other\n") == 1000


def test_memory_in_a_container_of_the_older_interface(machine, tmp_path):
    group = tmp_path / "cgroup/memory"  # the path is the host's, and not to be seen here
    write(group / "memory.limit_in_bytes", f"{300 * MIB}\n")
    write(group / "memory.usage_in_bytes", f"{100 * MIB}\n")
    write(group / "memory.stat", f"inactive_file 3\ntotal_inactive_file {MIB}\n")
    assert machine("5:devices:/\n4:cpu,memory:/pods/x\n0::/\n") == 201
    assert machine("5:devices:/\n") == 1000


def test_memory_of_a_process_is_its_own_pages(tmp_path):
    write(tmp_path / "999999999/status", "VmRSS:\t  500 kB\nRssAnon:\t  300 kB\nRssFile:\t 200 kB\n")
    assert taken_bytes(999999999, tmp_path) == 300 * 1024
    assert taken_bytes(999999998, tmp_path) == 0
