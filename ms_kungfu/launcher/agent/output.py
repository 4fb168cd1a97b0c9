"""The workers' output, written to the launcher's stdout and stderr line by line, and to log files for each worker.

Each line gets a prefix (`state/prefix.py`). Without one, lines pass unchanged, so that programs can read what workers
print. Log files hold exactly what the worker wrote, unless the user wants the prefix there, too:
``LOGDIR/HOST.PORT.stdout.log`` and ``LOGDIR/HOST.PORT.stderr.log``, new for each job. A worker that comes back under
the same peer ID within a job appends to its log. If a log file can't be made or written (a full disk), the launcher
logs that once and the job continues without the file.

The rank in the prefix is the one that the worker got with its last slot. The agent passes it on before it sends the
slot, and `place` notes how much the worker has written until then. So exactly the bytes from then on have the new rank,
however late the thread reads them. (`test_prefix_changes_with_the_rank_from_the_next_line_on`.)

One thread opens the log files, reads and writes. If the terminal or the disk stops accepting output, the thread waits.
The pipes then fill and the workers wait, as if they wrote to it directly. The launcher still supervises.
(`test_log_folder_that_hangs_blocks_no_caller`.)
"""

from __future__ import annotations

import array
import collections
import contextlib
import errno
import fcntl
import functools
import os
import selectors
import socket
import termios
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable

from ms_kungfu._files import open_regular
from ms_kungfu.launcher.agent.screen import Screen
from ms_kungfu.launcher.state.last_lines import LastLines
from ms_kungfu.launcher.state.log_files import log_paths
from ms_kungfu.launcher.state.prefix import Prefix

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_MAX_LINE_BYTES = 64 * 1024
_PARTIAL_LINE_S = 0.3  # how long the beginning of a line, such as a prompt, is held back before it is shown
_MAX_HELD_BYTES = 1024 * 1024
_PIPE_BYTES = 1024 * 1024  # so that a burst of output doesn't stop a worker
_MOST_REMEMBERED = 1024  # workers whose last lines are kept, beyond those that run


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


@dataclass
class _Rank:
    """`now`: None after the worker has left the cluster; `last`: then the last one it had."""

    now: int | None
    last: int | None = None

    def set(self, rank: int | None) -> None:
        self.last = self.now if rank is None else None
        self.now = rank


@dataclass(eq=False)  # each instance equals only itself, whatever its fields
class _Worker:
    """A worker. `colour`: the rank that it started with."""

    colour: int
    rank: _Rank
    streams: list[_Stream] = field(default_factory=list)
    last: LastLines = field(default_factory=LastLines)

    @property
    def is_over(self) -> bool:
        """Return whether nothing more comes from the worker."""
        return all(stream.is_over for stream in self.streams)


@dataclass(eq=False)
class _Stream:
    """The reading end of one pipe of one worker."""

    key: int
    name: str
    fd: int
    screen: Screen | None
    worker: _Worker
    log_path: Path | None = None
    held: list[bytes] | None = None  # output that isn't shown yet
    splitter: LineSplitter = field(default_factory=LineSplitter)
    last_read: float = 0.0
    log: int | None = None
    log_is_open: bool = False  # whether the last line in the log hasn't ended
    rank: _Rank = field(init=False)  # of the lines that are read now
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards the next three attributes
    is_over: bool = False
    total: int = 0  # bytes read
    later: collections.deque[tuple[int, int | None]] = field(default_factory=collections.deque)
    """Positions in the stream from which the lines have another rank."""

    def __post_init__(self) -> None:
        self.rank = _Rank(self.worker.rank.now)

    def place(self, rank: int | None) -> None:
        """Give what the worker writes from now on another rank. For any thread."""
        unread = array.array("i", [0])
        with self.lock:
            if not self.is_over:
                fcntl.ioctl(self.fd, termios.FIONREAD, unread)
                self.later.append((self.total + unread[0], rank))

    def read(self) -> tuple[bytes, int]:
        """Return what has arrived and its position, or b"" at the end. Raises BlockingIOError."""
        with self.lock:
            data = os.read(self.fd, 256 * 1024)
            self.total += len(data)
            self.is_over = not data
            return data, self.total - len(data)


class Output:
    """Owner of the reading thread. Only one other thread calls the methods.

    `quiet` keeps the workers' output off the launcher's own streams, but not out of the log files. `prefix`: before
    each line; None: the rank on a terminal, if the job has several workers (`several`). `host`: this host's name.
    """

    def __init__(
        self, logdir: Path | None = None, quiet: bool = False, stdout: int = 1, stderr: int = 2,
        prefix: Prefix | None = None, several: bool = True, host: str = "",
    ) -> None:  # fmt: skip
        if logdir is not None:
            logdir.mkdir(parents=True, exist_ok=True)
        self._logdir = logdir
        self.shows_workers = not quiet
        self._prefix, self._several, self._host = prefix, several, host
        self._screens = Screen(stdout), Screen(stderr)
        if self._screens[0].shares_terminal_with(self._screens[1]):
            self._screens = self._screens[1], self._screens[1]
        self._logs_begun: set[Path] = set()
        self._logs_given_up: set[Path] = set()
        self._workers: dict[int, _Worker] = {}  # of each key; of exited ones, too
        self._streams: set[_Stream] = set()  # used by the thread only, like the selector
        self._selector = selectors.DefaultSelector()
        self._todo: collections.deque[Callable[[], None]] = collections.deque()  # tasks for the thread
        self._closing = False
        self._last_words: str | None = None
        self._block: Callable[[], str] | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._is_written = False
        self._is_over = threading.Event()  # everything is written, or `close` needn't wait for it
        self._thread = threading.Thread(target=self._run, name="kungfu-output", daemon=True)
        self._thread.start()

    @property
    def is_terminal(self) -> bool:
        """Return whether the launcher's lines and the workers' output go to a terminal."""
        return all(screen.is_terminal for screen in self._screens)

    def attach(self, key: int, name: str, rank: int | None, held: bool = False) -> tuple[int, int]:
        """Return pipes for a worker's stdout and stderr: the writing ends, which the caller passes on and closes.

        `key`: the worker's key in this job; `name`: that of its log files; `rank`: selects the colour as well.
        """
        paths = log_paths(self._logdir, name)
        worker = _Worker(rank or 0, _Rank(rank))
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
            path = paths[i] if paths else None
            screen = self._screens[i] if self.shows_workers else None
            stream = _Stream(key, what, reading, screen, worker, path, [] if held else None)
            worker.streams.append(stream)
            self._do(functools.partial(self._begin, stream))
            ends.append(writing)
        for old in [key for key, each in self._workers.items() if each.is_over]:
            if len(self._workers) < _MOST_REMEMBERED:
                break
            del self._workers[old]
        self._workers[key] = worker
        return ends[0], ends[1]

    def release(self, key: int) -> None:
        """Show what a worker has printed so far (at most the last MiB), and all its later output."""
        self._do(functools.partial(self._show_held, key))

    def place(self, key: int, rank: int | None) -> None:
        """Set a worker's rank, of which its later lines have the prefix; None: it has left the cluster."""
        worker = self._workers.get(key)
        if worker is not None and worker.rank.now != rank:
            worker.rank.set(rank)
            for stream in worker.streams:
                stream.place(rank)

    def name_of(self, key: int) -> str:
        """Return what a worker is called in a message."""
        rank = self._workers[key].rank if key in self._workers else _Rank(None)
        if rank.now is None:
            return "a worker" if rank.last is None else f"a worker that was rank {rank.last}"
        return f"rank {rank.now}"

    def last_of(self, key: int) -> LastLines:
        """Return the last lines of a worker. Call it in a `block` of `close`."""
        return self._workers[key].last if key in self._workers else LastLines()

    def say(self, text: str) -> None:
        """Print a line of the launcher on stderr, in order with the workers' output."""
        self._do(functools.partial(self._print, text))

    def show_status(self, parts: Sequence[str]) -> None:
        """Show the status line on stderr, below the output, if that is a terminal."""
        if self._screens[1].is_terminal:
            self._do(functools.partial(self._screens[1].set_status, parts))

    def close(
        self, timeout_s: float | None, last_words: str | None = None, block: Callable[[], str] | None = None
    ) -> None:
        """Wait until the workers' pipes are closed and everything is written, at most `timeout_s`; None is no limit.

        `last_words` follow the workers' last output, and the text that `block` returns then. If the reader is too
        slow, `last_words` replace the remaining output.
        """
        self._do(functools.partial(self._close, last_words, block))
        self._is_over.wait(timeout_s)
        if last_words is not None and not self._is_written:
            self._last_words = None
            self._screens[1].write_if_it_is_read(last_words)

    def cut(self) -> None:
        """End the wait of `close`. For any thread."""
        self._is_over.set()

    def _do(self, action: Callable[[], None]) -> None:
        """Run `action` in the thread."""
        self._todo.append(action)
        with contextlib.suppress(OSError):
            self._wake_out.send(b"x")

    # ---- the thread ----

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._is_written = True
            self._is_over.set()

    def _serve(self) -> None:
        with self._selector:
            self._selector.register(self._wake_in, selectors.EVENT_READ)
            while True:
                while self._todo:
                    self._todo.popleft()()
                if self._closing and not self._streams:
                    if self._block is not None:
                        self._print(self._block())
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
                        for screen in self._screens:
                            screen.forget(key.data)
                now = time.monotonic()
                for stream in self._streams:
                    if stream.splitter.pending and now - stream.last_read >= _PARTIAL_LINE_S:
                        self._pass_on(stream, [stream.splitter.flush()])

    def _close(self, last_words: str | None, block: Callable[[], str] | None) -> None:
        self._closing, self._last_words, self._block = True, last_words, block
        self._screens[1].set_status(())

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

    def _begin(self, stream: _Stream) -> None:
        if stream.log_path is not None:
            stream.log = self._open_log(stream.log_path)
        self._selector.register(stream.fd, selectors.EVENT_READ, stream)
        self._streams.add(stream)

    def _show_held(self, key: int) -> None:
        for stream in self._streams:
            if stream.key == key and stream.held is not None:
                lines, stream.held = stream.held, None
                while stream.later:  # what it printed before it had a rank is shown with that rank
                    stream.rank.set(stream.later.popleft()[1])
                self._show(stream, lines)

    def _print(self, text: str) -> None:
        self._screens[1].write(self, b"", [text.encode("utf-8", "backslashreplace") + b"\n"])

    def _read(self, stream: _Stream) -> bool:
        """Read once. Return False at the end of the stream."""
        try:
            data, begin = stream.read()
        except BlockingIOError:
            return True
        stream.last_read = time.monotonic()
        if data:
            if stream.log is not None and not self._has_prefix_in_log:
                self._write_log(stream, data)
            while stream.later and stream.later[0][0] < begin + len(data):
                until, rank = stream.later.popleft()
                self._pass_on(stream, [*stream.splitter.feed(data[: until - begin]), stream.splitter.flush()])
                data, begin = data[until - begin :], until
                stream.rank.set(rank)
            self._pass_on(stream, stream.splitter.feed(data))
            return True
        self._pass_on(stream, [stream.splitter.flush()])
        if stream.log is not None:
            os.close(stream.log)
            stream.log = None
        return False

    @property
    def _has_prefix_in_log(self) -> bool:
        return self._prefix is not None and self._prefix.files

    def _pass_on(self, stream: _Stream, lines: list[bytes]) -> None:
        """Pass on lines, of which the last one may not have ended yet."""
        lines = [line for line in lines if line]
        stream.worker.last.add(stream.name, lines)
        if stream.log is not None and self._has_prefix_in_log:
            prefix = self._prefix_of(stream, self._prefix, None)
            for line in lines:
                self._write_log(stream, line if stream.log_is_open else prefix + line)
                stream.log_is_open = not line.endswith((b"\n", b"\r"))
        self._show(stream, lines)

    def _show(self, stream: _Stream, lines: list[bytes]) -> None:
        if stream.held is not None:
            stream.held += lines
            while sum(map(len, stream.held)) > _MAX_HELD_BYTES:
                stream.held.pop(0)
        elif lines and stream.screen is not None:
            on_terminal = stream.screen.is_terminal
            prefix = Prefix(rank=self._several and on_terminal) if self._prefix is None else self._prefix
            colour = _COLOURS[stream.worker.colour % len(_COLOURS)] if on_terminal else None
            stream.screen.write(stream, self._prefix_of(stream, prefix, colour), lines)

    def _prefix_of(self, stream: _Stream, prefix: Prefix | None, colour: int | None) -> bytes:
        return b"" if prefix is None else prefix.before(self._host, stream.rank.now, stream.rank.last, colour)

    def _write_log(self, stream: _Stream, data: bytes) -> None:
        if stream.log is None or stream.log_path is None:
            return
        try:
            while data:
                data = data[os.write(stream.log, data) :]
            if not os.fstat(stream.log).st_nlink:
                raise FileNotFoundError(errno.ENOENT, "it was deleted")
        except OSError as error:
            os.close(stream.log)
            stream.log = None
            self._give_up(stream.log_path, error)
