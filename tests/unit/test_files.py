"""Files in folders that other programs can write to: opened without waiting, if they are what they should be."""

import errno
import gc
import logging
import os
import socket
import threading
from types import SimpleNamespace

import pytest

from ms_kungfu import _tls
from ms_kungfu._files import open_regular, read_regular
from ms_kungfu.config_server import secret_file
from ms_kungfu.dataset import ledger
from ms_kungfu.devices import rank_table
from ms_kungfu.launcher import cli
from ms_kungfu.launcher.agent.output import Output

pytestmark = pytest.mark.timeout(30)  # what waits at a FIFO waits for ever
WRITE = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
FIFO = "it is a FIFO"


@pytest.fixture
def fifo(tmp_path):
    """A FIFO that no process reads or writes."""
    os.mkfifo(tmp_path / "fifo")
    return tmp_path / "fifo"


@pytest.fixture
def link(tmp_path):
    (tmp_path / "target").write_text("kept")
    (tmp_path / "link").symlink_to("target")
    return tmp_path / "link"


def test_regular_file_is_opened(tmp_path):
    fd = open_regular(tmp_path / "new", WRITE)
    assert os.get_blocking(fd)
    assert not os.get_inheritable(fd)
    os.write(fd, b"text")
    os.close(fd)
    assert read_regular(tmp_path / "new") == b"text"


@pytest.mark.parametrize("flags", [os.O_RDONLY, WRITE, os.O_RDWR])
@pytest.mark.parametrize("devices", [False, True])
def test_fifo_is_refused_at_once(fifo, flags, devices):
    with pytest.raises(OSError, match=FIFO):
        open_regular(fifo, flags, devices=devices)


def test_fifo_with_a_reader_is_refused(fifo):
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match=FIFO):
        open_regular(fifo, WRITE)
    os.close(reader)


@pytest.mark.parametrize("flags", [WRITE, os.O_WRONLY | os.O_APPEND])
def test_fifo_with_a_reader_is_opened_where_the_user_names_it(fifo, flags):
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    fd = open_regular(fifo, flags, devices=True)
    assert os.get_blocking(fd)
    os.write(fd, b"text")
    os.close(fd)
    assert os.read(reader, 10) == b"text"
    for others in (os.O_RDONLY, os.O_RDWR):  # they open without another process
        with pytest.raises(OSError, match=FIFO):
            open_regular(fifo, others, devices=True)
    os.close(reader)


def test_socket_is_refused(tmp_path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(OSError, match="a socket, not a regular file"):
            open_regular(tmp_path / "socket")


def test_folder_is_refused(tmp_path):
    with pytest.raises(OSError, match="it is a folder, not a regular file"):
        open_regular(tmp_path)


def test_link_is_read_and_not_written(link):
    assert read_regular(link) == b"kept"
    with pytest.raises(OSError, match="it is a symbolic link") as refused:
        open_regular(link, WRITE)
    assert refused.value.errno == errno.ELOOP
    assert read_regular(link) == b"kept"


def test_device_is_opened_where_the_user_names_it(tmp_path):
    with pytest.raises(OSError, match="it is a device, not a regular file"):
        open_regular("/dev/null", WRITE)
    (tmp_path / "named").symlink_to("/dev/null")
    os.close(open_regular(tmp_path / "named", WRITE, devices=True))


def test_refused_file_leaves_no_descriptor(fifo):
    gc.collect()  # what other tests have left
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=FIFO):
        open_regular(fifo)
    assert os.listdir("/proc/self/fd") == before


# ---- the processes that open ----


def test_log_that_fails_later_is_given_up_once(tmp_path, monkeypatch):
    told, real, full = [], os.write, threading.Event()

    def write(fd, data):
        if os.readlink(f"/proc/self/fd/{fd}").endswith("w.1.stdout.log"):
            full.set()
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    output = Output(tmp_path, quiet=True)
    monkeypatch.setattr(output, "say", told.append)
    out, error = output.attach(0, "w.1", 0)
    os.close(error)
    real(out, b"one\n")
    assert full.wait(20)
    real(out, b"two\n")
    os.close(out)
    output.close(20)
    (line,) = told
    assert "w.1.stdout.log can't be written; the job continues without it: No space left" in line


def test_log_file_of_the_launcher_that_is_a_fifo_is_refused(fifo):
    with pytest.raises(OSError, match=FIFO):
        cli._ToFile(fifo, None)


def test_launcher_log_into_a_pipe_never_waits_for_its_reader(monkeypatch):
    monkeypatch.setattr(cli, "_MAX_LOG_LINES", 100)
    reader, writer = os.pipe()
    told = []
    handler = cli._ToFile(f"/dev/fd/{writer}", SimpleNamespace(say=told.append))
    os.close(writer)
    record = logging.LogRecord("ms_kungfu", logging.INFO, "", 0, "%s", ("x" * 1000,), None)
    handler.handle(record)
    assert os.read(reader, 2000) == b"x" * 1000 + b"\n"
    for _ in range(200):  # more than the pipe and the queue hold
        if record.levelno >= handler.level:
            handler.handle(record)
    (line,) = told
    assert "can't be written; the job goes on without it" in line
    os.set_blocking(reader, False)
    while True:
        try:
            os.read(reader, 1 << 20)
        except BlockingIOError:
            break
    handler.close()
    os.close(reader)


def test_secret_that_is_a_fifo_is_none(tmp_path, monkeypatch):
    (tmp_path / "ms_kungfu").mkdir(mode=0o700)
    monkeypatch.setattr(secret_file, "own_directories", lambda: [tmp_path / "ms_kungfu"])
    os.mkfifo(tmp_path / "ms_kungfu" / secret_file._name("http://127.0.0.1:9100/config"), 0o600)
    assert secret_file.read_secret("http://127.0.0.1:9100/config") is None


def test_ledger_with_a_fifo_has_a_problem(tmp_path):
    os.mkfifo(tmp_path / "a.jsonl")
    records, problems, _ = ledger.read(tmp_path)
    assert records == {"a.jsonl": []}
    (problem,) = problems
    assert f"a.jsonl: can't be read: {FIFO}" in problem


def test_rank_table_that_is_a_fifo_is_refused(fifo):
    with pytest.raises(rank_table.RankTableError, match=f"it can't be read: {FIFO}"):
        rank_table.read(fifo)


def test_certificate_that_is_a_fifo_is_refused(fifo):
    tls = _tls.Tls(str(fifo), str(fifo), str(fifo))
    with pytest.raises(ValueError, match=f"can't be read: {FIFO}"):
        tls.context(called=True)
