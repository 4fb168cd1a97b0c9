"""``--msrun`` and msrun's own options: each is meant as it is there, or refused by name."""

from __future__ import annotations

import pytest

from ms_kungfu._flags import UsageError
from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher import commands
from ms_kungfu.launcher.controller.environment import place_of
from ms_kungfu.launcher.controller.processes import Process
from ms_kungfu.launcher.options import parse_command_line
from ms_kungfu.launcher.state.hosts import HostError

PROGRAM = ["python", "-c", "pass"]
SEVERAL = ["-H", "127.0.0.1:2,127.0.0.2:3", "-self", "127.0.0.1", "-no-secret"]


def test_the_usual_command_line_of_msrun_means_the_same():
    words = "--msrun --worker_num=4 --local_worker_num=4 --master_addr=127.0.0.1 --master_port=8118 --log_dir=logs"
    options = parse_command_line([*words.split(), "--join=True", *PROGRAM])
    assert (options.size, options.msrun_size, str(options.logdir)) == (4, 4, "logs")


@pytest.mark.parametrize(
    ("words", "size", "largest"),
    [
        ("-np 2", 2, 2),
        ("-np 1 -msrun-size 3", 1, 3),
        ("-np 1 -H 127.0.0.1:4", 1, 4),
        (" ".join(SEVERAL), 1, 5),
    ],
)
def test_the_world_is_as_large_as_the_job_may_become(words, size, largest):
    options = parse_command_line(["--msrun", *words.split(), *PROGRAM])
    assert (options.size, options.msrun_size) == (size, largest)
    assert options.hosts.has_room(largest)
    assert not options.hosts.has_room(largest + 1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--worker_num 2", "--worker_num is an option of msrun; write --msrun"),
        ("--master_addr 10.0.0.1", "--master_addr is an option of msrun; name the hosts with the same -H"),
        ("-msrun-size 2", "give --msrun, too"),
        ("--msrun -np 2 --worker_num 2", "-np and --worker_num both set the"),
        ("--msrun --worker_num 4 --local_worker_num 2", "--local_worker_num 2 means that the job has other hosts"),
        ("--msrun --master_addr 10.0.0.1", "name the hosts with the same -H"),
        ("--msrun --join=False", "the launcher always waits for the job"),
        ("--msrun -logdir a --log_dir b", "-logdir and --log_dir both set the"),
        ("--msrun -np 4 -msrun-size 2", "-np 4 is more than -msrun-size 2"),
        ("--msrun -w -standby 1", "with --msrun a program must have a rank when it starts"),
        ("--msrun --bind_core=True", "-cores-per-worker K gives each worker K cores"),
        ("--msrun --cluster_time_out=60", "KUNGFU_JOIN_TIMEOUT"),
        ("--msrun --sim_level=1", "can't simulate"),
        ("--msrun --bind_numa=True", "regardless of NUMA nodes"),
        ("-n 4", "-np N sets the number of workers"),
        ("-np 4 --allow-run-as-root", "any user may start a job"),
        ("-np 4 --mca btl self", "configures Open MPI"),
        ("-np 4 --output-filename log_output", "-logdir DIR stores"),
    ],
)
def test_unsupported_msrun_flag_is_refused_by_name(words, sentence):
    with pytest.raises(UsageError, match=sentence):
        parse_command_line([*words.split(), *PROGRAM])


def test_ranks_are_places_on_the_hosts_in_their_order():
    options = parse_command_line(["--msrun", *SEVERAL, *PROGRAM])
    first = options.ports[0]
    places = [PeerID("127.0.0.1", first), PeerID("127.0.0.1", first + 1), PeerID("127.0.0.2", first + 2)]
    processes = [Process(key, "", peer.host, peer) for key, peer in enumerate(places)]
    assert [place_of(process, 0, options) for process in processes] == [0, 1, 4]
    assert place_of(Process(3, "", "127.0.0.2"), 1, options) == 3  # a standby: the second worker there


def test_a_cluster_larger_than_the_world_is_refused():
    options = parse_command_line(["--msrun", "-np", "2", "-msrun-size", "3", *PROGRAM])
    first = options.hosts.first_cluster(2, options.ports, options.control_port, 0)
    options.hosts.check(first.resized(3, options.ports), first.workers)
    with pytest.raises(HostError, match="4 workers: at most 3 workers by -msrun-size"):
        options.hosts.check(first.resized(4, options.ports), first.workers)


def test_unusable_port_is_refused_before_a_worker_starts():
    options = parse_command_line(["--msrun", "-np", "3", "-msrun-size", "4", "-port-range", "20000-20002", *PROGRAM])
    cluster = options.hosts.first_cluster(3, options.ports, options.control_port, 0)
    without = cluster.without([cluster.workers[0]])
    with pytest.raises(HostError, match="20003 has a port outside of -port-range 20000-20002, but --msrun requires"):
        options.hosts.check(commands._resized(without, 3, None), without.workers)
    options.hosts.check(commands._resized(without, 3, options.ports), without.workers)
    assert parse_command_line(["-np", "3", "-port-range", "20000-20002", *PROGRAM]).hosts.ports is None


def test_worker_that_replaces_a_failed_first_one_has_its_slot():
    options = parse_command_line(["--msrun", "-np", "3", *PROGRAM])
    cluster = options.hosts.first_cluster(3, options.ports, options.control_port, 0)
    without = cluster.without([cluster.workers[0]])
    grown = commands._resized(without, 3, None)
    places = [place_of(Process(key, "", peer.host, peer), 0, options) for key, peer in enumerate(grown.workers)]
    assert places == [1, 2, 0]
