"""Which of Ray's nodes have workers, by what names, and what a command line for an engine says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ms_kungfu._flags import UsageError
from ms_kungfu.launcher.engine_flags import EngineRequest
from ms_kungfu.launcher.options import parse_command_line
from ms_kungfu.ray.placing import Names, Node, deal, too_small

CPU = {"CPU": 1.0}
ADDRESS = "10.0.0.1:6379"


def node(number, address="10.0.0.1", leaves=False, **free):
    return Node(f"n{number}", address, free, leaves)


# ---- how many workers each has ----


@pytest.mark.parametrize(
    ("free", "needs", "room"),
    [
        ({"CPU": 4}, {"CPU": 1}, 4),
        ({"CPU": 4.0}, {"CPU": 1.5}, 2),
        ({"CPU": 0.3}, {"CPU": 0.1}, 3),  # which isn't 3 * 0.1 in binary
        ({"CPU": 64, "GPU": 2}, {"CPU": 4, "GPU": 1}, 2),
        ({"CPU": 64}, {"CPU": 4, "GPU": 1}, 0),
        ({}, {"CPU": 1}, 0),
    ],
)
def test_node_fits_as_many_workers_as_its_scarcest_resource(free, needs, room):
    assert node(1, **free).room(needs) == room


def test_draining_node_gets_no_worker():
    assert node(1, leaves=True, CPU=8).room(CPU) == 0


def test_nodes_with_most_space_come_first_and_only_needed_ones_are_taken():
    nodes = [node(1, CPU=2), node(2, CPU=8), node(3, CPU=4)]
    assert deal(nodes, CPU, 16) == {"n2": 8, "n3": 4, "n1": 2}
    assert deal(nodes, CPU, 10) == {"n2": 8, "n3": 2}
    assert deal(nodes, CPU, 8) == {"n2": 8}
    assert deal(nodes, CPU, 0) == {}


@given(st.lists(st.integers(0, 9), max_size=9), st.integers(0, 40))
def test_placement_fits_the_nodes_and_places_as_many_as_possible(rooms, most):
    nodes = [node(number, CPU=count) for number, count in enumerate(rooms)]
    dealt = deal(nodes, CPU, most)
    assert sum(dealt.values()) == min(most, sum(rooms))
    assert all(0 < dealt[each.id] <= each.free["CPU"] for each in nodes if each.id in dealt)


# ---- names ----


def names_of(*addresses):
    nodes = [node(number, address) for number, address in enumerate(addresses)]
    names, given = Names(nodes), []
    for each in nodes:
        given.append(names.name(each, given))
    return given


def test_a_host_goes_by_the_address_of_its_node():
    assert names_of("10.0.0.1", "10.0.0.2", "fd00::3") == ["10.0.0.1", "10.0.0.2", "[fd00::3]"]


def test_raylets_of_one_machine_are_hosts_of_the_loopback():
    assert names_of("10.0.0.1", "10.0.0.1", "10.0.0.1") == ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    assert names_of("127.0.0.1") == ["127.0.0.1"]


def test_a_name_on_the_loopback_is_given_once():
    names = Names([node(1), node(2)])
    found = [names.name(node(number), []) for number in range(600)]
    assert len({*found}) == 600
    assert {"127.0.0.1", "127.0.0.250", "127.0.1.1", "127.0.2.100"} <= {*found}
    assert not any(name.endswith((".0", ".255")) for name in found)


def test_a_second_raylet_of_a_machine_among_others_is_left_out():
    assert names_of("10.0.0.1", "10.0.0.2", "10.0.0.1") == ["10.0.0.1", "10.0.0.2", None]


def test_remote_node_and_loopback_hosts_cannot_share_a_job():
    assert Names([node(1), node(2)]).name(node(3, "10.0.0.2"), []) is None
    assert Names([node(1)]).name(node(3, "127.0.0.1"), ["10.0.0.1"]) is None
    assert Names([node(1)]).name(node(3, "10.0.0.3"), ["10.0.0.1"]) == "10.0.0.3"


def test_the_sentence_for_a_cluster_that_is_too_small():
    needs = {"CPU": 1.0, "GPU": 1.0}
    assert too_small([node(1, CPU=3.0, GPU=2.0), node(2, CPU=1)], needs, 5, 4, 0, ADDRESS, False) == (
        "-min-np 4 is more than the 2 workers that fit on the Ray cluster at 10.0.0.1:6379: its 2 nodes have 4 "
        "CPU and 2 GPU free, and a worker requires 1 CPU and 1 GPU; request a smaller -min-np, add nodes, or let it "
        "wait for some (-wait 10m)"
    )
    told = too_small([node(1)], CPU, 4, 4, 30, ADDRESS, True)
    assert told.startswith(
        "-np 4 is more than the 0 workers that fit on the Ray cluster at 10.0.0.1:6379 after 30 s: its 1 node has"
    )
    assert told.endswith(
        "; this cluster was found running on this machine: -address local starts a new cluster for this job only"
    )


# ---- the command line ----


def request(*words):
    found = parse_command_line(["--engine", "ray", *words, "sh", "-c", "true"])
    assert isinstance(found, EngineRequest)
    assert found.command == ("sh", "-c", "true")
    return found


def test_sizes_by_default_are_those_that_are_given():
    found = request("-np", "8", "-min-np", "2", "-max-np", "16", "-wait", "1m")
    assert (found.size, found.least, found.most, found.wait_s) == (8, 2, 16, 60.0)
    assert [(r.size, r.least, r.most) for r in (request(), request("-np", "3"), request("-min-np", "2"))] == [
        (1, 1, 1), (3, 3, 3), (2, 2, 2)
    ]  # fmt: skip
    assert "-min-np=2" in found.flags
    assert not any("min-np" in word for word in request("-np", "3").flags)


def test_resources_of_a_worker_follow_the_flags():
    assert request().needs == {"CPU": 1.0}
    assert request("-cpus-per-worker", "0", "-gpus-per-worker", "0.5", "-npus-per-worker=2").needs == {
        "GPU": 0.5, "NPU": 2.0
    }  # fmt: skip


def test_other_flags_go_to_the_kungfu_run_of_each_node():
    flags = request("--recover", "replace", "-q", "-w", "-address", "auto", "-cpus-per-worker", "2").flags
    assert flags == ("-recover=replace", "-q=true", "-affinity=none")
    assert "-affinity=none" not in request("-cores-per-worker", "1").flags


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-H", "a:1"], "-H can't be combined with -engine: the engine finds the hosts; leave -H out"),
        (["-standby", "1"], "-standby can.t be combined with -engine"),
        (["-secret-file", "x"], "-secret-file can.t be combined with -engine"),
        (["-np", "2", "-min-np", "3"], "-np 2 is less than -min-np 3"),
        (["-np", "2", "-max-np", "1"], "-max-np 1 is less than -np 2"),
        (["-cpus-per-worker", "0"], "a worker needs more than 0"),
        (["-gpus-per-worker", "nan"], "'nan' is not an amount"),
        (["-gpus-per-worker", "-1"], "'-1' is not an amount"),
    ],
)
def test_flag_that_ray_cannot_honour_is_refused(words, told):
    with pytest.raises(UsageError, match=told):
        request(*words)


def test_the_engines_flags_need_one():
    for words in (["-max-np", "4"], ["-address", "auto"], ["-wait", "1s"], ["-gpus-per-worker", "1"]):
        with pytest.raises(UsageError, match=f"{words[0]} requires -engine"):
            parse_command_line([*words, "sh"])
    with pytest.raises(UsageError, match="unknown engine 'spark'; known engines: ray"):
        parse_command_line(["-engine", "spark", "sh"])
    with pytest.raises(UsageError, match="no program to run"):
        parse_command_line(["-engine", "ray"])


def test_output_of_another_host_has_its_name():
    pytest.importorskip("ray")
    from ms_kungfu.ray.driver import of_host

    assert of_host("a", b"[kungfu-run] 12:00:00 it\n") == b"[kungfu-run a] 12:00:00 it\n"
    assert of_host("a", b"kungfu-run: it\n") == b"kungfu-run on a: it\n"
    assert of_host("a", b"loss 0.1\n") == b"loss 0.1\n"
