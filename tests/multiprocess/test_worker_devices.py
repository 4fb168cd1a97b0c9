"""kungfu-run gives each worker its device, and gives the devices of those that have left to new ones."""

import json
import re

import pytest

pytestmark = pytest.mark.timeout(60)

# Cluster version v goes on to SIZES[v]. Says its device first, as MindSpore would find it.
WORKER = """
import os
import ms_kungfu as kf
SIZES = {0: 1, 1: 4}
kf.init()
e = os.environ
print("device", e["KUNGFU_INCARNATION"], e["RANK_ID"], e["RANK_SIZE"], e["DEVICE_ID"],
      e.get("CUDA_VISIBLE_DEVICES"), e.get("ASCEND_RT_VISIBLE_DEVICES"), flush=True)
while kf.cluster_version() in SIZES:
    if kf.resize(SIZES[kf.cluster_version()])[1]:
        break
"""
SHOW = "import os; print('device', os.environ['DEVICE_ID'], os.environ.get('CUDA_VISIBLE_DEVICES'))"
NO_LISTS = {"CUDA_VISIBLE_DEVICES": "", "ASCEND_RT_VISIBLE_DEVICES": ""}


def devices(job, incarnation):
    return sorted(line.split()[2:] for line in job.stdout if line.startswith(f"device {incarnation} "))


def test_devices_are_divided_and_joining_workers_get_those_of_removed_ones(kungfu_run, script):
    environment = {**NO_LISTS, "CUDA_VISIBLE_DEVICES": "5,2,7"}
    job = kungfu_run("-np", 3, "-w", *script(WORKER), environment=environment)
    job.assert_exit(0)
    assert devices(job, 0) == [["0", "3", "0", "5"], ["1", "3", "0", "2"], ["2", "3", "0", "7"]]
    joining = devices(job, 2)
    assert [(rank, size) for rank, size, *_ in joining] == [("1", "4"), ("2", "4"), ("3", "4")]
    assert sorted(visible for *_, visible in joining[:2]) == ["2", "7"]
    assert joining[2][2:] == ["0", "5"]
    assert re.search(r'device shared: device="GPU 5" host=\S+ workers=2 devices=3 host_workers=4', job.output)


def test_ascend_devices_are_divided_by_their_own_variable(kungfu_run, script):
    show = SHOW.replace("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES")
    environment = {**NO_LISTS, "ASCEND_RT_VISIBLE_DEVICES": "4,6"}
    job = kungfu_run("-q", "-np", 2, *script(show), environment=environment)
    job.assert_exit(0)
    assert sorted(job.stdout) == ["device 0 4", "device 0 6"]


def test_allow_nvlink_leaves_all_gpus_visible(kungfu_run, script):
    environment = {**NO_LISTS, "CUDA_VISIBLE_DEVICES": "5,2"}
    job = kungfu_run("-q", "-np", 2, "-allow-nvlink", *script(SHOW), environment=environment)
    job.assert_exit(0)
    assert sorted(job.stdout) == ["device 0 5,2", "device 1 5,2"]
    job = kungfu_run("-allow-nvlink", *script(SHOW), environment=NO_LISTS)
    job.assert_exit(0)
    assert 'flag ignored: flag=-allow-nvlink reason="the job has no GPUs"' in job.output


def test_a_rank_table_names_the_devices(kungfu_run, script, tmp_path):
    listed = [{"device_id": "3", "rank_id": "1"}, {"device_id": "6", "rank_id": "0"}]
    table = {
        "version": "1.0", "status": "completed", "server_count": "1",
        "server_list": [{"server_id": "here", "device": listed}],
    }  # fmt: skip
    (tmp_path / "table.json").write_text(json.dumps(table))
    environment = {"RANK_TABLE_FILE": str(tmp_path / "table.json")}
    job = kungfu_run("-q", "-np", 2, "sh", "-c", "echo $RANK_ID $DEVICE_ID", environment=environment)
    job.assert_exit(0)
    assert sorted(job.stdout) == ["0 6", "1 3"]


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,zero"}, "CUDA_VISIBLE_DEVICES=0,zero: 'zero' is neither a number nor a UUID"),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "DEVICE_ID": "1"}, "DEVICE_ID=1 names one device"),
        ({"RANK_TABLE_FILE": "nowhere.json"}, "rank table nowhere.json: it can't be read: No such file or directory"),
    ],
)
def test_wrong_devices_are_refused_before_any_worker_starts(kungfu_run, environment, sentence):
    job = kungfu_run("-np", 2, "echo", "started", environment={**NO_LISTS, **environment})
    job.assert_exit(1)
    assert f"kungfu-run: {sentence}" in job.output
    assert job.stdout == []
