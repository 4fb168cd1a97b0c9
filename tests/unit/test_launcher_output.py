import os

import pytest

from ms_kungfu.launcher.agent.output import LineSplitter, Output, Screen


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

    assert shown(write, terminal=True) == b"100 of 100\033[K\rdone\033[K\n"
    assert shown(write) == b"100 of 100\rdone\n"


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
    theirs, other = output.attach("worker", 0)
    os.close(other)
    with os.fdopen(theirs, "wb", buffering=0) as worker:
        for _ in range(64):
            worker.write(b"x" * 8191 + b"\n")
    output.close(0.5, "kungfu-run: worker 1 exited with code 3")
    os.set_blocking(words, False)
    assert os.read(words, 4096) == b"kungfu-run: worker 1 exited with code 3\n"
    os.close(unread)  # ends the thread's wait
    output.close(30)
