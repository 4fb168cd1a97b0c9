"""The last lines of workers, and the block about the failure that ends a job."""

import pytest

from ms_kungfu.launcher.state.last_lines import MOST_LINES, Ended, LastLines, failure_block

TRACEBACK = [
    b"Traceback (most recent call last):\n",
    b'  File "train.py", line 3, in <module>\n',
    b"ValueError: no such file\n",
]


def lines_of(*lines, stream="stderr"):
    last = LastLines()
    last.add(stream, lines)
    return last


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\n", b"two\n"], ["one", "two"]),
        ([b"begin", b" end\n", b"\n", b"rest"], ["begin end", "", "rest"]),
        ([b"10%\r", b"20%\r", b"done\n", b"next\n"], ["done", "next"]),
        ([b"\r", b"10%", b"\r", b"20%", b"\n", b"next\n"], ["20%", "next"]),
        ([b"10%\r", b"\n", b"next\n"], ["10%", "next"]),
        ([b"windows\r\n", b"\x1b[2Jbell\x07\n"], ["windows", "\\x1b[2Jbell\\x07"]),
    ],
)
def test_lines_are_put_together_as_a_terminal_shows_them(pieces, expected):
    assert lines_of(*pieces).text() == expected


def test_only_the_last_lines_are_kept_and_long_ones_are_cut():
    last = lines_of(*(b"%d\n" % i for i in range(1000)), b"x" * 100_000)
    assert len(last.text()) == MOST_LINES
    assert last.text()[-2] == "999"
    assert len(last.text()[-1]) == 1000


def test_exception_of_the_last_traceback_is_found_beside_other_output():
    last = LastLines()
    for i, line in enumerate(TRACEBACK):
        last.add("stderr", [line])
        last.add("stdout", [b"step %d\n" % i])
    assert last.error == "ValueError: no such file"
    last.add("stderr", [b"\n", b"During handling of the above exception, another exception occurred:\n", b"\n"])
    last.add("stderr", [TRACEBACK[0], b"  File\n", b"KeyError: 1\n", b"bye\n"])
    assert last.error == "KeyError: 1"


def test_block_has_the_first_failure_in_full_and_a_line_for_each_other():
    first = Ended("rank 1 (a, pid 7)", 3, "", lines_of(b"step 1\n", *TRACEBACK))
    others = [
        Ended("rank 0 (a, pid 6)", -15, "", lines_of(*TRACEBACK[:2], b"PeerLostError: rank 1\n")),
        Ended("rank 2 (a, pid 8)", -15, "", lines_of(b"step 1\n")),
        Ended("rank 3 (a, pid 9)", 0, "", lines_of(b"done\n")),
        Ended("rank 4 (a, pid 5)", 1, "", lines_of(b"sorry\n")),
    ]
    assert failure_block(first, others).splitlines() == [
        "---- rank 1 (a, pid 7) failed first: it exited with code 3; its last 4 lines:",
        "| step 1",
        "| Traceback (most recent call last):",
        '|   File "train.py", line 3, in <module>',
        "| ValueError: no such file",
        "---- the others that failed:",
        "| rank 0 (a, pid 6): PeerLostError: rank 1",
        "| rank 4 (a, pid 5) exited with code 1",
        "----",
    ]


def test_block_about_a_killed_worker_names_the_signal():
    block = failure_block(Ended("rank 1 (a, pid 7)", -9, "", LastLines()), [])
    assert block == "---- rank 1 (a, pid 7) failed first: it was killed by SIGKILL; it has printed nothing\n----"
