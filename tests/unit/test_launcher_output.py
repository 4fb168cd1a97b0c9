import fcntl
import os
import pty
import struct
import termios
import threading
import time

import pyte
import pytest

from ms_kungfu.launcher.agent import output as output_module
from ms_kungfu.launcher.agent.output import LineSplitter, Output
from ms_kungfu.launcher.agent.screen import Screen, fitted
from ms_kungfu.launcher.state.prefix import Prefix, prefix_of


def shown(write, terminal=False):
    reading, writing = os.pipe()
    screen = Screen(writing)
    screen.is_terminal = terminal
    write(screen)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        return pipe.read()


@pytest.mark.parametrize("cut", range(1, 12))
def test_lines_are_the_same_however_the_stream_is_cut(cut):
    text = b"one\ntwo\r\n\n10%\r20%\rthree"
    splitter = LineSplitter()
    lines = [line for i in range(0, len(text), cut) for line in splitter.feed(text[i : i + cut])]
    assert lines == [b"one\n", b"two\r\n", b"\n", b"10%\r", b"20%\r"]
    assert splitter.pending
    assert splitter.flush() == b"three"


def test_a_line_without_end_does_not_grow_for_ever():
    splitter = LineSplitter()
    assert b"".join(splitter.feed(b"x" * 100_000)) == b"x" * 100_000
    assert not splitter.pending


def test_lines_of_writers_are_not_mixed():
    def write(screen):
        screen.write("a", b"[a] ", [b"begin"])
        screen.write("b", b"[b] ", [b"line\n"])
        screen.write("a", b"[a] ", [b" end\n"])

    assert shown(write) == b"[a] begin\n[b] line\n[a]  end\n"


def test_an_open_line_goes_on_without_a_second_prefix():
    def write(screen):
        screen.write("a", b"[a] ", [b"begin"])
        screen.write("a", b"[a] ", [b" end\n", b"next\n"])

    assert shown(write) == b"[a] begin end\n[a] next\n"


def test_a_progress_bar_leaves_nothing_behind_on_a_terminal():
    def write(screen):
        screen.write("a", b"", [b"100 of 100\r", b"done\n"])

    assert shown(write, terminal=True) == b"100 of 100\r\033[Kdone\n"
    assert shown(write) == b"100 of 100\rdone\n"


class Terminal:
    """A terminal with an emulator that shows its rows; `screen` writes to it."""

    def __init__(self, columns=40, rows=8):
        self.ours, self.theirs = pty.openpty()
        self.emulator = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.emulator)
        self.resize(columns, rows)
        self.screen = Screen(self.theirs)
        os.set_blocking(self.ours, False)

    def resize(self, columns, rows):
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self.emulator.resize(rows, columns)

    def rows(self):
        """The rows up to the last one with text."""
        try:
            while True:
                self._stream.feed(os.read(self.ours, 1 << 16))
        except BlockingIOError:
            return "\n".join(row.rstrip() for row in self.emulator.display).rstrip().split("\n")

    def close(self):
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def terminal():
    terminal = Terminal()
    yield terminal
    terminal.close()


def test_bar_that_another_worker_displaced_returns(terminal):
    """As tqdm writes them: a carriage return, then text, and a newline at the end."""
    write = terminal.screen.write
    for done in (b"10%", b"99%", b"100%"):
        write("a", b"[a] ", [b"\r", done])
        write("b", b"[b] ", [b"\r", b"b " + done])
    assert terminal.rows() == ["[b] b 100%"]
    write("a", b"[a] ", [b"\n", b"a is done\n"])
    write("b", b"[b] ", [b"\n"])
    assert terminal.rows() == ["[a] 100%", "[a] a is done", "[b] b 100%"]
    write("a", b"[a] ", [b"\r", b"half"])
    write("b", b"[b] ", [b"a line\n"])
    write("a", b"[a] ", [b" and the rest\n"])
    assert terminal.rows()[3:] == ["[b] a line", "[a] half and the rest"]


def test_bars_with_trailing_carriage_returns_share_a_row(terminal):
    write = terminal.screen.write
    write("a", b"[a] ", [b"10% of a lot\r"])
    write("b", b"[b] ", [b"5%\r"])
    assert terminal.rows() == ["[b] 5%"]
    write("b", b"[b] ", [b"a line\n"])
    write("a", b"[a] ", [b"20%\r"])
    assert terminal.rows() == ["[b] a line", "[a] 20%"]
    write("a", b"[a] ", [b"done\n"])
    assert terminal.rows() == ["[b] a line", "[a] done"]


def test_status_line_is_below_what_workers_print(terminal):
    screen = terminal.screen
    screen.set_status(["step 1", "2 workers"])
    assert terminal.rows() == ["step 1 | 2 workers"]
    screen.write("a", b"[a] ", [b"one\n", b"begin"])
    assert terminal.rows() == ["[a] one", "[a] begin", "step 1 | 2 workers"]
    screen.set_status(["step 2"])
    screen.write("a", b"[a] ", [b" end\n"])
    assert terminal.rows() == ["[a] one", "[a] begin end", "step 2"]
    screen.write("a", b"[a] ", [b"\r", b"10%"])
    screen.set_status(["step 3"])
    screen.write("a", b"[a] ", [b"\r", b"20%"])
    assert terminal.rows() == ["[a] one", "[a] begin end", "[a] 20%", "step 3"]
    screen.write("b", b"[b] ", [b"%d\n" % i for i in range(20)])
    assert terminal.rows() == [*(f"[b] {i}" for i in range(13, 20)), "step 3"]
    screen.set_status([])
    assert terminal.rows() == [f"[b] {i}" for i in range(13, 20)]


def test_unfinished_line_in_the_last_row_keeps_its_place(terminal):
    screen = terminal.screen
    screen.write("a", b"", [b"%d\n" % i for i in range(7)] + [b"password: "])
    screen.set_status(["step 1"])
    screen.write("a", b"", [b"given\n"])
    assert terminal.rows() == [*(f"{i}" for i in range(1, 7)), "password: given", "step 1"]


def test_status_line_fits_a_terminal_that_becomes_narrower(terminal):
    screen = terminal.screen
    parts = ["step 412/600 (69%)", "38 s left", "479 samples/s"]
    screen.set_status(parts)
    assert terminal.rows() == ["step 412/600 (69%) | 38 s left"]
    for columns, row in ((25, "step 412/600 (69%)"), (12, "step 412..."), (3, ".."), (80, " | ".join(parts))):
        terminal.resize(columns, 8)
        screen.set_status(parts)
        assert terminal.rows() == [row]
    screen.write("a", b"", [b"line\n"])
    assert terminal.rows() == ["line", " | ".join(parts)]


def test_long_part_is_cut_if_much_of_it_fits():
    assert fitted(["step 1", "x" * 90], 60) == "step 1 | " + "x" * 48 + "..."
    assert fitted(["step 1", "x" * 90], 30) == "step 1"
    assert fitted([], 30) == ""


@pytest.mark.parametrize(
    ("text", "rank", "last_rank", "before"),
    [
        ("none", 2, 2, ""),
        ("rank", 2, 2, "[2] "),
        ("rank", None, 2, "[was 2] "),
        ("host:rank", 2, 2, "[a:2] "),
        ("host:rank", None, 2, "[a:was 2] "),
    ],
)
def test_prefix_says_the_rank_and_the_host(text, rank, last_rank, before):
    assert prefix_of(text).before("a", rank, last_rank).decode() == before


@pytest.mark.parametrize("text", ["time", "time,rank", "rank,time", "time,host:rank"])
def test_time_is_before_the_rank(text):
    found = prefix_of(text).before("a", 2, 2).decode()
    rank = "[a:2] " if "host" in text else "[2] " if "rank" in text else ""
    assert found[2] == found[5] == ":"
    assert found[8:] == f" {rank}"


def output_of(prefix=None, several=True, logdir=None):
    """An Output over a pipe for both streams, and what reads the pipe to its end."""
    reading, writing = os.pipe()
    output = Output(logdir, stdout=writing, stderr=writing, prefix=prefix, several=several, host="a")

    def received():
        output.close(60)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            return pipe.read().decode()

    return output, received


def attached(output, key, rank):
    stdout, stderr = output.attach(key, f"a.{10000 + key}", rank)
    os.close(stderr)
    return os.fdopen(stdout, "wb", buffering=0)


def test_lines_in_a_pipe_have_no_prefix_unless_it_is_asked_for():
    for prefix, expected in ((None, "line\n"), (Prefix(rank=True), "[3] line\n")):
        output, received = output_of(prefix)
        with attached(output, 0, 3) as worker:
            worker.write(b"line\n")
        assert received() == expected


def test_prefix_changes_with_the_rank_from_the_next_line_on():
    output, received = output_of(Prefix(rank=True))
    with attached(output, 0, 2) as worker:
        worker.write(b"before\nbegin")
        output.place(0, 1)
        worker.write(b" end\nafter\n")
        output.place(0, None)
        worker.write(b"left\n")
    assert received() == "[2] before\n[2] begin end\n[1] after\n[was 1] left\n"


def test_running_worker_is_remembered_after_many_others(monkeypatch):
    monkeypatch.setattr(output_module, "_MOST_REMEMBERED", 4)
    output, received = output_of(Prefix(rank=True))
    deadline = time.monotonic() + 20
    with attached(output, 0, 2) as worker:
        for key in range(1, 20):
            attached(output, key, 3).close()
            while not output._workers[key].is_over:
                assert time.monotonic() < deadline
                time.sleep(0.001)
        assert len(output._workers) == 4
        assert output.name_of(0) == "rank 2"
        output.place(0, 5)
        worker.write(b"line\n")
    assert received() == "[5] line\n"


def test_held_output_of_a_standby_is_shown_with_its_first_rank(tmp_path):
    output, received = output_of(Prefix(rank=True), logdir=tmp_path)
    stdout, stderr = output.attach(0, "standby.1", 7, held=True)
    os.close(stderr)
    with os.fdopen(stdout, "wb", buffering=0) as worker:
        worker.write(b"held\n")
        log = tmp_path / "standby.1.stdout.log"
        while not log.exists() or not log.read_text():
            time.sleep(0.001)
        output.place(0, 2)
        output.release(0)
        worker.write(b"shown\n")
    assert received() == "[2] held\n[2] shown\n"


def test_files_of_the_log_folder_have_the_prefix_if_it_is_asked_for(tmp_path):
    for words, expected in (("rank", "one\ntwo"), ("rank,files", "[3] one\n[3] two")):
        output, received = output_of(prefix_of(words), logdir=tmp_path / words)
        with attached(output, 0, 3) as worker:
            worker.write(b"one\ntwo")
        received()
        assert (tmp_path / words / "a.10000.stdout.log").read_text() == expected


def test_log_folder_that_hangs_blocks_no_caller(tmp_path, monkeypatch):
    hangs, opened = threading.Event(), output_module.open_regular

    def open_regular(path, flags):
        assert hangs.wait(20)
        return opened(path, flags)

    monkeypatch.setattr(output_module, "open_regular", open_regular)
    output, received = output_of(logdir=tmp_path)
    worker = attached(output, 0, 3)
    hangs.set()
    with worker:
        worker.write(b"line\n")
    assert received() == "line\n"
    assert (tmp_path / "a.10000.stdout.log").read_text() == "line\n"


def test_deleted_log_of_a_worker_is_reported_once(tmp_path):
    output, received = output_of(logdir=tmp_path)
    log = tmp_path / "a.10000.stdout.log"
    with attached(output, 0, 3) as worker:
        worker.write(b"one\n")
        while not log.exists() or not log.read_text():
            time.sleep(0.001)
        log.unlink()
        worker.write(b"two\n")
        worker.write(b"three\n")
    told = [line for line in received().splitlines() if line.startswith("kungfu-run: ")]
    assert told == [f"kungfu-run: log file {log} can't be written; the job continues without it: it was deleted"]


@pytest.mark.parametrize(("several", "expected"), [(True, "\033[35m[3]\033[0m line"), (False, "line")])
def test_terminal_shows_the_rank_if_there_are_several_workers(several, expected):
    ours, theirs = pty.openpty()
    output = Output(stdout=theirs, stderr=theirs, several=several)
    with attached(output, 0, 3) as worker:
        worker.write(b"line\n")
    output.close(60)
    assert os.read(ours, 4096).decode() == f"{expected}\r\n"
    os.close(ours)
    os.close(theirs)


def test_open_line_on_stdout_is_ended_before_stderr_on_one_terminal():
    ours, theirs = pty.openpty()
    output = Output(stdout=theirs, stderr=os.dup(theirs), several=False)
    with attached(output, 0, 0) as worker:
        worker.write(b"begin")
    received = b""
    while b"begin" not in received:  # the piece is shown at the end of the stream
        received += os.read(ours, 4096)
    output.say("a line")
    output.close(60)
    assert received + os.read(ours, 4096) == b"begin\r\na line\r\n"
    os.close(ours)
    os.close(theirs)


def test_output_without_a_reader_is_dropped():
    reading, writing = os.pipe()
    os.close(reading)
    screen = Screen(writing)
    screen.write("a", b"", [b"line\n"])
    assert screen.broken
    screen.write("a", b"", [b"line\n"])
    os.close(writing)


def test_last_message_is_on_stderr_if_stdout_has_no_reader():
    """The worker's output has filled the pipe of stdout, and the thread that writes both waits there."""
    (unread, stdout), (words, stderr) = os.pipe(), os.pipe()
    output = Output(stdout=stdout, stderr=stderr)
    theirs, other = output.attach(0, "worker", 0)
    os.close(other)
    with os.fdopen(theirs, "wb", buffering=0) as worker:
        for _ in range(64):
            worker.write(b"x" * 8191 + b"\n")
    output.close(0.5, "kungfu-run: worker 1 exited with code 3")
    os.set_blocking(words, False)
    assert os.read(words, 4096) == b"kungfu-run: worker 1 exited with code 3\n"
    os.close(unread)  # ends the thread's wait
    output.close(30)
