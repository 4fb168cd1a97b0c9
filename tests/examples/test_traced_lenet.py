"""A trace of the LeNet example over two workers, and what can be asked of it (docs/timeline.md)."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest

from ms_kungfu.launcher.cli import main
from tests.traces import check_format

EXAMPLE = Path(__file__).parents[2] / "examples" / "lenet-elastic"


def test_trace_of_lenet_shows_the_parts_of_each_step(kungfu_run, tmp_path, capsys):
    pytest.importorskip("mindspore")
    pytest.importorskip("sklearn")
    folder = shutil.copytree(EXAMPLE, tmp_path / "lenet", ignore=shutil.ignore_patterns("out", "logs", "__pycache__"))
    program = [sys.executable, folder / "train.py", "--schedule", "none", "--epochs", "1", "--out", tmp_path / "out"]
    run = kungfu_run("-q", "-np", 2, *program, environment={"KUNGFU_TRACE": "traces"})
    assert run.wait(200) == 0, run.output
    assert main(["trace", str(tmp_path / "traces")]) == 0
    told = capsys.readouterr().out
    assert len(re.findall(r"^  47 steps, median .* ms: \d+ % of the time$", told, re.MULTILINE)) == 2, told
    assert len(re.findall(r"compute \d+ %.*data \d+ %.*compile \d+ %.*of the time", told)) == 2, told
    assert len(re.findall(r"waiting for other ranks \d+ %, overlapped with the program's work \d+ %", told)) == 2, told
    events = json.loads((tmp_path / "traces" / "trace.json").read_text())["traceEvents"]
    check_format(events)
    for rank in (1, 2):
        own = [event for event in events if event["pid"] == rank]
        names = [event["name"] for event in own]
        steps = names.count("step")
        assert steps == 47  # 1,500 digits in batches of 32
        assert names.count("compute") == names.count("reductions") == names.count("after reductions") == steps
        assert names.count("compile") >= 1
        assert names.count("data") >= steps
        assert sum(event["ph"] == "X" for event in own) < 40 * steps  # they are the cost of a trace
