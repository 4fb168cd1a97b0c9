"""The workers' output, written to the launcher's stdout and stderr line by line, and to log files for each worker.

On a terminal, every line gets a coloured prefix with the worker's name. Elsewhere (a pipe, a file), lines pass
unchanged, so that programs can read what workers print. Log files hold exactly what the worker wrote:
``LOGDIR/HOST.PORT.stdout.log`` and ``LOGDIR/HOST.PORT.stderr.log``, new for each job. A worker that comes back under
the same peer ID within a job appends to its log. If a log file can't be made or written (a full disk), the launcher
logs that once and the job continues without the file.

One thread reads and writes. If the terminal stops accepting output, the thread waits. The pipes then fill and the
workers wait, as if they wrote to the terminal directly. The launcher still supervises.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import os
import select
import selectors
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from ms_kungfu._files import open_regular
from ms_kungfu.launcher.state.log_files import log_paths

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_MAX_LINE_BYTES = 64 * 1024
_PARTIAL_LINE_S = 0.3  # how long the beginning of a line, such as a prompt, is held back before it is shown
_MAX_HELD_BYTES = 1024 * 1024
_PIPE_BYTES = 1024 * 1024  # so that a burst of output doesn't stop a worker


class LineSplitter:
    """Cut a stream into lines.

    A carriage return ends a line as well, since progress bars write only carriage returns.
    """

    def __init__(self) -> None:
        self._rest = b""

    @property
    def pending(self) -> bool:
        return bool(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, each with its line end. A line that is too long is cut."""
        lines = (self._rest + data).splitlines(keepends=True)
        # A final \r may be the first half of \r\n.
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if len(self._rest) >= _MAX_LINE_BYTES:
            lines.append(self.flush())
        return lines

    def flush(self) -> bytes:
        """Return the beginning of a line that hasn't ended."""
        rest, self._rest = self._rest, b""
        return rest


class Screen:
    """One output stream of the launcher, shared by many writers. Used from one thread.

    A writer that left a line open continues that line. If another writer writes in between, the line is ended first.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._open: object = None
        self.is_terminal = os.isatty(fd)
        self.broken = False

    def write(self, writer: object, prefix: bytes, lines: list[bytes]) -> None:
        out = bytearray()
        for line in lines:
            if self._open is not writer:
                out += (b"\n" if self._open is not None else b"") + prefix
            ended = line.endswith((b"\n", b"\r"))
            if ended and self.is_terminal:
                text = line.rstrip(b"\r\n")
                out += text + b"\033[K" + line[len(text) :]  # erases the end of a longer progress bar
            else:
                out += line
            self._open = None if ended else writer
        self._write_all(bytes(out))

    def write_if_it_is_read(self, text: str) -> None:
        """Write from another thread, while the thread that uses this stream waits for the reader of another stream."""
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [self._fd], [], 0)[1]:
                os.write(self._fd, text.encode("utf-8", "backslashreplace") + b"\n")

    def _write_all(self, data: bytes) -> None:
        while data and not self.broken:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process that shares the terminal has made it non-blocking
                select.select([], [self._fd], [], 1.0)
            except OSError:
                self.broken = True  # `kungfu-run ... | head`: training continues, into the log files


@dataclass(eq=False)  # each instance equals only itself, whatever its fields
class _Stream:
    """The reading end of one pipe of one worker."""

    name: str
    fd: int
    screen: Screen | None
    prefix: bytes
    log: int | None
    log_path: Path | None = None
    held: list[bytes] | None = None  # output that isn't shown yet
    splitter: LineSplitter = field(default_factory=LineSplitter)
    last_read: float = 0.0


class Output:
    """Owner of the reading thread. Only one other thread calls `attach`, `say` and `close`.

    `quiet` keeps the workers' output off the launcher's own streams, but not out of the log files.
    """

    def __init__(self, logdir: Path | None = None, quiet: bool = False, stdout: int = 1, stderr: int = 2) -> None:
        if logdir is not None:
            logdir.mkdir(parents=True, exist_ok=True)
        self._logdir = logdir
        self._quiet = quiet
        self._screens = (Screen(stdout), Screen(stderr))
        self._logs_begun: set[Path] = set()
        self._logs_given_up: set[Path] = set()
        self._streams: set[_Stream] = set()  # used by the thread only, like the selector
        self._selector = selectors.DefaultSelector()
        self._todo: collections.deque[Callable[[], None]] = collections.deque()  # tasks for the thread
        self._closing = False
        self._last_words: str | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kungfu-output", daemon=True)
        self._thread.start()

    def attach(self, name: str, colour: int, held: bool = False) -> tuple[int, int]:
        """Return pipes for a worker's stdout and stderr: the writing ends, which the caller passes on and closes."""
        paths = log_paths(self._logdir, name)
        ends: list[int] = []
        for i, what in enumerate(("stdout", "stderr")):
            try:
                reading, writing = os.pipe2(os.O_CLOEXEC)
            except OSError:
                for writing in ends:  # closing them ends the stream that was begun
                    os.close(writing)
                raise
            os.set_blocking(reading, False)
            with contextlib.suppress(OSError):  # the limit /proc/sys/fs/pipe-user-pages-soft may be exceeded
                fcntl.fcntl(writing, 1031, _PIPE_BYTES)  # F_SETPIPE_SZ; the name is new in Python 3.10
            screen = self._screens[i]
            prefix = b""
            if screen.is_terminal:
                prefix = f"\033[{_COLOURS[colour % len(_COLOURS)]}m[{name}::{what}]\033[0m ".encode()
            path = paths[i] if paths else None
            log = self._open_log(path) if path is not None else None
            stream = _Stream(name, reading, None if self._quiet else screen, prefix, log, path, [] if held else None)
            self._do(functools.partial(self._begin, stream))
            ends.append(writing)
        return ends[0], ends[1]

    def release(self, name: str) -> None:
        """Show what the worker `name` has printed so far (at most the last MiB), and all its later output."""
        self._do(functools.partial(self._show_held, name))

    def say(self, text: str) -> None:
        """Print a line of the launcher on stderr, in order with the workers' output."""
        self._do(functools.partial(self._print, text))

    def close(self, timeout_s: float | None, last_words: str | None = None) -> None:
        """Wait until the workers' pipes are closed and everything is written, at most `timeout_s`; None is no limit.

        `last_words` follow the workers' last output. If the reader is too slow, `last_words` replace the remaining
        output.
        """
        self._do(functools.partial(self._close, last_words))
        self._thread.join(timeout_s)
        if last_words is not None and self._thread.is_alive():
            self._last_words = None
            self._screens[1].write_if_it_is_read(last_words)

    def _open_log(self, path: Path) -> int | None:
        begun = path in self._logs_begun
        self._logs_begun.add(path)
        if path in self._logs_given_up:
            return None
        try:
            return open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | (0 if begun else os.O_TRUNC))
        except OSError as error:
            self._give_up(path, error)
            return None

    def _give_up(self, path: Path, error: OSError) -> None:
        self._logs_given_up.add(path)
        self.say(f"kungfu-run: log file {path} can't be written; the job continues without it: {error.strerror}")

    def _do(self, action: Callable[[], None]) -> None:
        """Run `action` in the thread."""
        self._todo.append(action)
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    # ---- the thread ----

    def _run(self) -> None:
        with self._selector:
            self._selector.register(self._wake_in, selectors.EVENT_READ)
            while True:
                while self._todo:
                    self._todo.popleft()()
                if self._closing and not self._streams:
                    if self._last_words is not None:
                        self._print(self._last_words)
                    return
                waiting = any(stream.splitter.pending for stream in self._streams)
                for key, _ in self._selector.select(_PARTIAL_LINE_S if waiting else None):
                    if key.data is None:
                        self._wake_in.recv(4096)
                    elif not self._read(key.data):
                        self._selector.unregister(key.data.fd)
                        os.close(key.data.fd)
                        self._streams.discard(key.data)
                now = time.monotonic()
                for stream in self._streams:
                    if stream.splitter.pending and now - stream.last_read >= _PARTIAL_LINE_S:
                        self._show(stream, [stream.splitter.flush()])

    def _close(self, last_words: str | None) -> None:
        self._closing, self._last_words = True, last_words

    def _begin(self, stream: _Stream) -> None:
        self._selector.register(stream.fd, selectors.EVENT_READ, stream)
        self._streams.add(stream)

    def _show_held(self, name: str) -> None:
        for stream in self._streams:
            if stream.name == name and stream.held is not None:
                lines, stream.held = stream.held, None
                self._show(stream, lines)

    def _print(self, text: str) -> None:
        self._screens[1].write(self, b"", [text.encode("utf-8", "backslashreplace") + b"\n"])

    def _read(self, stream: _Stream) -> bool:
        """Read once. Return False at the end of the stream."""
        try:
            data = os.read(stream.fd, 256 * 1024)
        except BlockingIOError:
            return True
        stream.last_read = time.monotonic()
        if data:
            if stream.log is not None:
                self._write_log(stream, data)
            self._show(stream, stream.splitter.feed(data))
            return True
        self._show(stream, [stream.splitter.flush()])
        if stream.log is not None:
            os.close(stream.log)
        return False

    def _show(self, stream: _Stream, lines: list[bytes]) -> None:
        lines = [line for line in lines if line]
        if stream.held is not None:
            stream.held += lines
            while sum(map(len, stream.held)) > _MAX_HELD_BYTES:
                stream.held.pop(0)
        elif lines and stream.screen is not None:
            stream.screen.write(stream, stream.prefix, lines)

    def _write_log(self, stream: _Stream, data: bytes) -> None:
        assert stream.log is not None
        assert stream.log_path is not None
        try:
            while data:
                data = data[os.write(stream.log, data) :]
        except OSError as error:
            os.close(stream.log)
            stream.log = None
            self._give_up(stream.log_path, error)
