"""The traces of a job's workers: merging, one clock for several hosts, the summary."""

import gzip
import json
import math
import random

import pytest

from ms_kungfu.launcher.cli import main
from ms_kungfu.launcher.state import timeline
from ms_kungfu.launcher.state.timeline import TraceEvent, WorkerTrace, offset_of, offsets_of, summary_of
from tests.traces import check_format

COMM = 77


def meetings(offset_us, drift=0.0, seed=1, count=2000, apart_us=5000.0):
    """Collectives of two ranks, each by its own clock: {key: [(begin, end)]} for both, and the other clock's offset."""
    random_numbers = random.Random(seed)
    own, other = {}, {}

    def by_other(time):
        return time + offset_us + drift * time

    for n in range(count):
        at = n * apart_us
        begins = [at + random_numbers.expovariate(1 / 300) for _ in range(2)]
        ends = [max(begins) + 20 + random_numbers.expovariate(1 / 100) for _ in range(2)]
        key = (3, "all_reduce x", n)
        own[key] = [(begins[0], ends[0])]
        other[key] = [(by_other(begins[1]), by_other(ends[1]))]
    return own, other, by_other


@pytest.mark.parametrize("offset_us", [0.0, 5e9, -3e11])
def test_offset_of_hosts_is_within_its_error(offset_us):
    own, other, _ = meetings(offset_us)
    found = offset_of(own, other)
    assert found.error_us < 100  # of collectives that take 500 us
    for times in other.values():
        assert abs(found.at(times[0][0]) - offset_us) <= found.error_us


@pytest.mark.parametrize("drift", [5e-5, -1.5e-4])
def test_drifting_clocks_stay_within_the_error(drift):
    own, other, by_other = meetings(1e9, drift, count=20000)  # 100 s, in which the clocks drift by 5 and 15 ms
    found = offset_of(own, other)
    assert found.error_us < 150
    for n in range(0, 20000, 100):
        ((_, end),) = own[(3, "all_reduce x", n)]
        assert abs(found.at(by_other(end)) - (by_other(end) - end)) <= found.error_us


def test_hosts_without_a_common_collective_use_the_time_of_day():
    one = WorkerTrace(clock="a", unix_us=1000.0, monotonic_us=100.0)
    other = WorkerTrace(clock="b", unix_us=3000.0, monotonic_us=5100.0)
    found = offsets_of([one, other])
    assert found["a"].at(7.0) == 0
    assert found["b"].at(7.0) == 3000.0  # at the same time of day they show 100 and 3100
    assert math.isinf(found["b"].error_us)


def operation(begin, end, n=0, tid=COMM, waiting=0.0):
    values = {"bytes": 8, "n": n, "version": 0, "waiting_us": waiting}
    return TraceEvent("X", "all_reduce g", 1, tid, begin, end - begin, "operation", args=values)


def test_summary_has_the_shares_of_waiting_and_overlap():
    worker = WorkerTrace(host="a", pid=9)
    for event in (
        TraceEvent("M", "thread_name", 1, COMM, args={"name": timeline.COMM_THREAD}),
        TraceEvent("i", "new cluster version", 1, 5, 0, cat="member", args={"version": 0, "rank": 1, "size": 2}),
        TraceEvent("X", "step", 1, 1, 0, 1000, "step", args={"step": 1}),
        TraceEvent("X", "compute", 1, 1, 0, 500, "in step"),
        TraceEvent("X", "wait for reductions", 1, 5, 700, 100, "program"),
        operation(400, 600, waiting=50),  # beside the program's work
        operation(600, 800, n=1, waiting=150),  # half of it: the program waits from 700 on
        operation(900, 1000, tid=5),  # in the program's own thread
        TraceEvent("X", "wait for rank", 1, COMM, 400, 50, "wait", args={"rank": 0}),
    ):
        worker.add(event)
    assert summary_of(worker) == [
        "rank 1 (a, pid 9): 0.001 s",
        "  1 steps, median 1 ms: 100 % of the time",
        "  compute 50 %, wait for reductions 10 % of the time",
        "  3 collectives, 0.0005 s: waiting for other ranks 40 %, overlapped with the program's work 60 %",
        "  waits most for rank 0: 100 % of its waiting",
    ]


def write(folder, pid, host="a", clock="c", job="j", unix_us=0, ahead_us=0.0, rank=0, tail="]\n"):
    """A worker's trace of 20 collectives of 50 us, one in 10 ms, by a clock that is ahead."""
    begin = {"job": job, "host": host, "clock": clock, "unix_us": unix_us, "monotonic_us": ahead_us, "format": 1}
    member = {"version": 0, "rank": rank, "size": 2}
    events = [
        {"ph": "M", "name": "kungfu_begin", "pid": pid, "tid": 0, "args": begin},
        {"ph": "i", "s": "p", "cat": "member", "name": "new cluster version", "pid": pid, "tid": 5, "ts": ahead_us,
         "args": member},
    ]  # fmt: skip
    for n in range(20):
        values = {"bytes": 8, "n": n, "version": 0, "waiting_us": 3.5}
        at = ahead_us + 10000.0 * n + 7 * rank
        events.append(
            {"ph": "X", "cat": "operation", "name": "all_reduce g", "pid": pid, "tid": 5, "ts": at, "dur": 50,
             "args": values}
        )  # fmt: skip
    text = "[\n" + "".join(json.dumps(event) + ",\n" for event in events) + tail
    (folder / f"trace-{host}-{pid}.json").write_text(text)


def merged(path):
    content = path.read_bytes()
    return json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)


def test_merged_file_has_one_clock_and_its_error(tmp_path, capsys):
    write(tmp_path, 10)
    write(tmp_path, 10, host="b", clock="d", ahead_us=8e9, rank=1)
    assert main(["trace", str(tmp_path)]) == 0
    result = merged(tmp_path / "trace.json")
    check_format(result["traceEvents"])
    own, other = result["metadata"]["clock_offsets"]
    assert (own["offset_us"], own["error_us"]) == (0, 0)
    assert abs(other["offset_us"] - 8e9) <= other["error_us"] < 100
    times = [[e["ts"] for e in result["traceEvents"] if e["pid"] == pid and e["ph"] == "X"] for pid in (1, 2)]
    assert all(abs(b - a - 7) <= other["error_us"] for a, b in zip(*times))
    told = capsys.readouterr().out
    assert "clock of b: +8000.0000" in told
    assert "rank 1 (b, pid 10)" in told


def test_trace_of_a_killed_worker_is_readable(tmp_path):
    write(tmp_path, 10, tail='{"ph":"X","cat":"op')
    assert main(["trace", str(tmp_path), "-o", str(tmp_path / "all.json.gz")]) == 0
    assert sum(event["ph"] == "X" for event in merged(tmp_path / "all.json.gz")["traceEvents"]) == 20


def test_summary_says_that_a_trace_ends_at_its_limit():
    for more, is_shown in (({}, False), ({"reason": "size limit"}, True)):
        worker = WorkerTrace()
        worker.add(TraceEvent("M", "kungfu_end", 1, 0, args={"lost": 0, **more}))
        assert any("KUNGFU_TRACE_BYTES" in line for line in summary_of(worker)) == is_shown


def test_output_named_like_a_trace_is_refused(tmp_path, capsys):
    write(tmp_path, 10)
    before = (tmp_path / "trace-a-10.json").read_bytes()
    for name in ("trace-a-10.json", "trace-new.json"):
        assert main(["trace", str(tmp_path), "-o", str(tmp_path / "." / name)]) == 2
        assert f"-o {tmp_path / name} has the name of a worker's trace; give another name" in capsys.readouterr().err
    assert (tmp_path / "trace-a-10.json").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (
            '{"ph":"M","name":"kungfu_begin","pid":1,"tid":0,"args":{}}',
            "'host' is missing in args of 'kungfu_begin'",
        ),
        (
            '{"ph":"M","name":"kungfu_end","pid":1,"tid":0,"args":{"lost":"x"}}',
            "invalid args of 'kungfu_end': invalid literal for int() with base 10: 'x'",
        ),
        (
            '{"ph":"i","name":"m","pid":1,"tid":0,"cat":"member","args":{"rank":[]}}',
            "invalid args of 'm': int() argument must be a string",
        ),
    ],
)
def test_invalid_event_of_a_trace_is_named_with_file_and_line(line, error, tmp_path, capsys):
    (tmp_path / "trace-a-1.json").write_text("[\n" + line + ",\n")
    assert main(["trace", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith(f"kungfu-run trace: {tmp_path / 'trace-a-1.json'}, line 2: {error}")


def test_deeply_nested_event_of_a_trace_is_no_internal_error(tmp_path, capsys):
    (tmp_path / "trace-a-1.json").write_text(
        "[\n" + '{"ph":"M","name":"x","pid":1,"tid":0,"args":{"a":' + "[" * 2000 + ",\n"
    )
    assert main(["trace", str(tmp_path)]) == 1
    # Whether msgspec rejects or skips it depends on Python's recursion limit.
    told = capsys.readouterr().err
    assert told.startswith(f"kungfu-run trace: {tmp_path}")
    assert len(told.splitlines()) == 1


def test_traces_of_earlier_jobs_are_left_out(tmp_path, capsys):
    write(tmp_path, 10, job="old", unix_us=5)
    write(tmp_path, 11, job="new", unix_us=6)
    assert main(["trace", str(tmp_path)]) == 0
    told = capsys.readouterr()
    assert "pid 11" in told.out
    assert "pid 10" not in told.out
    assert told.err == "kungfu-run trace: 1 trace of earlier jobs left out\n"


def test_folder_without_traces_is_an_error(tmp_path, capsys):
    assert main(["trace", str(tmp_path)]) == 1
    assert main(["trace", str(tmp_path / "none")]) == 1
    assert main(["trace"]) == 2
    assert "no trace-*.json of a worker" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        {"ts": 30.0, "dur": 40.0},  # begins in another event, and ends after it
        {"dur": -1.0},
        {"ph": "E"},
        {"pid": None},
    ],
)
def test_checker_of_the_format_finds_errors(wrong):
    event = {"ph": "X", "name": "x", "pid": 1, "tid": 1, "ts": 0.0, "dur": 50.0, "args": {}}
    check_format([event, {**event, "ts": 10.0, "dur": 10.0}])
    with pytest.raises(AssertionError):
        check_format([event, {**event, "ts": 10.0, "dur": 10.0, **wrong}])
