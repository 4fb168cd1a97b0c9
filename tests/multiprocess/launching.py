"""Starting kungfu-run in a test, watching what it prints, and proving that nothing of it is left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
import uuid
from pathlib import Path

import pyte

_MARK = "KUNGFU_TEST_MARK"
GONE_WITHIN_S = 30.0  # a second on an idle machine
# kungfu-run that doesn't see the jobs beside this test.
ONE_FOLDER = "tests.multiprocess.programs.launcher_of_one_folder"
ROOT = Path(__file__).resolve().parents[2]
RECOVERY_PROGRAM = Path(__file__).with_name("programs") / "recovery.py"
IN_VERSION = r"^in version {} rank (\d+) of {} pid (\d+) step (\d+) uid (\d+)"

# Under nohup what pytest starts would ignore a hangup, too; a handler isn't handed on. Without preexec_fn, which would
# do it as well, Python needn't copy the page tables of a process that has imported all tests: 40 ms for each program.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)


class Program:
    """A process whose output arrives line by line, and all processes that come from it."""

    def __init__(self, module, arguments, folder, environment=None, within=(), **popen):
        """`within`: words before the command, which run it elsewhere."""
        self.mark = uuid.uuid4().hex
        runtime = Path(folder) / "run"
        runtime.mkdir(mode=0o700, exist_ok=True)
        self.runtime_dir = runtime
        self._shared_memory = set(os.listdir("/dev/shm"))
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("KUNGFU_") and k != "OMP_NUM_THREADS"}
        self.environment = {**inherited, "XDG_RUNTIME_DIR": str(runtime), _MARK: self.mark, **(environment or {})}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **popen}
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", module, *map(str, arguments)],
            cwd=folder,
            env=self.environment,
            start_new_session=True,  # a signal to its group must not reach pytest
            **streams,
        )
        self.lines: list[str] = []  # of both streams, in the order of arrival
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._news = threading.Condition()
        self._readers = []
        for stream, kept in ((self.process.stdout, self.stdout), (self.process.stderr, self.stderr)):
            if stream is not None:
                self._readers.append(threading.Thread(target=self._read, args=(stream, kept), daemon=True))
                self._readers[-1].start()

    def _read(self, stream, kept):
        for raw in stream:
            line = raw.decode(errors="replace").rstrip("\n")
            with self._news:
                kept.append(line)
                self.lines.append(line)
                self._news.notify_all()
        stream.close()

    @property
    def output(self):
        return "\n".join(self.lines)

    def wait_for(self, pattern, count=1, timeout=60.0):
        """The matches of `pattern` in the lines so far, as soon as there are `count`."""
        regex = re.compile(pattern)

        def found():
            return [match for match in map(regex.search, self.lines) if match]

        with self._news:
            if not self._news.wait_for(lambda: len(found()) >= count, timeout):
                raise AssertionError(f"no {count} lines like {pattern!r} within {timeout} s:\n{self.output}")
            return found()

    def wait(self, timeout=60.0):
        """The exit code; every line has been read then."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.output}") from None
        for reader in self._readers:
            reader.join(5)
        return code

    def assert_exit(self, code, timeout=60.0):
        found = self.wait(timeout)
        assert found == code, f"exit code {found} instead of {code}:\n{self.output}"

    def signal(self, number):
        self.process.send_signal(number)

    def processes(self):
        """Process IDs of whatever carries our mark in its environment and is no zombie."""
        found = set()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    if f"{_MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                        found.add(int(entry.name))
        return found

    def assert_gone(self, since, within=GONE_WITHIN_S):
        """No process, abstract socket, /dev/shm entry, secret nor status socket is left, `within` s after `since`."""
        while self.processes() and time.monotonic() - since < within:
            time.sleep(0.01)
        left = self.processes()
        described = [f"{pid}: {_command_of(pid)}" for pid in left]
        assert not left, f"left after {within} s: {described}\n{self.output}"
        for address in re.findall(r"broker=(\S+)", self.output):
            assert f"@{address}" not in Path("/proc/net/unix").read_text()
        # Others on this machine may use /dev/shm as well, so only what is new and would bear our name counts.
        new = set(os.listdir("/dev/shm")) - self._shared_memory
        assert [name for name in new if "kungfu" in name or name.startswith("kf")] == []
        # The guard removes it when it has killed the last process, so nothing needs waiting for here.
        assert [str(p) for p in self.runtime_dir.rglob("*.secret")] == []
        assert [str(p) for p in self.runtime_dir.rglob(f"{self.process.pid}.*.status")] == []

    def kill_all(self):
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()


def _command_of(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return "?"


class Terminal:
    """A pseudo-terminal in which a program runs, and its rows. `start` starts the program."""

    def __init__(self, start, *words, **more):
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 160, 0, 0))
        self.program = start(*words, stdout=theirs, stderr=theirs, **more)
        os.close(theirs)
        self._emulator, self.received = pyte.Screen(160, 30), b""
        self._stream, self._ours = pyte.ByteStream(self._emulator), ours

    def read(self):
        """False at the end."""
        try:
            data = os.read(self._ours, 1 << 16)
        except OSError:  # EIO is how a terminal says that it is closed
            os.close(self._ours)
            return False
        self.received += data
        self._stream.feed(data)
        return True

    def rows(self):
        return "\n".join(row.rstrip() for row in self._emulator.display).rstrip().split("\n")


class Job:
    """Of workers that run `RECOVERY_PROGRAM`."""

    def __init__(self, program, start_module):
        self.program = program
        self.wait_for = program.wait_for
        self._start_module = start_module

    def in_version(self, version, size):
        """The processes of a version, rank -> process ID, once all of them are in it. Size of the segment."""
        found = self.wait_for(IN_VERSION.format(version, size), size, timeout=60)
        return {int(match[1]): int(match[2]) for match in found}

    def command(self, *words):
        url = self.wait_for(r"config server: url=(http://\S+/config)")[0][1]
        environment = {"XDG_RUNTIME_DIR": str(self.program.runtime_dir)}
        command = self._start_module("ms_kungfu.launcher", *words, "-config-server", url, environment=environment)
        return command.wait(), command.output

    def finish(self, size, code=0):
        """All that are left end at the same step with the same weights."""
        self.program.signal(signal.SIGUSR1)
        self.program.assert_exit(code)
        self.program.assert_gone(time.monotonic(), GONE_WITHIN_S)
        ends = self.wait_for(r"^finished pid (\d+) step (\d+) weights (\w+)", size)
        assert len(ends) == size
        assert len({match[2] for match in ends}) == len({match[3] for match in ends}) == 1
        assert "Traceback" not in self.program.output
        return {int(match[1]) for match in ends}
