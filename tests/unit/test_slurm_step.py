"""Slurm's lists of nodes and numbers, and what they mean for a job."""

from __future__ import annotations

import os

import pytest

from ms_kungfu._flags import UsageError
from ms_kungfu.launcher import network, slurm
from ms_kungfu.launcher.node_lists import counts_of, nodes_of
from ms_kungfu.launcher.options import parse_command_line
from ms_kungfu.launcher.slurm import SpareTaskError, take_cores
from ms_kungfu.launcher.state.hosts import Host

SECRET = "5ec2" * 16
NODES = {"n1": "10.0.0.1", "n2": "10.0.0.2", "n3": "10.0.0.3"}
STEP = {
    "SLURM_JOB_ID": "41",
    "SLURM_STEP_ID": "2",
    "SLURM_JOB_NODELIST": "n[1-3]",
    "SLURM_TASKS_PER_NODE": "2(x2),1",
    "SLURM_JOB_CPUS_PER_NODE": "8,4(x2)",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("text", "nodes"),
    [
        ("login", ["login"]),
        ("a,b-2,c.example.org", ["a", "b-2", "c.example.org"]),
        ("gpu[01-03]", ["gpu01", "gpu02", "gpu03"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101,7]", ["gpu098", "gpu099", "gpu100", "gpu101", "gpu7"]),
        ("n[1,3-4]-ib,m2", ["n1-ib", "n3-ib", "n4-ib", "m2"]),
        ("r[0-1]n[2-3]", ["r0n2", "r0n3", "r1n2", "r1n3"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_a_list_of_nodes_is_each_in_its_order(text, nodes):
    assert nodes_of(text) == nodes


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'' contains no node"),
        ("a,,b", "'' contains no node"),
        ("n[1-", "its brackets don't match"),
        ("n1-2]", "its brackets don't match"),
        ("n[[1]]", "its brackets don't match"),
        ("n[]", "nodes: '' is not a range"),
        ("n[1-2,]", "is not a range"),
        ("n[3-1]", "nodes: '3-1' is not a range"),
        ("n[a-b]", "is not a range"),
        ("n[1-2-3]", "is not a range"),
        ("n[-1]", "is not a range"),
        ("n[1-99999999]", "more than 65536 nodes"),
        ("n[0-999]m[0-999]", "more than 65536 nodes"),
        ("n 1", "contains no node"),
        ("n1;reboot", "contains no node"),
        ("n[1-3],n2", "lists n2 twice"),
    ],
)
def test_malformed_list_of_nodes_is_refused_in_a_sentence(text, told):
    with pytest.raises(ValueError, match="^'") as caught:
        nodes_of(text)
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_long_list_that_is_none_is_not_quoted_whole():
    with pytest.raises(ValueError, match=r"a\.\.\.") as caught:
        nodes_of("a" * 5000 + "[")
    assert len(str(caught.value)) < 300


def test_numbers_are_one_for_each_node():
    assert counts_of("2(x3),1") == [2, 2, 2, 1]
    assert counts_of("4") == [4]


@pytest.mark.parametrize("text", ["", "x", "2(3)", "2(x0)", "2(x3", "1,,2", "-1", "1(x99999999)"])
def test_malformed_list_of_numbers_is_refused(text):
    with pytest.raises(ValueError, match="is not a list of numbers"):
        counts_of(text)


# ---- on the command line ----


@pytest.fixture(autouse=True)
def second_of_three(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SLURM_") or name in ("KUNGFU_JOB_SECRET", "KUNGFU_DISTRIBUTE_HOSTS"):
            monkeypatch.delenv(name)
    monkeypatch.setattr(network, "is_of_this_machine", {"10.0.0.2", "127.0.0.1"}.__contains__)
    monkeypatch.setattr(network, "addresses_of", lambda name: [NODES.get(name, name)])


def options(*arguments, secret=SECRET, **changes):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**STEP, "KUNGFU_JOB_SECRET": secret, **changes}.items():
            if value:
                patch.setenv(name, value)
        return parse_command_line([*arguments, "sh"])


def test_the_nodes_of_a_step_are_the_hosts_and_its_tasks_the_workers():
    found = options()
    assert found.hosts.each == (Host("n1", 2), Host("n2", 2), Host("n3", 1))
    assert (found.hosts.self_name, found.hosts.head.name, found.size) == ("n2", "n1", 5)
    assert found.in_slurm


def test_single_task_of_a_node_may_have_a_worker_for_each_allocated_core():
    found = options("-np", "6", SLURM_TASKS_PER_NODE="1(x3)")
    assert found.hosts.each == (Host("n1", 8), Host("n2", 4), Host("n3", 4))
    assert found.size == 6
    assert options(SLURM_TASKS_PER_NODE="1(x3)").size == 3
    assert options(SLURM_TASKS_PER_NODE="1(x3)", SLURM_JOB_CPUS_PER_NODE="").hosts.slots == 3
    assert options("--nproc-per-node", "4", SLURM_TASKS_PER_NODE="1(x3)").size == 12


def test_the_steps_own_nodes_and_tasks_count_before_the_allocations():
    found = options(SLURM_STEP_NODELIST="n[2-3]", SLURM_STEP_TASKS_PER_NODE="1(x2)", SLURM_NODEID="0")
    assert found.hosts.each == (Host("n2", 4), Host("n3", 4))
    assert found.hosts.self_name == "n2"


def test_jobs_and_steps_beside_each_other_meet_at_other_ports():
    ports = {options(SLURM_JOB_ID=job, SLURM_STEP_ID=step).control_port for job in ("41", "42") for step in ("0", "1")}
    assert len(ports) == 4
    assert all(1024 < port < 32768 for port in ports)
    assert options("-port", "38080").control_port == 38080


def test_one_node_is_a_host_without_a_name():
    found = options(secret="", SLURM_JOB_NODELIST="n1", SLURM_TASKS_PER_NODE="3", SLURM_NODEID="0")
    assert (found.hosts.names, found.hosts.slots, found.size) == (("127.0.0.1",), None, 3)


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        (["-H", "n1:2,n2:2"], {}),
        (["--standalone"], {}),
        ([], {"SLURM_STEP_ID": ""}),
        ([], {"SLURM_STEP_ID": "4294967291"}),  # the batch script itself
        ([], {"SLURM_JOB_ID": ""}),
    ],
)
def test_explicit_hosts_or_a_process_outside_srun_ignore_the_step(arguments, changes):
    found = options(*arguments, SLURM_JOB_NODELIST="no list[", **changes)
    assert not found.in_slurm
    assert found.size == 1
    assert found.control_port == 38080


def test_another_task_of_the_node_has_nothing_to_do():
    with pytest.raises(SpareTaskError):
        options(SLURM_LOCALID="1")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"SLURM_JOB_NODELIST": "n[1-"}, "SLURM_JOB_NODELIST: 'n[1-' is not a list of nodes: its brackets don't match"),
        ({"SLURM_JOB_NODELIST": ""}, "Slurm has not set SLURM_JOB_NODELIST"),
        ({"SLURM_TASKS_PER_NODE": "2(x"}, "SLURM_TASKS_PER_NODE: '2(x' is not a list of numbers: '2(x' isn't a number"),
        ({"SLURM_TASKS_PER_NODE": "2"}, "SLURM_TASKS_PER_NODE=2 is for 1 node, but SLURM_JOB_NODELIST=n[1-3] lists 3"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3 is too large for the 3 nodes"),
        ({"SLURM_NODEID": "one"}, "SLURM_NODEID must be a number, got 'one'"),
        ({"SLURM_STEP_ID": "x"}, "SLURM_STEP_ID must be a number, got 'x'"),
        ({"SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_JOB_CPUS_PER_NODE": "many"}, "SLURM_JOB_CPUS_PER_NODE: 'many'"),
    ],
)
def test_contradictory_slurm_variable_is_refused_by_value_and_remedy(changes, told):
    with pytest.raises(UsageError) as caught:
        options(**changes)
    assert told in str(caught.value)
    assert str(caught.value).endswith("name the hosts with -H, or give --standalone for a job on this host")


def test_several_nodes_need_a_secret_that_srun_passes_on():
    with pytest.raises(UsageError, match="srun passes its environment .* export KUNGFU_JOB_SECRET="):
        options(secret="")


def test_the_first_task_has_the_cores_of_all_on_its_node(monkeypatch):
    taken = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: taken.append(set(cores)), raising=False)
    bound = {"SLURM_CPU_BIND_TYPE": "mask_cpu:", "SLURM_CPU_BIND_LIST": "0x00000001,0x00000006"}
    take_cores(bound)
    assert taken == [{0, 1, 2}]
    for left_alone in (
        {},
        {"SLURM_CPU_BIND_TYPE": "none"},
        {**bound, "SLURM_CPU_BIND_LIST": "first"},
        {**bound, "SLURM_CPU_BIND_TYPE": "map_cpu:"},
    ):
        take_cores(left_alone)
    assert len(taken) == 1
    monkeypatch.setattr(slurm.os, "sched_setaffinity", lambda *_: os.stat("/nowhere"))
    take_cores(bound)  # whatever the kernel has against it
