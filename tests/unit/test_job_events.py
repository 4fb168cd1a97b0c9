"""The event log of a job: its file, its size, what adds up to statistics, stalls and the summary."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from ms_kungfu import broker_protocol
from ms_kungfu import job_events as e
from ms_kungfu.broker_protocol import BrokerClient, Connection
from ms_kungfu.launcher import cli, event_file
from ms_kungfu.launcher.controller.job_events import BYTES_PER_HOUR, JobEvents
from ms_kungfu.launcher.event_file import EventFile
from ms_kungfu.launcher.explain_command import events_in, explain
from ms_kungfu.launcher.state.account import MOST_LINES, JobAccount, spell
from ms_kungfu.launcher.state.stalls import STALL_S, StallWatch
from ms_kungfu.launcher.state.statistics import JobStatistics
from ms_kungfu.launcher.state.story import story_of
from ms_kungfu.launcher.wire import events_page
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.codec import encode
from ms_kungfu.membership.reports import _readable

ROOT = Path(__file__).resolve().parents[2]


def start_thread(name, function):
    threading.Thread(target=function, name=name, daemon=True).start()


def close(file: EventFile) -> None:
    asyncio.run(file.close())


# ---- the file --------------------------------------------------------------------------------------------------------


def test_lines_are_in_the_file_in_their_order(tmp_path):
    path = tmp_path / "logs" / e.FILE_NAME
    file = EventFile(path, True, start_thread)
    for number in range(1000):
        file.write(b"%d\n" % number)
    close(file)
    assert path.read_bytes() == b"".join(b"%d\n" % number for number in range(1000))


def test_new_job_replaces_the_file_and_next_controller_continues_it(tmp_path):
    path = tmp_path / e.FILE_NAME
    path.write_bytes(b"old\n")
    first = EventFile(path, True, start_thread)
    first.write(b"first\n")
    close(first)
    with path.open("ab") as cut:
        cut.write(b'{"cut')
    second = EventFile(path, False, start_thread)
    second.write(b"second\n")
    close(second)
    assert path.read_bytes() == b'first\n{"cut\nsecond\n'


def test_full_disk_stops_the_log_with_one_line(tmp_path):
    """In a process of its own, whose files may have 100 bytes."""
    program = f"""
import asyncio, logging, resource, signal, threading
from pathlib import Path
from ms_kungfu.launcher.event_file import EventFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
logging.basicConfig(format="%(message)s")
file = EventFile(Path({str(tmp_path / e.FILE_NAME)!r}), True, lambda name, run: threading.Thread(target=run).start())
async def main():
    for number in range(50):
        file.write(b"%08d\\n" % number)
        await asyncio.sleep(0.001)
    await file.close()
asyncio.run(main())
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ran.returncode == 0
    assert re.fullmatch(
        r'event log failed: path=\S+ error="File too large". The job goes on without it\n', ran.stderr
    ), ran.stderr
    assert (tmp_path / e.FILE_NAME).read_bytes() == b"".join(b"%08d\n" % number for number in range(11))


@pytest.mark.parametrize("kind", ["folder", "fifo", "read-only"])
def test_file_that_cannot_be_opened_stops_the_log_with_one_line(kind, tmp_path, caplog):
    path = tmp_path / e.FILE_NAME
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path = Path("/proc/events") / e.FILE_NAME  # a file system that no user can write to
    file = EventFile(path, True, start_thread)
    file.write(b"line\n")
    close(file)
    file.write(b"line\n")
    assert [line.partition(":")[0] for line in caplog.messages] == ["event log failed"]


def test_close_returns_after_a_failure_is_logged(tmp_path, monkeypatch):
    logged = []

    def log_slowly(_, error):
        time.sleep(0.2)
        logged.append(error)

    monkeypatch.setattr(EventFile, "_give_up", log_slowly)
    (tmp_path / e.FILE_NAME).mkdir()
    close(EventFile(tmp_path / e.FILE_NAME, True, start_thread))
    assert len(logged) == 1


def test_hung_disk_blocks_no_caller(tmp_path, monkeypatch, caplog):
    hangs, written = threading.Event(), []

    def write(fd, data):
        written.append(len(data))
        hangs.wait(60)
        return len(data)

    monkeypatch.setattr(event_file.os, "write", write)
    file = EventFile(tmp_path / e.FILE_NAME, True, start_thread)
    began = time.monotonic()
    line = b"x" * 1023 + b"\n"
    for _ in range(1100):  # more than it keeps
        file.write(line)
    assert time.monotonic() - began < 5
    assert [message.partition(":")[0] for message in caplog.messages] == ["event log failed"]
    close(file)
    assert time.monotonic() - began < 10
    hangs.set()


def test_deleted_log_is_reported_with_one_line(tmp_path, caplog):
    file = EventFile(tmp_path / "logs" / e.FILE_NAME, True, start_thread)
    file.write(b"one\n")
    while not file.path.exists() or not file.path.read_bytes():
        time.sleep(0.001)
    shutil.rmtree(tmp_path / "logs")
    file.write(b"two\n")
    asyncio.run(file.close(lambda path: pytest.fail("there is no log")))
    assert caplog.messages == [f'event log failed: path={file.path} error="it was deleted". The job goes on without it']


def test_log_of_a_running_job_is_left_to_it(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(event_file, "_LOCK_S", 0.01)
    first = EventFile(tmp_path / e.FILE_NAME, True, start_thread)
    first.write(b"one\n")
    while not first.path.exists() or not first.path.read_bytes():
        time.sleep(0.001)
    second = EventFile(first.path, True, start_thread)
    second.write(b"other\n")
    close(second)
    first.write(b"two\n")
    close(first)
    assert first.path.read_bytes() == b"one\ntwo\n"
    (line,) = caplog.messages
    assert 'error="another running job writes to it; give each job a -logdir of its own"' in line


def test_report_that_fails_costs_one_line(tmp_path, caplog):
    file = EventFile(tmp_path / e.FILE_NAME, True, start_thread)
    file.write(b"line\n")

    def finish(path):
        assert path.read_bytes() == b"line\n"
        raise OSError(28, "No space left on device")

    asyncio.run(file.close(finish))
    (said,) = caplog.messages
    assert said.startswith(f'report failed: path={tmp_path} error="No space left on device"')


def test_report_that_hangs_ends_no_job_late(tmp_path, monkeypatch):
    monkeypatch.setattr(event_file, "_FINISH_S", 0.2)
    hangs = threading.Event()
    file = EventFile(tmp_path / e.FILE_NAME, True, start_thread)
    began = time.monotonic()
    asyncio.run(file.close(lambda path: hangs.wait(60)))
    assert time.monotonic() - began < 30
    hangs.set()


# ---- the events of a job ---------------------------------------------------------------------------------------------


class Clock:
    """The machine of a controller, with a time of its own and a file in memory."""

    def __init__(self):
        self.now = 1_700_000_000.0
        self.ahead_s = 0.0  # of the time of day
        self.lines = []

    def time(self):
        return self.now + self.ahead_s

    def monotonic(self):
        return self.now

    def open_event_file(self, path, fresh):
        async def close(finish):
            pass

        return SimpleNamespace(write=self.lines.append, path=path, close=close)


def job_events(machine, logdir=Path("logs")):
    hosts = SimpleNamespace(self_name="10.0.0.1")
    return JobEvents(SimpleNamespace(logdir=logdir, hosts=hosts, command=("python", "x")), machine)


def report(rank, step, ended=10, seconds=1.0, **more):
    values = {
        "step": step, "seconds": seconds, "ended": ended, "samples": 32 * ended, "committed": 0.987654 * seconds,
        "p50": 0.0987654 + rank / 1e4, "p99": 0.123456, "collectives": 0.212345 * seconds, "checkpoint": 0.0123,
        "trained": 64 * 32 * ended, "data": 0.0234567,
    }  # fmt: skip
    return msgspec.convert({**values, **more}, e.StepReport)


def an_hour(machine, ranks, others):
    """An hour of a job; `others(second)` are its other events."""
    events, statistics = job_events(machine), JobStatistics(machine.now)
    events.begin("job", fresh=True)
    for second in range(1, 3601):
        machine.now += 1.0
        ranks_reports = report(1, 10 * second)
        for rank in range(1, ranks):
            statistics.add(rank, ranks_reports)
        more = {"loss": 2.3025851 / second, "learning_rate": 0.1 * 0.999**second, "batch": 2048}
        statistics.add(0, report(0, 10 * second, **_readable(more)))
        if events.may_add():
            for line in (statistics.by_rank(machine.now, ranks), statistics.line(machine.now)):
                if line is not None:
                    events.emit(line)
        for event in others(second):
            events.emit(event)
    return events


@pytest.mark.parametrize("ahead_s", [-3600.0, 4e8])
def test_clock_that_is_set_changes_no_duration(ahead_s):
    machine = Clock()
    events = job_events(machine)
    events.emit(e.JobStarted(workers=2, hosts=["a"], command="x"))
    for second in range(1, 31):
        machine.now += 1.0
        if second == 15:
            machine.ahead_s = ahead_s
        assert events.may_add()
        events.emit(e.Statistics(step=second, seconds=1.0, steps=1, samples=8, committed=0.9))
    assert events.kept[-1].time == machine.now + ahead_s
    assert events.account.summary(None)[0].startswith('duration="30 s"')
    assert events.account.goodput == pytest.approx(0.9)
    assert events.training.describe(events.now())["training"]["steps_per_s"] == 1.0


def test_explain_orders_events_by_line_after_a_clock_is_set_back(tmp_path, capsys):
    events = [
        e.LogBegan(version=e.VERSION, job="x", ms_kungfu="0", host="a", time=5000.0),
        e.JobStarted(time=5000.0, workers=2, hosts=["a"], command="x"),
        e.WorkerFailed(time=1400.0, rank=1, signal=9, reason="was killed", decision="fail"),
        e.JobEnded(time=1410.0, exit_code=0),
    ]
    (tmp_path / e.FILE_NAME).write_bytes(b"".join(encode(event) + b"\n" for event in events))
    assert explain([str(tmp_path), "-json"]) == 0
    assert [chapter["at_s"] for chapter in json.loads(capsys.readouterr().out)] == [0.0, 0.0, 10.0]


def test_hour_of_64_ranks_is_at_most_a_megabyte():
    """Its learning rate changes each second, and a worker fails each minute."""

    def others(second):
        if second % 60:
            return
        yield e.WorkerFailed(host="10.0.0.1", rank=second % 64, signal=9, peer="10.0.0.1:10000", reason="was killed")
        yield e.VersionCommitted(version=second, workers=63, workers_before=64, step=second * 10, seconds=0.1)

    machine = Clock()
    an_hour(machine, 64, others)
    written = sum(map(len, machine.lines))
    assert 0.5 * BYTES_PER_HOUR < written <= BYTES_PER_HOUR
    events, unread = events_in(machine.lines)
    kinds = [type(event) for event in events]
    assert (unread, kinds.count(e.WorkerFailed)) == (0, 60)
    assert kinds.count(e.Statistics) > 3000
    assert kinds.count(e.RankStatistics) > 50
    assert sum(event.steps for event in events if isinstance(event, e.Statistics)) >= 10 * 3590


def test_statistics_yield_to_other_events():
    machine = Clock()
    busy = [e.RuntimeMessage(rank=1, reason="x" * 60)]
    events = an_hour(machine, 64, lambda second: busy)
    written = sum(map(len, machine.lines))
    assert written <= BYTES_PER_HOUR
    kinds = [type(event) for event in events_in(machine.lines)[0]]
    assert kinds.count(e.RuntimeMessage) == 3600
    assert 500 < kinds.count(e.Statistics) < 3000
    assert events.account.steps >= 35_000


def test_every_kind_of_event_is_read_again():
    machine = Clock()
    events = job_events(machine)
    events.begin("job", fresh=True)
    for kind in e.KINDS[1:]:
        found = {}
        for field in msgspec.structs.fields(kind):
            if field.required:
                told = str(field.type)
                found[field.name] = (
                    [0.5] if "Optional[float]" in told or "float, NoneType" in told
                    else ["10.0.0.1"] if field.name == "hosts"
                    else [1] if "list" in told
                    else "client" if field.name == "by"
                    else "text" if "str" in told
                    else 1
                )  # fmt: skip
        events.emit(kind(**found))
    read, unread = events_in(machine.lines)
    assert (unread, [type(event) for event in read]) == (0, list(e.KINDS))
    assert [json.loads(line)["event"] for line in machine.lines][:2] == ["log_began", "job_started"]
    assert all(list(json.loads(line))[1] == "time" for line in machine.lines)


def test_without_logdir_the_events_are_in_memory():
    machine = Clock()
    events = job_events(machine, logdir=None)
    events.begin("job", fresh=True)
    events.emit(e.HostLeft(host="10.0.0.2"))
    assert machine.lines == []
    assert [type(event) for event in events.kept] == [e.LogBegan, e.HostLeft]


def test_tables_of_the_page_are_those_of_the_code():
    """`python -m ms_kungfu.launcher.wire.events_page > docs/events.md` writes them."""
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    assert page == events_page.to_markdown()
    assert {kind.__struct_config__.tag for kind in e.KINDS} == set(re.findall(r"^### `(\w+)`$", page, re.M)) - {"event"}


# ---- statistics ------------------------------------------------------------------------------------------------------


def test_step_counts_once_whichever_ranks_report_it():
    statistics = JobStatistics(0.0)
    for rank, step, ended in [(0, 10, 10), (1, 10, 10), (1, 15, 5), (0, 20, 10), (1, 20, 5)]:
        statistics.add(rank, report(rank, step, ended, committed=float(ended), trained=64 * ended))
    line = statistics.line(25.0)
    assert (line.step, line.steps, line.samples, line.committed) == (20, 20, 20 * 64, 20.0)
    assert statistics.line(26.0) is None


def test_committed_time_never_exceeds_the_time_of_its_event():
    """The first report contains a step that began before the event before."""
    statistics, lines = JobStatistics(10.0), []
    for step, committed, now in [(1, 3.8, 13.0), (2, 0.5, 14.0), (3, 0.5, 15.0)]:
        statistics.add(0, report(0, step, 1, committed=committed))
        lines.append(statistics.line(now))
    assert [(line.seconds, line.committed) for line in lines] == [(3.0, 3.0), (1.0, 1.0), (1.0, 0.8)]


def test_another_training_of_the_program_counts_from_its_beginning():
    statistics = JobStatistics(0.0)
    statistics.add(0, report(0, 500, 10))
    statistics.add(0, report(0, 20, 20))
    assert statistics.line(1.0).steps == 30


def test_waiting_is_what_others_spent_beyond_the_fastest():
    statistics = JobStatistics(0.0)
    statistics.add(0, report(0, 10, collectives=0.7, data=0.1, checkpoint=0.0))
    statistics.add(1, report(1, 10, collectives=0.1, data=0.3, checkpoint=0.0))
    by_rank, line = statistics.by_rank(2.0, 3), statistics.line(2.0)
    assert by_rank is None  # once in three seconds
    assert (line.reduction, line.waiting, line.data, line.computing) == (0.1, 0.3, 0.2, 0.4)
    by_rank = statistics.by_rank(3.0, 3)
    assert (by_rank.waiting, by_rank.data) == ([0.6, 0.0, None], [0.1, 0.3, None])


def test_rank_statistics_begin_anew_with_each_version():
    """A rank that joined 4 s ago isn't compared over the 80 s before."""
    statistics = JobStatistics(0.0)
    for second in range(1, 81):
        statistics.add(0, report(0, 10 * second))
        assert statistics.by_rank(float(second), 1) is None
    statistics.changed(80.0)
    for second in range(81, 85):
        for rank in range(3):
            statistics.add(rank, report(rank, 10 * second))
        by_rank = statistics.by_rank(float(second), 3)
        assert (None if by_rank is None else by_rank.seconds) == (3.0 if second == 83 else None)


def test_rate_and_batch_are_in_a_line_if_they_changed():
    statistics, lines = JobStatistics(0.0), []
    for second, (rate, batch) in enumerate([(0.1, 32), (0.1, 32), (0.1, 64), (0.05, 64)], 1):
        statistics.add(0, report(0, 10 * second, learning_rate=rate, batch=batch))
        line = statistics.line(float(second))
        lines.append((line.learning_rate, line.batch))
    assert lines == [(0.1, 32), (None, None), (None, 64), (0.05, None)]


# ---- stalls ----------------------------------------------------------------------------------------------------------


def test_stall_begins_after_a_while_and_ends_when_the_rank_comes():
    watch = StallWatch()
    assert watch.look(0.0, {"a": [1]}, {"a": 7}) == ({}, {})
    began, ended = watch.look(STALL_S, {"a": [1, 2]}, {"a": 7})
    assert [(each, stall.since, stall.waiting) for each, stall in began.items()] == [("a", 0.0, [1, 2])]
    assert ended == {}
    assert watch.look(STALL_S + 1, {"a": [1, 2]}, {"a": 7}) == ({}, {})
    began, ended = watch.look(STALL_S + 2, {}, {})
    assert (began, list(ended)) == ({}, ["a"])


def test_slow_rank_that_makes_steps_is_no_stall():
    watch = StallWatch()
    for look in range(20):
        assert watch.look(0.6 * look, {"a": [1]}, {"a": look // 2}) == ({}, {})


def test_wait_that_ends_sooner_is_no_stall():
    watch = StallWatch()
    watch.look(0.0, {"a": [1]}, {"a": 7})
    assert watch.look(STALL_S / 2, {}, {}) == ({}, {})
    assert watch.look(STALL_S, {"a": [1]}, {"a": 7}) == ({}, {})


# ---- the summary -----------------------------------------------------------------------------------------------------


def test_summary_has_at_most_twelve_lines_and_what_happened():
    account = JobAccount()
    account.add(e.JobStarted(time=100.0, workers=4, hosts=["a"], command="x"))
    account.add(e.Statistics(time=150.0, seconds=50.0, steps=400, samples=6400, step=400, committed=45.0, loss=0.25))
    for version in range(1, 9):
        account.add(
            e.WorkerFailed(time=150.0 + version, rank=version, reason="was killed by SIGKILL", decision="shrink")
        )
        account.add(e.FailureSeen(time=150.5 + version, rank=version, step=400 + version, seconds=0.5, survivors=[0]))
        sizes = {"workers": 4 + version % 2, "workers_before": 4, "version": version}
        account.add(e.VersionCommitted(time=151.0 + version, seconds=0.1, **sizes))
        account.add(e.Resized(time=151.0 + version, step=400 + version, seconds=version / 10, **sizes))
    account.add(e.StallEnded(time=190.0, rank=2, seconds=3.0))
    account.add(e.JobEnded(time=200.0, exit_code=3))
    lines = account.summary("/logs")
    assert len(lines) <= MOST_LINES
    assert lines[0] == 'duration="1 min 40 s" exit_code=3'
    assert lines[1:3] == ["steps=400 samples=6400 samples_per_s=64 loss=0.25", 'goodput=45% committed="45 s"']
    assert "failures=8" in lines
    assert 'failed rank=8 step=408 decision=shrink cost="0.5 s" reason="was killed by SIGKILL"' in lines
    assert 'slowest_change="4 -> 4 workers" version=8 step=408 stood="0.8 s"' in lines
    assert lines[-2:] == ['stalls=1 seconds=3.0 longest="3 s" rank=2', "logs=/logs"]


def test_summary_of_a_resumed_job_counts_its_own_steps():
    account = JobAccount()
    account.add(e.JobStarted(time=100.0, workers=4, hosts=["a"], command="x"))
    for step in (458, 512):
        account.add(e.Statistics(time=150.0, seconds=25.0, steps=54, samples=1728, step=step))
    assert account.summary(None)[1] == "steps=108 samples=3456 samples_per_s=69.12 last_step=512"


def test_summary_of_a_job_without_steps_says_no_more():
    account = JobAccount()
    account.add(e.JobStarted(time=100.0, workers=2, hosts=["a"], command="x"))
    account.add(e.JobEnded(time=100.5, exit_code=0))
    assert account.summary(None) == ['duration="0.5 s" exit_code=0 workers=2']


def test_cost_in_the_summary_is_that_of_the_failure_not_of_the_rank():
    """Another worker has the rank of the first failure later, and the survivors report nothing of it."""
    account = JobAccount()
    account.add(e.JobStarted(time=100.0, workers=3, hosts=["a"], command="x"))
    fails = {"rank": 1, "reason": "was killed", "decision": "shrink"}
    account.add(e.WorkerFailed(time=105.0, step=4, **fails))
    account.add(e.WorkerFailed(time=105.0, **{**fails, "rank": 2}))
    account.add(e.FailureSeen(time=107.0, rank=1, step=5, seconds=2.0, survivors=[0]))
    account.add(e.WorkerFailed(time=190.0, step=90, **fails))
    assert account.summary(None)[-3:] == [
        'failed rank=1 step=5 decision=shrink cost="2 s" reason="was killed"',
        'failed rank=2 decision=shrink reason="was killed"',
        'failed rank=1 step=90 decision=shrink reason="was killed"',
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.25, "0.25 s"), (59.94, "59.9 s"), (59.96, "1 min 0 s"), (119.4, "1 min 59 s"), (119.7, "2 min 0 s"),
        (3599.7, "1 h 0 min"), (7140.0, "1 h 59 min"), (7199.7, "2 h 0 min"),
    ],
)  # fmt: skip
def test_spelled_duration_is_rounded_before_it_is_divided(seconds, text):
    assert spell(seconds) == text


def test_failure_of_a_standby_is_not_in_the_summary():
    account = JobAccount()
    account.add(e.JobStarted(time=100.0, workers=2, hosts=["a"], command="x"))
    account.add(e.WorkerFailed(time=100.2, host="a", standing="standby", reason="was killed by SIGKILL"))
    account.add(e.JobEnded(time=100.5, exit_code=0))
    assert account.summary(None) == ['duration="0.5 s" exit_code=0 workers=2']


def test_job_that_never_started_has_no_summary():
    assert JobAccount().summary("/logs") == []


# ---- a worker's reports ----------------------------------------------------------------------------------------------


def test_any_reported_value_is_read():
    hard = {"reason": "x" * 9999 + "\ud800", "seconds": math.nan, "step": 3, "path": "\ud800/ö"}
    event = {"event": "checkpoint_written", **hard, "seconds": 0.123456789}
    said = {"type": "report", "peer": "127.0.0.1:10000", "incarnation": 0, "events": [event]}
    read = m.TO_BROKER(json.dumps(_readable(said)).encode())
    assert len(read.events[0].reason) == 4096
    assert (read.events[0].path, read.events[0].seconds) == ("?/ö", 0.12346)
    assert _readable(hard)["seconds"] is None


def client_of(connection):
    client = BrokerClient("nowhere", b"")
    client._connection, client._owner = Connection(connection, None), os.getpid()
    return client


def test_report_to_a_launcher_that_does_not_read_is_dropped():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = client_of(ours)
        began = time.monotonic()
        for number in range(5000):
            client.report({"number": number, "padding": "x" * 200})
        assert time.monotonic() - began < 5
        # What it reads are whole messages, and the next request comes behind them.
        reader = Connection(theirs, 5.0)
        waiting = threading.Thread(target=lambda: broker_protocol.send(client._connection, {"type": "last"}))
        waiting.start()
        numbers = []
        while "number" in (said := json.loads(reader.receive_bytes()[0])):
            numbers.append(said["number"])
        waiting.join()
        assert said == {"type": "last"}
        assert numbers == list(range(len(numbers)))
        assert 10 < len(numbers) < 5000


def test_forked_child_reports_nothing():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        client = client_of(ours)
        client._owner = os.getpid() + 1
        client.report({"number": 1})
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


# ---- kungfu-run explain ----------------------------------------------------------------------------------------------


def written(path, *events):
    path.mkdir(exist_ok=True)
    (path / e.FILE_NAME).write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in events))
    return str(path)


BEGAN = e.LogBegan(time=10.0, host="a", version=e.VERSION, job="j", ms_kungfu="1")


def test_explain_reads_the_logs_of_several_controllers(tmp_path, capsys):
    first = written(tmp_path / "1", BEGAN, e.JobStarted(time=10.5, workers=2, hosts=["a", "b"], command="x"))
    second = written(tmp_path / "2", e.LeaderChanged(time=30.0, host="b", before="a"))
    assert cli.main(["explain", second, "--json", first]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(each["kind"], each["at_s"]) for each in told] == [("job", 0.5), ("controller", 20.0)]
    assert told[1]["text"] == "Host b took over the job, which a had controlled."


def test_explain_skips_what_it_cannot_read_and_says_so(tmp_path, capsys):
    logs = written(tmp_path, BEGAN, e.HostLost(time=12.0, host="b", reason="it is \x1b[31mgone"))
    with (tmp_path / e.FILE_NAME).open("ab") as file:
        file.write(b'{"event":"of_next_year","time":13.0}\n\xff\n[]\n{"event":"job_ended","ti')
    assert cli.main(["explain", logs]) == 0
    told = capsys.readouterr()
    assert told.out == "     2.000 s  Host b was lost: it is \\x1b[31mgone.\n"
    assert "4 lines could not be read" in told.err


@pytest.mark.parametrize(
    ("words", "code", "error"),
    [
        ([], 2, "give the -logdir of a job"),
        (["-nothing", "x"], 2, "nothing"),
        (["{tmp}/none"], 1, "No such file"),
        (["{tmp}/newer"], 1, "has format version 99"),
        (["{tmp}/empty"], 1, "contains no event"),
    ],
)
def test_explain_says_why_it_cannot(words, code, error, tmp_path, capsys):
    written(tmp_path / "newer", e.LogBegan(time=1.0, version=99, job="j", ms_kungfu="9"))
    written(tmp_path / "empty")
    assert cli.main(["explain", *(word.format(tmp=tmp_path) for word in words)]) == code
    assert error in capsys.readouterr().err


def test_straggler_that_waits_for_data_is_named(tmp_path, capsys):
    lines = [
        e.RankStatistics(
            time=20.0 + 2 * i, seconds=2.0, p50=[0.1, 0.1], p99=[0.1, 0.1], computing=[0.4, 0.3], waiting=[0.55, 0.0],
            data=[0.0, 0.62], checkpoint=[None, None],
        )
        for i in range(6)
    ]  # fmt: skip
    assert cli.main(["explain", "-json", written(tmp_path, BEGAN, *lines)]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["rank"], told["waited"], told["cause"]) == ("straggler", 1, [0], "data 62%")
    assert cli.main(["explain", "-json", written(tmp_path, BEGAN, *lines[:4])]) == 0
    assert json.loads(capsys.readouterr().out) == []  # too short


def test_straggler_of_an_earlier_version_is_another_one():
    parts = {name: [0.1, 0.1] for name in ("p50", "p99", "computing", "data", "checkpoint")}
    late = e.RankStatistics(seconds=6.0, waiting=[0.0, 0.5], **parts)
    committed = e.VersionCommitted(version=1, workers=2, workers_before=2, seconds=0.1)
    assert [chapter.kind for chapter in story_of([late, late])] == ["straggler"]
    assert story_of([late, committed, late]) == []


def test_stall_of_the_rank_that_reports_the_step_is_not_contradicted():
    """The clock of a stopped process leaves out the time of the stop."""

    def stall_that_lasts(seconds):
        began = e.StallBegan(rank=0, waiting=[1], seconds=2.0, step=64, reason="stopped by a signal")
        ended = e.StallEnded(rank=0, seconds=seconds)
        (chapter,) = story_of([began, ended, e.StepDelayed(step=65, seconds=2.06)])
        return chapter

    stopped = stall_that_lasts(19.0)
    assert stopped.text.endswith("That lasted for about 19 s.")
    assert (stopped.step, stopped.cost_s) == (65, 19.0)
    awaited = stall_that_lasts(2.5)
    assert awaited.text.endswith("That lasted for about 2 s. Step 65 took 2.06 s longer than usual.")
    assert awaited.cost_s == 2.06


def test_cause_of_a_long_step_is_part_of_its_sentence():
    delayed = e.StepDelayed(step=9, seconds=3.5, reason="it compiled")
    alone, caused = story_of([e.StepDelayed(step=7, seconds=2.5), delayed])
    assert (alone.text, alone.cause) == ("Step 7 took 2.5 s longer than usual.", None)
    assert (caused.text, caused.cause) == ("Step 9 took 3.5 s longer than usual: it compiled.", "it compiled")


class Counted(list):
    """Events that count how often one is read."""

    reads = 0

    def __iter__(self):
        for each in super().__iter__():
            self.reads += 1
            yield each

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.reads += len(found) if isinstance(place, slice) else 1
        return found


def test_story_of_many_events_reads_each_a_few_times():
    """`explain` of a job with thousands of stalls takes a second, not minutes."""
    one = [
        e.StallBegan(rank=1, waiting=[0], seconds=2.0), e.StallEnded(rank=1, seconds=4.0),
        e.StepDelayed(step=1, seconds=3.0), e.StepDelayed(step=2, seconds=3.0), e.HostJoined(host="a", slots=1),
        e.StoreLost(reason="refused"), e.StoreRestored(), e.WorkerFailed(rank=1, reason="was killed"),
        e.FailureSeen(rank=1, step=3, seconds=0.5, survivors=[0]),
        e.VersionCommitted(version=0, workers=1, workers_before=2, seconds=0.1),
    ]  # fmt: skip
    events = Counted(msgspec.structs.replace(each, time=1.0 + place) for place, each in enumerate(one * 200))
    assert len(story_of(events)) == 5 * 200
    assert (reads := events.reads) <= 20_000, reads


def test_stall_without_end_does_not_take_the_end_of_the_next():
    """A controller that takes over the job doesn't know the stall, so its end isn't in the log."""
    stall = {"rank": 1, "waiting": [0], "seconds": 2.0}
    first, second = (
        chapter.text
        for chapter in story_of([
            e.StallBegan(time=10.0, **stall),
            e.LeaderChanged(time=12.0, host="b", before="a"),
            e.StallBegan(time=500.0, **stall),
            e.RuntimeMessage(time=502.0, rank=0, reason="it waits"),
            e.StallEnded(time=505.0, rank=1, seconds=7.0),
        ])
        if chapter.kind == "stall"
    )  # fmt: skip
    assert first == "Rank 0 waits for rank 1. The log does not contain its end."
    assert second == "Rank 0 waits for rank 1. That lasted for about 7 s. Rank 0 logged: it waits."


def test_chapter_of_a_failure_has_what_survivors_noticed_of_its_rank():
    fails = {"reason": "was killed", "decision": "shrink"}
    one, other = story_of([
        e.WorkerFailed(time=10.0, rank=1, **fails), e.WorkerFailed(time=10.1, rank=2, **fails),
        e.FailureSeen(time=11.0, rank=2, step=8, seconds=0.5, survivors=[0, 3]),
        e.FailureSeen(time=12.0, rank=1, step=9, seconds=1.5, survivors=[0]),
    ])  # fmt: skip
    assert (one.rank, one.step, one.cost_s, one.waited) == (1, 9, 1.5, [0])
    assert (other.rank, other.step, other.cost_s, other.waited) == (2, 8, 0.5, [0, 3])


def test_stall_ends_with_the_event_of_its_rank():
    one, other = story_of([
        e.StallBegan(time=10.0, rank=1, waiting=[0], seconds=2.0),
        e.StallBegan(time=11.0, rank=2, waiting=[0], seconds=2.0),
        e.StallEnded(time=14.0, rank=2, seconds=5.0),
        e.StallEnded(time=30.0, rank=1, seconds=22.0),
    ])  # fmt: skip
    assert (one.rank, one.text.partition(". ")[2]) == (1, "That lasted for about 22 s.")
    assert (other.rank, other.text.partition(". ")[2]) == (2, "That lasted for about 5 s.")


def test_outage_without_end_does_not_take_the_end_of_the_next():
    first, second = story_of([
        e.StoreLost(time=10.0, reason="refused"), e.StoreLost(time=500.0, reason="refused"),
        e.StoreRestored(time=503.0),
    ])  # fmt: skip
    assert first.text.startswith("The cluster store did not answer for an unknown time; training went on")
    assert second.text.startswith("The cluster store did not answer for 3 s; training went on")
