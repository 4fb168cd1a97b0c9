"""Several hosts on kungfu-run's command line: which they are, which one this is, what they share."""

from __future__ import annotations

import os

import pytest

from ms_kungfu._flags import UsageError
from ms_kungfu.cluster import Cluster
from ms_kungfu.launcher import host_flags, network
from ms_kungfu.launcher.options import parse_command_line, what_is_done_instead
from ms_kungfu.launcher.state import hosts as state_hosts
from ms_kungfu.launcher.state.hosts import Host

SECRET = "5ec2" * 16
THREE = "10.0.0.1:2,10.0.0.2:4,gpu3:2:login.example"
KNOWN = {"here": ["127.0.1.1"], "gpu3": ["10.0.0.3", "fd00::3"], "gpu1": ["10.0.0.1"]}


@pytest.fixture(autouse=True)
def second_of_three(monkeypatch):
    """This machine has 10.0.0.2, and a name server that knows gpu3."""
    own = {"10.0.0.2", "fd00::2", "127.0.0.1", "127.0.0.2", "127.0.1.1"}
    monkeypatch.delenv("KUNGFU_JOB_SECRET", raising=False)
    monkeypatch.setattr(network, "is_of_this_machine", own.__contains__)
    monkeypatch.setattr(network, "interfaces", lambda: ["lo", "eth0", "eth1", "ib0"])
    monkeypatch.setattr(
        network,
        "addresses_of_interface",
        {"lo": ["127.0.0.1"], "eth0": ["10.0.0.2", "fd00::2"], "eth1": ["10.9.9.9"]}.get,
    )
    monkeypatch.setattr(
        network, "addresses_of", lambda name: [name] if name[0].isdigit() or ":" in name else KNOWN.get(name, [])
    )
    return own


@pytest.fixture(autouse=True)
def devices_of_this_host(monkeypatch):
    """It has 3 cores, and no devices unless the test adds them."""
    for name in ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    found, listdir = ["null"], os.listdir
    monkeypatch.setattr(os, "listdir", lambda folder=".": found if folder == "/dev" else listdir(folder))
    monkeypatch.setattr(host_flags, "core_count", lambda: 3)
    return found


def options(*arguments, secret=SECRET):
    with pytest.MonkeyPatch.context() as patch:
        if secret:
            patch.setenv("KUNGFU_JOB_SECRET", secret)
        return parse_command_line([*arguments, "sh"])


def refusal(*arguments, secret=SECRET):
    with pytest.raises(UsageError) as caught:
        options(*arguments, secret=secret)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert SECRET not in sentence
    return sentence


# ---- the list ----


def test_hosts_keep_their_order_and_this_one_is_found_among_them():
    hosts = options("-H", THREE, "-np", "5").hosts
    assert hosts.each == (Host("10.0.0.1", 2), Host("10.0.0.2", 4), Host("gpu3", 2, "login.example"))
    assert (hosts.self_name, hosts.own.slots, hosts.is_several) == ("10.0.0.2", 4, True)
    assert (hosts.head.name, hosts.is_head) == ("10.0.0.1", False)
    assert hosts.limit == "10.0.0.1:2,10.0.0.2:4,gpu3:2"
    assert options("-H", THREE).host.name == "10.0.0.2"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[fd00::0:2]:4,[FD00::1]:2", ["[fd00::2]", "[fd00::1]"]),
        ("[fd00::2],[fd00::1]:1:[fd00::9]", ["[fd00::2]", "[fd00::1]"]),
        ("10.0.0.2,GPU3:1", ["10.0.0.2", "gpu3"]),
    ],
)
def test_a_host_has_one_name_however_it_is_written(text, names):
    hosts = options("-H", text).hosts
    assert list(hosts.names) == names
    assert [host.address for host in hosts.each] == [name.strip("[]") for name in names]


def test_head_node_may_have_no_slots():
    hosts = options("-np", "2", "-H", "127.0.0.1:0,127.0.0.2:2", "-self", "127.0.0.1").hosts
    assert hosts.is_head
    assert hosts.slots_by_host == {"127.0.0.1": 0, "127.0.0.2": 2}
    first = hosts.first_cluster(2, range(10000, 10010), 38080, 0)
    assert {worker.host for worker in first.workers} == {"127.0.0.2"}
    assert Cluster.from_json(first.to_json()).slots == {"127.0.0.1": 0, "127.0.0.2": 2}
    with pytest.raises(UsageError, match="-np 1: -H .* has 0 slots"):
        options("-np", "1", "-H", "127.0.0.1:0")


def test_one_host_that_others_may_join_is_as_one_of_several():
    words = ["-w", "-builtin-config-port", "9100", "-joinable"]
    found = options(*words, "-H", "127.0.0.1:2")
    assert found.hosts.is_several
    assert found.config_server == "http://127.0.0.1:9100/config"
    assert found.hosts.first_cluster(2, range(10000, 10010), 38080, 0).slots == {"127.0.0.1": 2}
    with pytest.raises(UsageError, match="several hosts require a shared secret"):
        options(*words, "-H", "127.0.0.1:2", secret="")
    for few in (words, [*words[1:], "-H", "127.0.0.1:2"]):
        with pytest.raises(UsageError, match="-joinable requires -w, and -H"):
            options(*few)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("10.0.0.2:-1", "is not host:slots"),
        ("10.0.0.2:1_0", "is not host:slots"),
        ("10.0.0.2:", "is not host:slots"),
        ("10.0.0.2:99999999999", "is not host:slots"),
        ("10.0.0.2:2:a:b", "is not host:slots"),
        ("fd00::2:4", "write an IPv6 address in brackets"),
        (":4", "'' is neither a host name nor an IP address"),
        ("10.0.0:4", "'10.0.0' is neither"),
        ("10.0.0.256:4", "'10.0.0.256' is neither"),
        ("a b:4", "'a b' is neither"),
        ("a;rm:4", "'a;rm' is neither"),
        ("-oProxyCommand=x:4", "'-oProxyCommand=x' is neither"),
        ("10.0.0.2:4:-oX", "'-oX' is neither"),
        ("[fe80::1%eth0]:4", "is neither"),
        ("[10.0.0.x]:4", "is neither"),
        ("10.0.0.2:1,10.0.0.2:2", "10.0.0.2 is listed 2 times; list it once with all its slots"),
        ("gpu3:1,GPU3:2", "gpu3 is listed 2 times"),
        (",", "',' is neither"),
    ],
)
def test_malformed_list_of_hosts_is_refused(text, told):
    assert told in refusal("-H", text)


def test_a_hostfile_is_read_as_kungfu_reads_it(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("# all\n10.0.0.1 slots=4 # one\n\n \t10.0.0.2   slots=8 public_addr=x.y.z# two\n[fd00::3]\n")
    assert options("-hostfile", str(file)).hosts.each == (
        Host("10.0.0.1", 4),
        Host("10.0.0.2", 8, "x.y.z"),
        Host("[fd00::3]", 1),
    )
    assert "both name the hosts" in refusal("-hostfile", str(file), "-H", THREE)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("10.0.0.1 slots=4\n10.0.0.2 slots=x\n", ":2: 'slots=x' is neither slots=NUMBER nor public_addr=ADDRESS"),
        ("10.0.0.1 max_slots=4\n", ":1: 'max_slots=4' is neither"),
        ("10.0.0.1 4\n", ":1: '4' is neither"),
        ("10.0.0.1:4\n", ":1: '10.0.0.1:4' is neither a host name nor an IP address"),
        ("# nobody\n", " contains no host"),
        ("", " contains no host"),
        ("10.0.0.1\n10.0.0.1\n", "10.0.0.1 is listed 2 times"),
    ],
)
def test_wrong_hostfile_is_refused_with_its_line(text, told, tmp_path):
    file = tmp_path / "hosts"
    file.write_text(text)
    assert told in refusal("-hostfile", str(file))


def test_a_hostfile_that_cannot_be_read(tmp_path):
    assert "can't be read: No such file" in refusal("-hostfile", str(tmp_path / "none"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "is not text in UTF-8" in refusal("-hostfile", str(tmp_path / "binary"))


# ---- which one is this? ----


def test_this_host_may_be_given_by_name_address_or_interface():
    assert options("-H", THREE, "-self", "10.0.0.2").hosts.self_name == "10.0.0.2"
    assert options("-H", THREE, "-nic", "eth0").hosts.self_name == "10.0.0.2"
    assert options("-H", "[fd00::1]:1,[fd00::2]:1", "-nic", "eth0").hosts.self_name == "[fd00::2]"
    assert options("-H", "[fd00::1]:1,[fd00::2]:1", "-self", "fd00:0::2").hosts.self_name == "[fd00::2]"


def test_a_name_is_this_machine_where_it_has_one_of_its_addresses(second_of_three):
    second_of_three.add("fd00::3")
    assert options("-H", "10.0.0.1:1,gpu3:1").hosts.self_name == "gpu3"
    assert options("-H", "10.0.0.1:1,gpu3:1", "-self", "fd00::3").hosts.self_name == "gpu3"


def test_several_hosts_on_one_machine_need_self_or_nic():
    two = "127.0.0.1:2,127.0.0.2:2"
    assert refusal("-H", two) == ("this machine matches several hosts: 127.0.0.1 and 127.0.0.2; select one with -self")
    assert options("-H", two, "-self", "127.0.0.2").hosts.self_name == "127.0.0.2"
    assert options("-H", two, "-nic", "lo").hosts.self_name == "127.0.0.1"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-H", "10.0.0.1:2,10.0.0.9:2"], "this machine has none of the addresses of the hosts 10.0.0.1,10.0.0.9"),
        (["-H", THREE, "-self", "10.0.0.9"], "-self 10.0.0.9 is not one of the hosts 10.0.0.1,10.0.0.2,gpu3"),
        (["-H", THREE, "-self", "10.0.0.1"], "-self 10.0.0.1 is not an address of this machine"),
        (["-H", THREE, "-self", "10.0.0"], "-self: '10.0.0' is neither a host name nor an IP address"),
        (["-H", THREE, "-nic", "eth1"], "(10.9.9.9) is among the hosts 10.0.0.1,10.0.0.2,gpu3"),
        (["-H", THREE, "-nic", "ib0"], "-nic ib0 has no address"),
        (["-H", THREE, "-nic", "eth7"], "this machine has no such interface; its interfaces are lo, eth0, eth1, ib0"),
        (["-H", "10.0.0.2:1,gpu9:1"], "the name of host gpu9 could not be resolved within"),
        (["-H", "127.0.0.1:2,10.0.0.2:2"], "127.0.0.1 is a loopback address"),
        (["-H", "here:2,10.0.0.1:2"], "here is 127.0.1.1 on this machine, which other hosts can't reach"),
        (["-H", "gpu1:2,10.0.0.1:2"], "gpu1 and 10.0.0.1 resolve to the same machine"),
    ],
)
def test_machine_outside_the_hosts_is_refused_with_the_reason(arguments, told, monkeypatch):
    monkeypatch.setenv("KUNGFU_JOIN_TIMEOUT", "0.01")
    monkeypatch.setattr(state_hosts, "_LOOK_UP_AGAIN_S", 0.01)
    assert told in refusal(*arguments)


def test_one_host_may_be_named_by_its_address_or_interface_alone():
    hosts = options("-nic", "eth0", "-np", "3", secret="").hosts
    assert (hosts.names, hosts.slots, hosts.is_several) == (("10.0.0.2",), None, False)
    assert options("-self", "10.0.0.2", secret="").hosts.names == ("10.0.0.2",)
    assert options("-H", "here:2", secret="").hosts.names == ("here",)
    assert options("-self", "fd00::2", secret="").hosts.names == ("[fd00::2]",)


# ---- the config server ----


def test_head_node_is_the_host_of_the_config_server():
    there = "http://10.0.0.2:9100/config"
    assert options("-H", THREE, "-w", "-config-server", there).hosts.head.name == "10.0.0.2"
    assert options("-H", THREE, "-w", "-config-server", "http://10.7.7.7:9100/config").hosts.head.name == "10.0.0.1"
    embedded = options("-H", THREE, "-w", "-config-server", there, "-builtin-config-port", "9100")
    assert (embedded.hosts.is_head, embedded.builtin_port) == (True, 9100)
    elsewhere = options("-H", THREE, "-w", "-config-server", "http://gpu3:9100/config", "-builtin-config-port", "9100")
    assert (elsewhere.hosts.head.name, elsewhere.builtin_port) == ("gpu3", None)


def test_an_embedded_config_server_without_an_address_is_the_first_hosts():
    found = options("-H", THREE, "-w", "-builtin-config-port", "9100")
    assert found.config_server == "http://10.0.0.1:9100/config"
    assert (found.hosts.head.name, found.builtin_port) == ("10.0.0.1", None)
    found = options("-H", "[fd00::2]:1,10.0.0.1:1", "-w", "-builtin-config-port", "9100")
    assert found.config_server == "http://[fd00::2]:9100/config"
    assert (found.hosts.is_head, found.builtin_port) == (True, 9100)


def test_without_w_several_hosts_need_no_config_server():
    found = options("-H", THREE, "-np", "4")
    assert (found.config_server, found.builtin_port) == (None, None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["-w"], "give -builtin-config-port 9100 on each host; host 10.0.0.1 then runs the server"),
        (["-w", "-builtin-config-port", "0"], "several hosts have to know the port"),
        (["-w", "-config-server", "http://10.0.0.1:9100/config", "-builtin-config-port", "0"], "give a fixed port"),
        (["-w", "-config-server", "http://127.0.0.1:9100/config"], "is a different server on each host"),
        (["-w", "-config-server", "http://localhost:9100/config"], "is a different server on each host"),
        (["-w", "-config-server", "http://[::1]:9100/config"], "is a different server on each host"),
        (
            ["-w", "-config-server", "http://10.7.7.7:9100/config", "-builtin-config-port", "9100"],
            "10.7.7.7 is none of 10.0.0.1:2,10.0.0.2:4,gpu3:2",
        ),
    ],
)
def test_a_config_server_that_not_all_hosts_reach_is_refused(arguments, told):
    assert told in refusal("-H", THREE, *arguments)


def test_hosts_of_one_machine_may_have_its_own_config_server():
    two = "127.0.0.1:2,127.0.0.2:2"
    found = options("-H", two, "-self", "127.0.0.2", "-w", "-config-server", "http://127.0.0.2:9100/config")
    assert found.hosts.is_head


# ---- the secret ----


def test_several_hosts_without_a_secret_are_refused_with_the_remedy():
    sentence = refusal("-H", THREE, secret="")
    assert "openssl rand -hex 32" in sentence
    assert "-secret-file" in sentence
    assert "-no-secret" in sentence
    assert "has 8 digits; several hosts require at least 32" in refusal("-H", THREE, secret="5ec25ec2")
    assert options("-H", THREE).secret == SECRET
    assert options("-H", THREE, "-no-secret", secret="").secret is None
    assert options(secret="").secret is None


def test_the_secret_of_a_file(tmp_path):
    file = tmp_path / "job.secret"
    file.write_text(f"{SECRET}\n")
    file.chmod(0o600)
    found = options("-H", THREE, "-secret-file", str(file), secret="")
    assert found.secret == SECRET
    assert SECRET not in repr(found)
    assert "both set the job's secret" in refusal("-H", THREE, "-secret-file", str(file))
    assert "-no-secret conflicts" in refusal("-H", THREE, "-secret-file", str(file), "-no-secret", secret="")
    assert "-no-secret conflicts" in refusal("-H", THREE, "-no-secret")
    assert "but this job has one" in refusal("-no-secret", secret="")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o777])
def test_a_secret_that_others_may_read_is_none(mode, tmp_path):
    file = tmp_path / "job.secret"
    file.write_text(SECRET)
    file.chmod(mode)
    sentence = refusal("-H", THREE, "-secret-file", str(file), secret="")
    assert f"(mode {mode:04o})" in sentence
    assert f"chmod 600 {file}" in sentence


@pytest.mark.parametrize("text", ["", "xyz", "5ec", "5ec2 5ec2", "5ec2\n5ec2"])
def test_a_file_that_holds_no_secret(text, tmp_path):
    file = tmp_path / "job.secret"
    file.write_text(text)
    file.chmod(0o600)
    sentence = refusal("-H", THREE, "-secret-file", str(file), secret="")
    assert "must contain an even number of hexadecimal digits" in sentence
    file.write_text("0" * 5000)
    assert "more than 4096 bytes" in refusal("-H", THREE, "-secret-file", str(file), secret="")


def test_secret_file_that_is_no_file_is_refused(tmp_path):
    assert "can't be read: No such file" in refusal("-H", THREE, "-secret-file", str(tmp_path / "none"), secret="")
    assert "is not a file" in refusal("-H", THREE, "-secret-file", str(tmp_path), secret="")
    os.mkfifo(tmp_path / "fifo", 0o600)
    assert "is not a file" in refusal("-H", THREE, "-secret-file", str(tmp_path / "fifo"), secret="")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_secret_of_another_users_is_none(tmp_path):
    file = tmp_path / "job.secret"
    file.write_text(SECRET)
    file.chmod(0o600)
    os.chown(file, 12345, 12345)
    assert "another user owns" in refusal("-H", THREE, "-secret-file", str(file), secret="")


# ---- limits, strategy, placement ----


def test_limits_are_checked_before_a_worker_starts():
    assert "-np 9: -H " in refusal("-H", THREE, "-np", "9")
    many = ",".join(f"10.0.0.{number}:250" for number in range(1, 6))
    assert "-np 1025: at most 1024 workers in a job" in refusal("-H", many, "-np", "1025")
    assert options("-H", many, "-np", "1024").size == 1024
    assert "256 workers on 10.0.0.1: at most 255" in refusal("-H", "10.0.0.1:300,10.0.0.2:1", "-np", "257")
    assert "too small for 2 workers" in refusal("-H", THREE, "-np", "5", "-port-range", "10000-10000")
    assert options("-H", THREE, "-np", "3", "-port-range", "10000-10000").size == 3  # one on each


@pytest.mark.parametrize(
    "name",
    [
        "STAR", "MULTI_STAR", "RING", "CLIQUE", "TREE", "BINARY_TREE", "BINARY_TREE_STAR", "MULTI_BINARY_TREE_STAR",
    ],
)  # fmt: skip
def test_a_strategy_is_one_of_hosts_and_said_to_change_nothing_on_one(name):
    assert options("-H", THREE, "-strategy", name.lower()).strategy == name
    assert what_is_done_instead(name, is_several=True) == ""
    sentence = what_is_done_instead(name, is_several=False)
    assert sentence.startswith(f"-strategy {name} has no effect on one host: ")
    assert "shared memory, which has no topology; the job runs as with -strategy AUTO" in sentence


@pytest.mark.parametrize("name", ["AUTO", "SHM"])
def test_supported_strategy_is_not_reported(name):
    assert what_is_done_instead(name, is_several=False) == ""


def test_shared_memory_is_no_strategy_between_hosts():
    assert options("-H", THREE).strategy == options("-H", THREE, "-strategy", "AUTO").strategy == "AUTO"
    assert "which several hosts don't have" in refusal("-H", THREE, "-strategy", "SHM")


def test_placement():
    assert options("-H", THREE).hosts.placement == "even"
    assert options("-H", THREE, "-placement", "fill").hosts.placement == "fill"
    assert "'odd' is not a placement; give even or fill" in refusal("-H", THREE, "-placement", "odd")
    assert "but this job has one" in refusal("-placement", "fill", secret="")


# ---- kungfu-distribute's ----


def test_command_without_hosts_uses_those_of_kungfu_distribute(monkeypatch):
    monkeypatch.setenv("KUNGFU_DISTRIBUTE_HOSTS", "10.0.0.1:2,10.0.0.2:4,[fd00::7]:1")
    assert str(options("-np", "5").hosts) == "10.0.0.1:2,10.0.0.2:4,[fd00::7]:1"
    assert options("-np", "5").host.name == "10.0.0.2"
    assert options("-H", THREE).hosts.names == ("10.0.0.1", "10.0.0.2", "gpu3")
    assert not options("--standalone", "-np", "2", secret="").hosts.is_several
    monkeypatch.setenv("KUNGFU_DISTRIBUTE_HOSTS", "10.0.0.1")
    assert "KUNGFU_DISTRIBUTE_HOSTS must be 'host:slots', comma-separated" in refusal("-np", "2")


# ---- torchrun's ----


def test_torchruns_numbers_are_understood():
    assert options("--nproc-per-node", "3", secret="").size == 3
    assert options("--standalone", "--nnodes", "1", "--nproc_per_node=2", secret="").size == 2
    found = options("--nnodes=3", "--nproc-per-node=2", "-H", THREE)
    assert (found.size, found.watch) == (6, False)
    found = options(
        "--nnodes", "2:4", "--nproc-per-node", "2", "-H", THREE, "-config-server", "http://10.0.0.1:9100/config"
    )
    assert (found.size, found.min_size, found.watch) == (6, 4, True)
    assert options("--nnodes", "3", "-np", "4", "-H", THREE).size == 4
    for zero in ("--max-restarts", "--max_restarts"):
        assert options(zero, "0", secret="").max_restarts == 0


def test_torchruns_kinds_of_workers_are_counted_on_this_host(devices_of_this_host):
    for how, count in (("cpu", 3), ("auto", 3)):
        assert options("--nproc-per-node", how, secret="").size == count
    devices_of_this_host += ["nvidia0", "nvidia1"]
    for how, count in (("cpu", 3), ("gpu", 2), ("auto", 2)):
        assert options("--nproc_per_node", how, secret="").size == count
    assert options("--nproc-per-node", "gpu", "-H", THREE).size == 6
    devices_of_this_host[:] = ["davinci0"]
    assert options("--nproc-per-node", "auto", secret="").size == 1
    assert "but Ascend devices: --nproc-per-node auto counts them" in refusal("--nproc-per-node", "gpu", secret="")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--nnodes", "2", "-H", THREE], "--nnodes requires 2 hosts, but there are 3"),
        (
            ["--nnodes", "2:4"],
            "--nnodes requires 2 to 4 hosts, but there is 1: 127.0.0.1; name the hosts with -H or -hostfile",
        ),
        (["--nnodes", "4:2"], "'4:2' is not a number of hosts"),
        (["--nnodes", "two"], "'two' is not a number of hosts"),
        (["--nnodes", "0"], "'0' is not a number of hosts"),
        (["--nnodes", "1:2"], "requires --nproc-per-node"),
        (["--nproc-per-node", "tpu"], "'tpu' is not a whole number"),
        (["--nproc-per-node", "gpu"], "the job may use no GPUs on this host"),
        (["--nproc-per-node", "cpu", "-H", THREE], "--nproc-per-node 3 is more than the slots in -H 10.0.0.1:2"),
        (["-init-version", "-1", "-w", "-builtin-config-port", "9100", "-H", THREE], "without -builtin-config-port"),
        (["--nproc-per-node", "2", "-np", "2"], "give only one of them"),
        (["--nproc-per-node", "3", "-H", THREE], "more than the slots in -H 10.0.0.1:2; write 10.0.0.1:3"),
        (["--nproc-per-node", "2", "-H", THREE, "-placement", "fill"], "-placement fill fills one host"),
        (["--nproc-per-node", "2", "--nnodes", "1:2", "-min-np", "1"], "both set the minimum number of workers"),
        (["--standalone", "-H", THREE], "--standalone runs the job on one host"),
        (["--standalone", "--nnodes", "1:2"], "--standalone runs the job on one host"),
        (["--max-restarts", "3"], "unlike torchrun, kungfu-run never restarts all workers"),
        (["--max_restarts", "3"], "-max-restarts limits how many times -recover=replace or -standby starts a worker"),
        (["--rdzv-backend", "c10d"], "hosts find each other by -port"),
        (["--rdzv_endpoint=a:1"], "hosts find each other by -port"),
        (["--node-rank", "1"], "-self or -nic says which of them is this host"),
        (["--master-addr", "a"], "hosts find each other by -port"),
    ],
)
def test_torchruns_words_that_mean_nothing_here_are_refused(arguments, told):
    secret = SECRET if "-H" in arguments else ""
    assert told in refusal(*arguments, secret=secret)


def test_name_that_becomes_known_later_is_looked_up_again(monkeypatch, caplog):
    looks = []

    def addresses_of(name):
        looks.append(name)
        return ["10.0.0.7"] if name == "pod7" and looks.count("pod7") > 2 else [name] if name[0].isdigit() else []

    monkeypatch.setattr(network, "addresses_of", addresses_of)
    monkeypatch.setattr(state_hosts, "_LOOK_UP_AGAIN_S", 0.0)
    assert options("-H", "10.0.0.2:1,pod7:1").hosts.self_name == "10.0.0.2"
    assert looks.count("pod7") == 3
    told = [record.getMessage() for record in caplog.records]
    assert told == ["host name unknown: hosts=pod7 action=retry limit_s=300"]


def test_user_in_a_host_is_refused_with_what_to_write():
    assert "'me@gpu1' contains a user name; write gpu1, and give kungfu-distribute -u me" in refusal("-H", "me@gpu1:2")
