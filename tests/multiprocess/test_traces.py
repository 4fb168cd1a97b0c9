"""The traces of real jobs: their format, their clock, killed workers, disks that can't be written."""

import json
import os
import re

import pytest
from test_hosts import A, B, hosts  # noqa: F401

from ms_kungfu.launcher.cli import main
from tests.traces import check_format

pytestmark = pytest.mark.timeout(240)

REDUCES = """
import time
import numpy as np
import ms_kungfu as kf
kf.init()
for step in range(100):
    if step % 10 == kf.current_rank():
        time.sleep(0.002)
    kf.comm.all_reduce(np.ones(10, np.float32), name="x")
    kf.comm.all_reduce_async(np.ones(300_000, np.float32), name="large").wait()
"""


def traces_in(folder):
    """The events of each file, in the order of the ranks."""
    found = []
    for path in folder.glob("trace-*.json"):
        events = json.loads(path.read_text())
        check_format(events)
        found.append((next(e["args"]["rank"] for e in events if e.get("cat") == "member"), events))
    return [events for _, events in sorted(found, key=lambda each: each[0])]


def collectives(events):
    return {(e["name"], e["args"]["n"]): (e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "operation"}


def assert_causal(ranks):
    """Each collective ends at each rank after it has begun at all."""
    assert len({frozenset(rank) for rank in ranks}) == 1
    for key in ranks[0]:
        assert max(rank[key][0] for rank in ranks) <= min(rank[key][1] for rank in ranks) + 0.002, key


def test_traces_of_a_host_share_one_clock(kungfu_run, script, tmp_path):
    run = kungfu_run("-np", 2, *script(REDUCES), environment={"KUNGFU_TRACE": "traces"})
    run.assert_exit(0)
    ranks = [collectives(events) for events in traces_in(tmp_path / "traces")]
    assert len(ranks) == 2
    assert {("all_reduce x", 99), ("all_reduce large", 99)} <= ranks[0].keys()
    assert_causal(ranks)
    apart = [abs(ranks[0][key][1] - ranks[1][key][1]) for key in ranks[0] if key[0] == "all_reduce x"]
    assert min(apart) < 100  # microseconds; busy cores delay one rank or the other, but not always


def test_trace_has_copies_and_waits_of_background_reductions(kungfu_run, script, tmp_path, capsys):
    kungfu_run("-np", 2, *script(REDUCES), environment={"KUNGFU_TRACE": str(tmp_path / "traces")}).assert_exit(0)
    for events in traces_in(tmp_path / "traces"):
        names = [event["name"] for event in events]
        assert names.count("copy in") == names.count("wait for reductions") == 100
        assert {"join cluster version", "new cluster version", "wait for rank"} <= set(names)
    assert main(["trace", str(tmp_path / "traces")]) == 0
    assert re.search(
        r"waiting for other ranks \d+ %, overlapped with the program's work \d+ %", capsys.readouterr().out
    )


def test_killed_worker_leaves_a_readable_trace(kungfu_run, script, tmp_path):
    program = script(REDUCES + "time.sleep(0.5)\nimport os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    kungfu_run("-np", 2, *program, environment={"KUNGFU_TRACE": "traces"}).wait()
    paths = list((tmp_path / "traces").glob("trace-*.json"))
    assert len(paths) == 2
    assert all(not path.read_text().endswith("]\n") for path in paths)
    assert main(["trace", str(tmp_path / "traces")]) == 0
    events = json.loads((tmp_path / "traces" / "trace.json").read_text())["traceEvents"]
    check_format(events)
    assert sum(event["name"] == "all_reduce x" for event in events) == 200


def test_folder_that_cannot_be_written_costs_one_line(kungfu_run, script):
    run = kungfu_run("-np", 2, *script(REDUCES), environment={"KUNGFU_TRACE": "/dev/null/traces"})
    run.assert_exit(0)
    assert len([line for line in run.lines if "trace stopped: path=/dev/null/traces/" in line]) == 2


def test_size_limit_stops_the_trace_with_one_line(kungfu_run, script, tmp_path):
    limits = {"KUNGFU_TRACE": "traces", "KUNGFU_TRACE_BYTES": "5000"}
    run = kungfu_run("-np", 2, *script(REDUCES + "time.sleep(0.5)"), environment=limits)
    run.assert_exit(0)
    assert len([line for line in run.lines if 'reason="size limit"' in line]) == 2
    assert all(len(events) > 10 for events in traces_in(tmp_path / "traces"))
    assert all(path.stat().st_size < 6500 for path in (tmp_path / "traces").iterdir())


def test_clocks_of_two_hosts_are_compared_by_their_collectives(hosts, script, tmp_path):  # noqa: F811
    traced = {"KUNGFU_TRACE": str(tmp_path / "traces")}
    job = hosts(script(REDUCES), "-np", 4, environments={A: traced, B: traced})
    job.assert_exit(0)
    ranks = traces_in(tmp_path / "traces")
    assert len(ranks) == 4
    assert_causal([collectives(events) for events in ranks])
    assert all("to host x" in [event["name"] for event in events] for events in ranks)
    # Both are this machine. Now the second host's clock is another one, an hour ahead.
    ahead_us = 3.6e9
    for path in (tmp_path / "traces").glob(f"trace-{B}-*.json"):
        events = json.loads(path.read_text())
        for event in events:
            if event["name"] == "kungfu_begin":
                event["args"]["clock"] = "another"
            if "ts" in event:
                event["ts"] += ahead_us
        path.write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    assert main(["trace", str(tmp_path / "traces")]) == 0
    merged = json.loads((tmp_path / "traces" / "trace.json").read_text())
    check_format(merged["traceEvents"])
    offsets = {each["host"]: each for each in merged["metadata"]["clock_offsets"]}
    assert offsets[A]["offset_us"] == offsets[A]["error_us"] == 0
    assert abs(offsets[B]["offset_us"] - ahead_us) <= offsets[B]["error_us"]


def test_child_process_of_a_worker_writes_no_trace(kungfu_run, script, tmp_path):
    program = script(
        "import os, sys, subprocess, ms_kungfu as kf\nkf.init()\n"
        "subprocess.run([sys.executable, '-c', 'import ms_kungfu as kf; print(kf.current_rank())'], check=True)\n"
        "child = os.fork()\n"
        "if child == 0:\n    kf.current_rank()\n    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
    )
    kungfu_run("-np", 1, *program, environment={"KUNGFU_TRACE": "traces"}).assert_exit(0)
    assert len(os.listdir(tmp_path / "traces")) == 1
