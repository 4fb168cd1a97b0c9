"""How far a job's training is: from its events over the status document to a line and to `kungfu-run top`."""

import asyncio
import builtins
import io
import itertools
import signal
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from ms_kungfu import job_events as e
from ms_kungfu import membership
from ms_kungfu.elastic.last_checkpoint import LastCheckpoint
from ms_kungfu.elastic.statistics import StepStatistics
from ms_kungfu.elastic.training import ElasticTraining
from ms_kungfu.launcher import top_command, top_view
from ms_kungfu.launcher.agent.progress import has_line, keep_showing
from ms_kungfu.launcher.cli import main
from ms_kungfu.launcher.controller.status import last_step
from ms_kungfu.launcher.state.progress import as_log_line, progress_of
from ms_kungfu.launcher.state.statistics import JobStatistics
from ms_kungfu.launcher.state.training import TrainingWatch
from ms_kungfu.launcher.wire.documents import STATUS
from ms_kungfu.membership.member import EndedSteps

BEGAN = 1_700_000_000.0


def second(i, **more):
    """The event after i seconds; ten steps a second."""
    values = {"step": 10 * i, "steps": 10, "samples": 320, "seconds": 1.0, "loss": 1.0 / i, **more}
    return e.Statistics(time=BEGAN + i, **values)


def watch(*events):
    found = TrainingWatch()
    for event in events:
        found.add(event)
    return found


def training(now, *events):
    return watch(*events).describe(BEGAN + now)["training"]


def process(rank, **more):
    return {
        "rank": rank, "host": "a", "peer": f"a:{10000 + rank}", "pid": 70 + rank, "device": None, "step": 12,
        "step_s": 0.0123, "step_ended_s_ago": 0.2, "state": "running", "why": "", "standing": "member", **more,
    }  # fmt: skip


def change(version, before, size, why="requested from outside: kungfu-run resize, or another client"):
    return {
        "version": version, "size": size, "size_before": before, "why": why, "wanted_at": BEGAN, "chosen_at": BEGAN,
        "after_step": 100, "refused": None, "state": "committed",
    }  # fmt: skip


def document(size=3, **more):
    values = {
        "state": "running", "why": "", "launcher": {"host": "a", "pid": 5}, "started_at": BEGAN,
        "command": ["python", "train.py"], "follows_changes": True, "config_server": None,
        "hosts": [{"name": "a", "lost": False, "state": "active"}], "cluster": {"version": 1, "size": size},
        "wanted": None, "processes": [process(rank) for rank in range(size)],
        "changes": [change(0, None, 2, "the job's start"), change(1, 2, 3)], "stalls": [],
        "training": training(20, *(second(i, epoch=1, epochs=3, total_steps=600) for i in range(1, 21))), **more,
    }  # fmt: skip
    STATUS.convert(values)
    return values


# ---- from the events ----


def test_rates_and_time_left_are_those_of_the_last_seconds():
    slow = [second(i, steps=1, samples=32, step=i) for i in range(1, 6)]
    found = training(20, *slow, *(second(i, total_steps=1000) for i in range(6, 21)))
    assert (found["steps_per_s"], found["samples_per_s"], found["left_s"]) == (10.0, 320.0, 80.0)
    assert (found["step"], found["loss"]) == (200, 0.05)


def test_first_event_counts_in_no_rate_because_it_covers_the_start():
    events = [second(1, seconds=60.0), second(2)]
    assert training(1, *events[:1])["steps_per_s"] is None
    assert training(2, *events)["steps_per_s"] == 10.0


def test_rates_fall_while_no_step_ends():
    events = [second(i) for i in range(1, 6)]
    assert training(6, *events)["steps_per_s"] == 10.0
    assert training(25, *events)["steps_per_s"] == pytest.approx(40 / 24, rel=1e-3)


def test_rates_begin_anew_after_a_change_of_the_cluster():
    events = [*(second(i) for i in range(1, 6)), e.VersionCommitted(version=1, workers=3, workers_before=2, seconds=1)]
    assert training(6, *events)["samples_per_s"] is None
    assert training(8, *events, second(7, samples=960), second(8, samples=960))["samples_per_s"] == 960.0


def test_stall_is_in_the_document_until_it_ends():
    began = e.StallBegan(time=BEGAN, rank=1, waiting=[0, 2], seconds=2.0, reason="stopped by a signal")
    job = watch(began)
    assert job.describe(BEGAN + 3)["stalls"] == [
        {"rank": 1, "waiting": [0, 2], "seconds": 5.0, "why": "stopped by a signal"}
    ]
    job.add(e.StallEnded(rank=1, seconds=5.0))
    assert job.describe(BEGAN + 4) == {"training": None, "stalls": []}


def test_stalled_job_has_no_rate_and_no_time_left():
    steps = [second(i, total_steps=600) for i in range(1, 4)]
    stall = e.StallBegan(time=BEGAN + 6, rank=1, waiting=[0], seconds=2.0)
    found = training(20, *steps, stall)
    assert (found["step"], found["left_s"], found["samples_per_s"]) == (30, None, None)
    assert training(3, *steps, stall, e.StallEnded(rank=1, seconds=5.0))["left_s"] == 57.0


def test_job_that_ends_has_no_rate_and_no_time_left():
    job = watch(*(second(i, total_steps=600) for i in range(1, 4)))
    assert job.describe(BEGAN + 3)["training"]["left_s"] == 57.0
    job.add(e.StallBegan(time=BEGAN, rank=1, waiting=[0], seconds=2.0))
    found = job.describe(BEGAN + 3, is_over=True)
    assert (found["training"]["step"], found["stalls"]) == (30, [])
    assert [found["training"][name] for name in ("left_s", "steps_per_s", "samples_per_s")] == [None] * 3


def test_epochs_and_total_steps_are_in_an_event_if_they_changed():
    statistics, found = JobStatistics(0.0), []
    for i, (epoch, total) in enumerate([(1, 60), (1, 60), (2, 60), (2, 30)], 1):
        values = {"step": 10 * i, "seconds": 1.0, "ended": 10, "samples": 1, "committed": 1.0, "p50": 0.1, "p99": 0.1}
        more = {"collectives": 0.0, "checkpoint": 0.0, "epoch": epoch, "epochs": 3, "total_steps": total}
        statistics.add(0, msgspec.convert({**values, **more}, e.StepReport))
        line = statistics.line(float(i))
        found.append((line.epoch, line.epochs, line.total_steps))
    assert found == [(1, 3, 60), (None, None, None), (2, None, None), (None, None, 30)]


@pytest.mark.parametrize(
    ("epochs", "last_step", "expected"),
    [(None, None, {}), (3, None, {"epoch": 2, "epochs": 3}), (3, 90, {"epoch": 2, "epochs": 3, "total_steps": 90}),
     (1, None, {"epoch": 1, "epochs": 1})],
)  # fmt: skip
def test_worker_reports_the_epochs_and_steps_that_it_knows(epochs, last_step, expected):
    training = SimpleNamespace(step=40, epoch=1, dataset=None, asynchronous=False, optimizers=[])
    statistics = StepStatistics(training, SimpleNamespace(monitor=None))
    statistics.epochs, statistics.last_step = epochs, last_step
    found = statistics._of_all(0.5)
    assert {name: value for name, value in found.items() if value is not None} == {**expected, "loss": 0.5}


def test_last_report_has_the_last_loss_before_a_signal(monkeypatch):
    """The signal ends the program in `carry_out`, so the end of training isn't reached."""
    core, reports = SimpleNamespace(traffic=lambda: (0, 0, 0, 0.0)), []
    clock = itertools.count(0.0, 0.1)
    member = SimpleNamespace(core=core, spent={}, ports=SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(membership, "current", lambda: member)
    monkeypatch.setattr(membership, "monotonic", lambda: next(clock))
    monkeypatch.setattr(membership, "size", lambda: 1)
    monkeypatch.setattr(membership, "speaks_for_all", lambda: True)
    monkeypatch.setattr(membership, "report_steps", reports.append)
    monkeypatch.setattr(signal, "getsignal", lambda number: lambda *_: None)
    training = SimpleNamespace(step=0, epoch=0, dataset=None, asynchronous=False, optimizers=[])
    statistics = StepStatistics(training, SimpleNamespace(monitor=None))
    end = LastCheckpoint(SimpleNamespace(write=lambda step: None, folder=None), statistics)
    statistics.resume()
    for training.step in (1, 2, 3):
        statistics.mark()
        statistics.committed(training.step, 8, 8, 1 / training.step)
    end.carry_out(3)
    assert reports == []
    end.agreed = signal.SIGTERM
    end.carry_out(3)
    assert [(each["step"], each["ended"], each["loss"]) for each in reports] == [(3, 3, 1 / 3)]


def test_evaluation_between_two_epochs_is_part_of_no_step(monkeypatch):
    clock, reports = [0.0], []
    core = SimpleNamespace(traffic=lambda: (0, 0, 0, 0.0), note_step=lambda step, each_s: None)
    ports = SimpleNamespace(monotonic=lambda: clock[0])
    member = SimpleNamespace(core=core, spent={}, ports=ports, ended_steps=EndedSteps())
    for module in (membership, membership.reports, membership.step_agreement):
        monkeypatch.setattr(module, "current", lambda: member)
    monkeypatch.setattr(membership, "size", lambda: 1)
    monkeypatch.setattr(membership, "speaks_for_all", lambda: False)
    monkeypatch.setattr(membership, "report_steps", reports.append)
    training = SimpleNamespace(step=0, epoch=0, dataset=None, asynchronous=False, optimizers=[])
    statistics = StepStatistics(training, SimpleNamespace(monitor=None))
    elastic: Any = SimpleNamespace(
        should_stop=False,
        changes=SimpleNamespace(statistics=statistics),
        _measuring=SimpleNamespace(ask=lambda when: None),
    )
    for _ in range(2):
        ElasticTraining.epoch_begin(elastic)
        for _ in range(4):
            clock[0] += 0.5
            training.step += 1
            membership.step_ended(training.step)
            assert member.ended_steps.last_took_longer_s == 0.0
            statistics.mark()
            statistics.committed(training.step, 8, 8, None)
        clock[0] += 3.0  # the evaluation
    statistics.report_rest()
    assert sum(each["committed"] for each in reports) == pytest.approx(4.0)
    assert max(each["p99"] for each in reports) == 0.5


def test_step_of_a_job_is_the_newest_of_the_table():
    joining = process(2, step=45, standing="joining")
    step = last_step([process(0, step=39), process(1, step=38), process(3, step=None), joining])
    found = watch(*(second(i, total_steps=60) for i in range(1, 4))).describe(BEGAN + 3, step=step)["training"]
    assert (found["step"], found["left_s"]) == (39, 2.1)
    assert last_step([process(0, step=None)]) is None
    assert training(3, second(3))["step"] == 30


# ---- the line ----


def test_line_has_the_most_important_parts_first():
    parts = progress_of(document())
    assert parts[:-1] == [
        "step 200/600 (33%)", "40 s left", "320 samples/s", "loss 0.05", "epoch 1/3", "3 workers",
    ]  # fmt: skip
    assert parts[-1].endswith(" 2 -> 3: requested from outside: kungfu-run resize, or another client")


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ({"state": "starting", "why": "waits for kungfu-run on b", "cluster": None, "training": None, "changes": []},
         ["starting: waits for kungfu-run on b"]),
        ({"training": None, "changes": []}, ["running", "3 workers"]),
        ({"wanted": {"version": 2, "size": 4}, "state": "resizing", "training": None, "changes": []},
         ["resizing", "3 workers -> 4"]),
        ({"stalls": [{"rank": 1, "waiting": [0, 2], "seconds": 5.0, "why": ""}], "training": None, "changes": []},
         ["running", "ranks 0 and 2 wait for rank 1 for 5 s", "3 workers"]),
        ({"training": {"step": 7, "total_steps": None, "epoch": None, "epochs": None, "loss": "nan",
                       "steps_per_s": 2.5, "samples_per_s": None, "left_s": None}, "changes": []},
         ["step 7", "2.5 steps/s", "loss nan", "3 workers"]),
        ({"state": "ending", "why": "bad \x1b[2J", "training": None, "cluster": None, "changes": []},
         ["ending: bad \\x1b[2J"]),
    ],
)  # fmt: skip
def test_line_leaves_out_what_is_not_known(more, parts):
    assert progress_of(document(**more)) == parts


def test_log_line_has_what_is_known():
    assert as_log_line(document()) == (
        "progress: step=200 total_steps=600 epoch=1 epochs=3 loss=0.05 samples_per_s=320 steps_per_s=10 left_s=40 "
        "workers=3"
    )
    assert as_log_line(document(training=None)) == ""
    stall = {"rank": 1, "waiting": [0, 2], "seconds": 12.2, "why": "stopped by a signal"}
    assert as_log_line(document(stalls=[stall])).endswith(
        ' workers=3 stall="ranks 0 and 2 wait for rank 1 (stopped by a signal) for 12 s"'
    )


@pytest.mark.parametrize(
    ("progress", "quiet", "terminal", "expected"),
    [(None, False, True, True), (None, True, True, False), (True, True, True, True), (False, False, True, False),
     (True, False, False, False)],
)  # fmt: skip
def test_line_is_on_a_terminal_unless_quiet(progress, quiet, terminal, expected):
    assert has_line(SimpleNamespace(progress=progress, quiet=quiet), SimpleNamespace(is_terminal=terminal)) is expected


def test_pipe_gets_a_line_whenever_the_progress_has_changed(monkeypatch):
    monkeypatch.setattr("ms_kungfu.launcher.agent.progress._LOG_S", 0.0)
    documents = [document(), document(), {"error": "it is just ending"}, document(training=None), document(size=4)]
    lines = []

    async def ask():
        if not documents:
            raise asyncio.CancelledError
        return documents.pop(0)

    options, output = SimpleNamespace(progress=True, quiet=True), SimpleNamespace(is_terminal=False, say=lines.append)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(keep_showing(options, output, ask))
    assert [line[-9:] for line in lines] == ["workers=3", "workers=4"]
    assert all(line.startswith("[kungfu-run] ") and " progress: step=200 " in line for line in lines)


def test_bug_in_the_display_is_logged_and_ends_the_display_alone(monkeypatch, caplog):
    monkeypatch.setattr("ms_kungfu.launcher.agent.progress._LINE_S", 0.0)

    async def ask():
        return {"nothing": 1}

    options, output = SimpleNamespace(progress=None, quiet=False), SimpleNamespace(is_terminal=True)
    asyncio.run(keep_showing(options, output, ask))
    assert [message.partition(" error=")[0] for message in caplog.messages] == ["internal error: where=progress"]


# ---- top ----


def drawn(job, height=None, width=100):
    console = Console(width=width, file=io.StringIO(), color_system=None, force_terminal=False)
    console.print(top_view.picture(job, BEGAN + 20, height))
    return console.file.getvalue().splitlines()


def test_picture_shows_progress_ranks_changes_and_which_rank_is_awaited():
    stalls = [{"rank": 1, "waiting": [0, 2], "seconds": 5.0, "why": "stopped by a signal"}]
    processes = [process(0), process(1, why="stopped by a signal"), process(2)]
    processes[0]["memory"] = 3 << 29
    text = drawn(document(stalls=stalls, processes=processes))
    joined = "\n".join(text)
    assert text[0] == "python train.py"
    assert "running, cluster version 1 of 3 workers" in text
    assert "200/600 (33%)  40 s left" in joined
    assert "1/3 (0%)" in joined
    assert "320 samples/s  10 steps/s  loss 0.05" in text
    assert "ranks 0 and 2 wait for rank 1 (stopped by a signal) for 5 s" in text
    (header,) = (i for i, line in enumerate(text) if line.split()[:2] == ["rank", "host"])
    assert text[header].split() == ["rank", "host", "pid", "step", "step", "time", "ended", "memory", "state"]
    assert "1.5 GiB" in text[header + 1]
    assert text[header + 2].rstrip().endswith("running: stopped by a signal")
    assert "2 -> 3 workers, after step 100; requested from outside" in joined


def test_picture_fits_the_terminal_and_shows_ranks_in_trouble():
    processes = [process(rank, why="stopped by a signal" if rank == 40 else "") for rank in range(64)]
    text = drawn(document(size=64, processes=processes), height=24)
    assert len(text) <= 24
    assert any(line.split()[:1] == ["40"] for line in text)
    shown = sum(line.split()[1:2] == ["a"] for line in text)
    assert f"... and {64 - shown} more" in text


def test_picture_of_a_job_that_has_not_begun():
    bare = {"cluster": None, "training": None, "changes": [], "processes": [], "state": "starting"}
    assert "starting" in drawn(document(size=0, **bare))


def test_markup_in_a_command_is_not_interpreted():
    assert drawn(document(command=["python", "[red]x[/red]"]))[0] == "python [red]x[/red]"


def test_top_without_rich_is_one_line_with_the_remedy(monkeypatch, capsys):
    real = builtins.__import__

    def without(name, *arguments, **more):
        if name.partition(".")[0] == "rich":
            raise ImportError(name)
        return real(name, *arguments, **more)

    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "ms_kungfu.launcher.top_view")
    monkeypatch.delattr("ms_kungfu.launcher.top_view")
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["top"]) == 2
    assert capsys.readouterr().err == "kungfu-run top: rich is missing: pip install 'ms-kungfu[top]'\n"


@pytest.mark.parametrize(
    ("words", "jobs", "code", "told"),
    [
        ([], {}, 1, "no job of this user runs on this machine"),
        (["5"], {}, 1, "no job of process 5 runs"),
        ([], {5: "x", 6: "y"}, 1, "2 jobs of this user run here; give one of 5 (python train.py), 6 (python train.py)"),
        (["x"], {}, 2, "'x' is neither a process ID nor a URL; kungfu-run status lists the jobs"),
        (["²"], {}, 2, "'²' is neither a process ID nor a URL; kungfu-run status lists the jobs"),
        (["5", "6"], {}, 2, "unexpected argument '6'; give one job, or none"),
        (["-secret-file", "f"], {}, 2, "-secret-file requires the URL of the job; give the URL, too"),
    ],
)
def test_top_says_which_job_it_cannot_find(monkeypatch, capsys, words, jobs, code, told):
    def answers(timeout_s, pid=None):
        return ((each, document(job=name)) for each, name in jobs.items() if pid in (None, each))

    monkeypatch.setattr(top_command, "jobs_by_launcher", answers)
    assert main(["top", *words]) == code
    assert capsys.readouterr().err == f"kungfu-run top: {told}\n"


def test_top_without_a_width_uses_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "0")
    top_view.show_once(document(job="x"))
    assert "python train.py" in capsys.readouterr().out


def test_top_in_a_pipe_shows_the_job_once(monkeypatch, capsys):
    hosts = iter([5, 6])  # two hosts of the job are on this machine
    monkeypatch.setattr(top_command, "jobs_by_launcher", lambda *_: ((pid, document(job="x")) for pid in hosts))
    monkeypatch.setattr(top_command, "resident_bytes", lambda pid: 1 << 20)
    assert main(["top"]) == 0
    assert "python train.py" in (out := capsys.readouterr().out)
    assert "1 MiB" in out
