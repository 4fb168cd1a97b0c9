"""Who is started before he is wanted: how many standbys, when, and whether there is memory for them."""

import math

import pytest

from ms_kungfu.elastic import ahead
from ms_kungfu.launcher.memory import free_bytes, taken_bytes
from ms_kungfu.launcher.state.ahead import Expected, Present, Room, to_start

MIB = 2**20
THREE = Expected(version=7, newcomers=3, size=4)


def room(cores=2, idle=0, free=math.inf, worker=100 * MIB):
    return Room(cores, idle, free, worker)


@pytest.mark.parametrize(
    ("kept", "expected", "present", "where", "count"),
    [
        (0, Expected(), Present(), room(), 0),
        (2, Expected(), Present(), room(), 2),  # -standby: at once, whatever it takes
        (2, Expected(), Present(1, 1), room(), 0),
        # On few cores one after the other, each when the one before is ready.
        (0, THREE, Present(), room(), 1),
        (0, THREE, Present(0, 1), room(), 0),
        (0, THREE, Present(1, 0), room(), 1),
        (0, THREE, Present(2, 0), room(), 1),
        (0, THREE, Present(3, 0), room(), 0),
        (0, THREE, Present(), room(cores=8), 2),
        (0, THREE, Present(), room(cores=64), 3),
        # Cores that no worker uses are there for it.
        (0, THREE, Present(), room(cores=4, idle=3), 3),
        # Those of -standby are for whoever is needed, and come first.
        (2, THREE, Present(), room(), 2),
        (2, THREE, Present(2, 0), room(), 1),
        (5, THREE, Present(5, 0), room(), 0),
        # Room for one more stays.
        (0, THREE, Present(), room(cores=64, free=399 * MIB), 2),
        (0, THREE, Present(), room(cores=64, free=199 * MIB), 0),
        (1, THREE, Present(), room(cores=64, free=199 * MIB), 1),
        # Who starts hasn't taken its memory yet.
        (0, THREE, Present(0, 1), room(cores=64, free=299 * MIB), 0),
        (0, THREE, Present(0, 1), room(cores=64, free=300 * MIB), 1),
        (1, THREE, Present(), room(cores=64, free=299 * MIB), 1),
        (1, THREE, Present(), room(cores=64, free=300 * MIB), 2),
        (0, THREE, Present(), room(cores=64, free=0, worker=0), 3),  # not known what a worker takes
    ],
)
def test_as_many_are_started_as_cores_and_memory_allow(kept, expected, present, where, count):
    assert to_start(kept, expected, present, where).count == count


def test_what_is_said_of_it():
    assert to_start(2, Expected(), Present(), room()).reason == ""
    assert "4 workers are wanted next" in to_start(0, THREE, Present(), room()).reason
    start = to_start(0, THREE, Present(), room(free=199 * MIB))
    assert start.lacks_memory
    assert start.reason.endswith("for want of memory: 199 MiB are free, and a worker takes 100")
    # While another one starts, memory is about to be less: nothing is said of it yet.
    assert not to_start(0, THREE, Present(0, 1), room(free=199 * MIB)).lacks_memory


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


def test_the_next_entry_is_told_once_in_a_version(members):
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


def test_a_change_that_nobody_scheduled_is_told_anew(members):
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


def test_what_is_not_known_ahead_is_not_told(members):
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


def test_what_a_process_takes_is_its_own_pages(tmp_path):
    write(tmp_path / "999999999/status", "VmRSS:\t  500 kB\nRssAnon:\t  300 kB\nRssFile:\t 200 kB\n")
    assert taken_bytes(999999999, tmp_path) == 300 * 1024
    assert taken_bytes(999999998, tmp_path) == 0
