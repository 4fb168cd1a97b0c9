"""Which device a worker gets, from what the user has set and what the machine has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ms_kungfu.launcher import devices
from ms_kungfu.launcher.devices import ASCEND, GPU, DeviceListError, Devices
from ms_kungfu.launcher.options import parse_command_line


def found(
    environ: dict[str, str] | None = None,
    gpus: int = 0,
    ascend: int = 0,
    single: bool = False,
    allow_nvlink: bool = False,
    host: str = "127.0.0.1",
) -> Devices:
    nodes = [f"nvidia{i}" for i in range(gpus)] + [f"davinci{i}" for i in range(ascend)]
    return devices.find(environ or {}, nodes, host=host, single=single, allow_nvlink=allow_nvlink)


def environments(pool: Devices) -> list[dict[str, str]]:
    return [pool.environment(place) for place in range(len(pool.each))]


def gpu(visible: str) -> dict[str, str]:
    return {"DEVICE_ID": "0", "CUDA_VISIBLE_DEVICES": visible}


def npu(visible: str) -> dict[str, str]:
    return {"DEVICE_ID": "0", "ASCEND_RT_VISIBLE_DEVICES": visible}


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (found(gpus=2), [gpu("0"), gpu("1")]),
        (found(ascend=3), [npu("0"), npu("1"), npu("2")]),
        (found({"CUDA_VISIBLE_DEVICES": "5,2, 7"}, gpus=8), [gpu("5"), gpu("2"), gpu("7")]),
        (found({"CUDA_VISIBLE_DEVICES": "1"}), [gpu("1")]),  # the files may be elsewhere
        (found({"CUDA_VISIBLE_DEVICES": "GPU-3a-4b,MIG-c/1/0"}), [gpu("GPU-3a-4b"), gpu("MIG-c/1/0")]),
        (found({"CUDA_VISIBLE_DEVICES": "3,-1,4"}, gpus=8), [gpu("3")]),
        (found({"ASCEND_RT_VISIBLE_DEVICES": "4,6"}, ascend=8), [npu("4"), npu("6")]),
        (found({"ASCEND_RT_VISIBLE_DEVICES": "4"}, gpus=2, ascend=8), [npu("4")]),
        (found({"CUDA_VISIBLE_DEVICES": ""}, gpus=2, ascend=1), [npu("0")]),
    ],
)
def test_a_worker_sees_one_device_of_those_the_user_lets_the_job_see(
    pool: Devices, expected: list[dict[str, str]]
) -> None:
    assert environments(pool) == expected


@pytest.mark.parametrize("environ", [{"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}, {}])
def test_without_devices_a_worker_gets_a_number_and_the_lists_stay(environ: dict[str, str]) -> None:
    pool = found(environ, gpus=2 if environ else 0)
    assert pool == Devices()
    assert pool.environment(3) == {"DEVICE_ID": "3"}
    assert pool.name_of(3) is None


def test_allow_nvlink_shows_all_gpus_and_tells_each_worker_its_own() -> None:
    assert environments(found(gpus=3, allow_nvlink=True)) == [{"DEVICE_ID": str(i)} for i in range(3)]
    pool = found({"CUDA_VISIBLE_DEVICES": "6,4"}, gpus=8, allow_nvlink=True)
    assert environments(pool) == [{"DEVICE_ID": "0"}, {"DEVICE_ID": "1"}]  # numbers within the list, as CUDA counts
    assert [pool.name_of(i) for i in range(2)] == ["GPU 6", "GPU 4"]
    assert environments(found(ascend=1, allow_nvlink=True)) == [npu("0")]


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,one"}, "CUDA_VISIBLE_DEVICES=0,one: 'one' is neither a number nor a UUID"),
        ({"CUDA_VISIBLE_DEVICES": "0,,1"}, "'' is neither a number nor a UUID"),
        ({"CUDA_VISIBLE_DEVICES": "3,3"}, "CUDA_VISIBLE_DEVICES=3,3 lists GPU 3 twice"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "GPU-1"}, "ASCEND_RT_VISIBLE_DEVICES=GPU-1: 'GPU-1' is not a number"),
        ({"CUDA_VISIBLE_DEVICES": "0", "ASCEND_RT_VISIBLE_DEVICES": "0"}, "there are GPUs and Ascend devices"),
        ({"DEVICE_ID": "1", "CUDA_VISIBLE_DEVICES": "0,1"}, "DEVICE_ID=1 names one device, but the job may have"),
    ],
)
def test_contradictory_device_list_is_refused(environ: dict[str, str], sentence: str) -> None:
    with pytest.raises(DeviceListError) as caught:
        found(environ)
    assert sentence in str(caught.value)


def test_a_single_worker_gets_the_device_that_the_user_has_named() -> None:
    assert environments(found({"DEVICE_ID": "1", "CUDA_VISIBLE_DEVICES": "6,4"}, single=True)) == [gpu("4")]
    assert environments(found({"DEVICE_ID": "2"}, gpus=4, single=True, allow_nvlink=True)) == [{"DEVICE_ID": "2"}]
    with pytest.raises(DeviceListError, match=r"DEVICE_ID=2 is none of the job's 2 devices \(GPU 6, 4\)"):
        found({"DEVICE_ID": "2", "CUDA_VISIBLE_DEVICES": "6,4"}, single=True)


def test_an_outer_jobs_device_number_is_not_taken_for_the_users() -> None:
    environ = {"DEVICE_ID": "0", "CUDA_VISIBLE_DEVICES": "6,4", "KUNGFU_SELF": "127.0.0.1:10000"}
    assert environments(found(environ)) == [gpu("6"), gpu("4")]
    assert found({"DEVICE_ID": "5"}) == Devices()  # no devices: a number is as good as any


def table(tmp_path: Path, *servers: tuple[str, list[tuple[int, int]]]) -> dict[str, str]:
    """The environment of a job with a rank table of these servers: name, then (device, rank) of each device."""
    server_list: list[dict[str, Any]] = []
    for i, (name, pairs) in enumerate(servers):
        listed = [{"device_id": str(d), "device_ip": f"10.1.{i}.{d}", "rank_id": str(r)} for d, r in pairs]
        server_list.append({"server_id": name, "device": listed})
    document = {
        "version": "1.0", "status": "completed", "server_count": str(len(servers)), "server_list": server_list,
    }  # fmt: skip
    (tmp_path / "table.json").write_text(json.dumps(document))
    return {"RANK_TABLE_FILE": str(tmp_path / "table.json")}


def test_a_rank_table_gives_its_devices_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    environ = table(tmp_path, ("anybody", [(7, 1), (3, 0), (5, 2)]))
    assert environments(found(environ)) == [{"DEVICE_ID": "3"}, {"DEVICE_ID": "7"}, {"DEVICE_ID": "5"}]
    renumbered = found({**environ, "ASCEND_RT_VISIBLE_DEVICES": "3,4,5,7"})
    assert environments(renumbered) == [{"DEVICE_ID": "0"}, {"DEVICE_ID": "3"}, {"DEVICE_ID": "2"}]
    with pytest.raises(DeviceListError, match="gives device 7 to rank 1, but ASCEND_RT_VISIBLE_DEVICES=3,5 hides it"):
        found({**environ, "ASCEND_RT_VISIBLE_DEVICES": "3,5"})


def test_a_rank_table_of_several_servers_gives_this_hosts_devices(tmp_path: Path) -> None:
    environ = table(tmp_path, ("10.0.0.1", [(0, 0), (1, 1)]), ("10.0.0.2", [(4, 2)]))
    assert environments(found(environ, host="10.0.0.2")) == [{"DEVICE_ID": "4"}]
    with pytest.raises(DeviceListError, match="none of its 2 servers is called 127.0.0.1"):
        found(environ)


def test_a_rank_table_with_a_mistake_is_refused_before_anything_starts(tmp_path: Path) -> None:
    environ = table(tmp_path, ("a", [(0, 0), (0, 1)]))
    with pytest.raises(ValueError, match="device 0 of server a is listed twice"):
        found(environ)


def test_workers_of_one_start_get_the_devices_in_order() -> None:
    pool, given = found(gpus=3), list[int]()
    for _ in range(7):
        given.append(pool.choose(given, []))
    assert given == [0, 1, 2, 0, 1, 2, 0]


def test_a_new_worker_gets_a_free_device() -> None:
    pool = found(gpus=4)
    assert pool.choose([0, 2, 3], []) == 1
    assert pool.choose([0, 3], [1]) == 2  # a device that no worker has goes before one that is about to be free
    assert pool.choose([0, 3, 2], [1]) == 1
    assert pool.choose([0, 1, 2, 3, 3, 1], [0]) == 2  # shared by as few as can be


def test_host_without_devices_has_a_number_for_every_worker() -> None:
    pool = Devices()
    assert [pool.choose(list(range(n)), []) for n in range(5)] == [0, 1, 2, 3, 4]
    assert pool.choose([0, 2], [1]) == 3
    assert pool.choose([0, 2], []) == 1


def test_devices_are_counted_by_their_files() -> None:
    names = ["nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "davinci3", "davinci_manager", "null"]
    assert (GPU.count(names), ASCEND.count(names)) == (2, 1)


def test_the_flag_is_a_switch_that_is_off_by_default() -> None:
    options = parse_command_line(["-allow-nvlink", "sh"])
    assert options is not None
    assert options.allow_nvlink
    options = parse_command_line(["sh"])
    assert options is not None
    assert not options.allow_nvlink
