"""What a worker process is told by its environment."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.controller.environment import environment_of
from ms_kungfu.launcher.options import parse_command_line

BEGAN = Cluster((PeerID("10.0.0.1", 10000), PeerID("10.0.0.1", 10001), PeerID("10.0.0.2", 10000)), version=0)
ALONE = Cluster((PeerID("10.0.0.1", 10000),), version=4)


def agent(devices=()):
    return SimpleNamespace(
        shares=SimpleNamespace(each=None), devices=SimpleNamespace(each=devices, environment=lambda device: {})
    )


@pytest.mark.parametrize(
    ("flags", "cores", "devices", "blocks"),
    [([], 1, (), True), ([], 3, (), True), ([], 4, (), False), (["-w"], 4, (), True), (["-w"], 1, ("0",), False)],
)
def test_pynative_queues_are_off_only_on_few_cores_without_devices(flags, cores, devices, blocks):
    options = parse_command_line(["-np", "1", *flags, "sh"])
    process = SimpleNamespace(
        peer=ALONE.workers[0], standby=None, incarnation=4, host="10.0.0.1", rank=0, size=1, device=None
    )
    begun = SimpleNamespace(first=ALONE, writer="job", url=None, cpu_isa=None, cores=None)
    told = environment_of(process, ["10.0.0.1"], False, options, options.hosts, begun, agent(devices), cores)
    assert told.get("MS_DEV_HOST_BLOCKING_RUN") == ("1" if blocks else None)


@pytest.mark.parametrize("cluster", [BEGAN, ALONE], ids=["one that it begins with", "one that has shrunk"])
@pytest.mark.parametrize("joins_later", [False, True])
def test_every_worker_gets_the_initial_job_in_its_environment(cluster, joins_later):
    options = parse_command_line(["-np", "3", "sh"])
    process = SimpleNamespace(
        peer=cluster.workers[0], standby=None, incarnation=cluster.version, host="10.0.0.1", rank=0,
        size=cluster.size, device=None,
    )  # fmt: skip
    ranks = [worker.host for worker in cluster.workers]
    begun = SimpleNamespace(first=BEGAN, writer="job", url=None, cpu_isa=None, cores=6)
    told = environment_of(process, ranks, joins_later, options, options.hosts, begun, agent(), 1)
    assert (told["KUNGFU_START_SIZE"], told["KUNGFU_START_HOSTS"]) == ("3", "2")
    assert told["KUNGFU_START_CORES"] == "6"
    assert told["KUNGFU_PARKED"] == ("1" if joins_later else None)
    assert (told["RANK"], told["WORLD_SIZE"]) == ("0", str(cluster.size))
    assert (told["LOCAL_RANK"], told["LOCAL_WORLD_SIZE"]) == ("0", str(ranks.count("10.0.0.1")))
    assert told["MS_COMPILER_CACHE_ENABLE"] is None  # removed: it ignores shapes, and the ranks share it
