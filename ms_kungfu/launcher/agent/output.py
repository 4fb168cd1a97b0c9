"""Write the workers' output to the launcher's stdout and stderr, line by line, and to log files for each worker.

Each line gets a prefix (`state/prefix.py`). If there is no prefix, lines pass unchanged, so that programs can read what
workers print. The log files ``LOGDIR/HOST.PORT.stdout.log`` and ``LOGDIR/HOST.PORT.stderr.log`` contain exactly what
the worker wrote, unless the user wants the prefix in them, too. Each job begins new log files. A worker that comes back
under the same peer ID within a job appends to the existing files. If a log file can't be created or written, for
example because the disk is full, the launcher logs that once and the job continues without the file.

The rank in the prefix is the rank that the worker got with its last slot. The agent calls `place` with this rank before
it sends the slot, and `place` records how much the worker has written so far. So the new rank applies exactly to the
output that follows, even if the thread reads that output late.
(`test_prefix_changes_with_the_rank_from_the_next_line_on`.)

One thread opens the log files, reads and writes. If the terminal or the disk stops accepting output, this thread waits.
The pipes then fill, and the workers wait as if they wrote to the terminal or disk directly. The launcher's other
threads still supervise the workers. (`test_log_folder_that_hangs_blocks_no_caller`.)
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

from msgspec import Struct

from ms_kungfu._files import open_regular
from ms_kungfu.launcher.agent.screen import Screen
from ms_kungfu.launcher.state.last_lines import LastLines
from ms_kungfu.launcher.state.log_files import log_paths
from ms_kungfu.launcher.state.prefix import Prefix

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_MAX_LINE_BYTES = 64 * 1024
_PARTIAL_LINE_S = 0.3  # an unfinished line, such as a prompt, is shown after this time
_MAX_HELD_BYTES = 1024 * 1024
_PIPE_BYTES = 1024 * 1024  # large, so that a worker can print a lot at once without waiting
_MOST_REMEMBERED = 1024  # above this number of workers, the last lines of exited workers are dropped


class LineSplitter:
    """Split a stream into lines.

    A carriage return also ends a line, because progress bars end their lines only with carriage returns.
    """

    def __init__(self) -> None:
        self._rest = b""

    @property
    def pending(self) -> bool:
        return bool(self._rest)

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that are complete now, with their line ends. A line that is too long is split."""
        lines = (self._rest + data).splitlines(keepends=True)
        # A final \r may be the first half of \r\n.
        self._rest = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        if len(self._rest) >= _MAX_LINE_BYTES:
            lines.append(self.flush())
        return lines

    def flush(self) -> bytes:
        """Return the text of the last line, which isn't complete, and drop it from the splitter."""
        rest, self._rest = self._rest, b""
        return rest


class _Rank(Struct):
    """The rank of a worker.

    `now`: the present rank; None if the worker isn't in the cluster. `last`: the last rank of a worker that has left.
    """

    now: int | None
    last: int | None = None

    def set(self, rank: int | None) -> None:
        self.last = self.now if rank is None else None
        self.now = rank


@dataclass(eq=False)  # so that each instance equals only itself
class _Worker:
    """A worker's streams and last lines.

    `colour`: the worker's rank at its start (0 if it had none), which selects the colour of its prefix.
    """

    colour: int
    rank: _Rank
    streams: list[_Stream] = field(default_factory=list)
    last: LastLines = field(default_factory=LastLines)

    @property
    def is_over(self) -> bool:
        """Return whether both streams of the worker have ended."""
        return all(stream.is_over for stream in self.streams)


@dataclass(eq=False)
class _Stream:
    """The reading end of a pipe to which a worker writes its stdout or stderr."""

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
    log_is_open: bool = False  # whether the last line in the log is incomplete
    rank: _Rank = field(init=False)  # the rank to which the lines that are read now belong
    lock: threading.Lock = field(default_factory=threading.Lock)  # guards the next three attributes
    is_over: bool = False
    total: int = 0  # bytes read
    later: collections.deque[tuple[int, int | None]] = field(default_factory=collections.deque)
    """Positions in the stream at which the worker's rank changes, each with the new rank."""

    def __post_init__(self) -> None:
        self.rank = _Rank(self.worker.rank.now)

    def place(self, rank: int | None) -> None:
        """Record that everything that the worker writes from now on belongs to another rank. Thread-safe."""
        unread = array.array("i", [0])
        with self.lock:
            if not self.is_over:
                fcntl.ioctl(self.fd, termios.FIONREAD, unread)
                self.later.append((self.total + unread[0], rank))

    def read(self) -> tuple[bytes, int]:
        """Return the bytes that have arrived and their position in the stream. At the end of the stream return b"".

        Raises:
            BlockingIOError: no bytes have arrived.
        """
        with self.lock:
            data = os.read(self.fd, 256 * 1024)
            self.total += len(data)
            self.is_over = not data
            return data, self.total - len(data)


class Output:
    """The workers' output and the thread that reads it. All methods except `cut` are called from one other thread.

    Args:
        logdir: the folder of the log files; None for no log files.
        quiet: whether the workers' output goes only into the log files, and not to the launcher's own streams.
        stdout: the descriptor of the launcher's stdout.
        stderr: the descriptor of the launcher's stderr.
        prefix: what precedes each line. None selects the default: the rank, if the output goes to a terminal and
            `several` is true.
        several: whether the job has several workers.
        host: this host's name.
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
        self._workers: dict[int, _Worker] = {}  # key -> worker; this includes exited workers
        self._streams: set[_Stream] = set()  # only the reading thread uses this set and the selector
        self._selector = selectors.DefaultSelector()
        self._todo: collections.deque[Callable[[], None]] = collections.deque()  # tasks for the reading thread
        self._closing = False
        self._last_words: str | None = None
        self._block: Callable[[], str] | None = None
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_out.setblocking(False)
        self._is_written = False
        self._is_over = threading.Event()  # set when everything is written, or when `close` mustn't wait longer
        self._thread = threading.Thread(target=self._run, name="kungfu-output", daemon=True)
        self._thread.start()

    @property
    def is_terminal(self) -> bool:
        """Return whether the launcher's lines and the workers' output go to a terminal."""
        return all(screen.is_terminal for screen in self._screens)

    def attach(self, key: int, name: str, rank: int | None, held: bool = False) -> tuple[int, int]:
        """Create pipes for a worker's stdout and stderr. Return their writing ends, which the caller must close.

        Args:
            key: the worker's key in this job.
            name: the name of the worker's log files.
            rank: the worker's rank, which also selects the colour of its prefix; None if the worker has no rank yet.
            held: whether the output isn't shown until `release` is called.
        """
        paths = log_paths(self._logdir, name)
        worker = _Worker(rank or 0, _Rank(rank))
        ends: list[int] = []
        for i, what in enumerate(("stdout", "stderr")):
            try:
                reading, writing = os.pipe2(os.O_CLOEXEC)
            except OSError:
                for writing in ends:  # this ends the stream whose pipe was created
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
        """Show the worker's output, including what the worker has printed so far (at most the last MiB)."""
        self._do(functools.partial(self._show_held, key))

    def place(self, key: int, rank: int | None) -> None:
        """Set the rank that the prefix of a worker's later lines shows; None if the worker has left the cluster."""
        worker = self._workers.get(key)
        if worker is not None and worker.rank.now != rank:
            worker.rank.set(rank)
            for stream in worker.streams:
                stream.place(rank)

    def name_of(self, key: int) -> str:
        """Return the name of a worker for messages, e.g. "rank 3"."""
        rank = self._workers[key].rank if key in self._workers else _Rank(None)
        if rank.now is None:
            return "a worker" if rank.last is None else f"a worker that was rank {rank.last}"
        return f"rank {rank.now}"

    def last_of(self, key: int) -> LastLines:
        """Return the last lines of a worker. May be called only by the function `block` that is passed to `close`."""
        return self._workers[key].last if key in self._workers else LastLines()

    def say(self, text: str) -> None:
        """Print a line of the launcher on stderr, after the workers' output that has been read so far."""
        self._do(functools.partial(self._print, text))

    def show_status(self, parts: Sequence[str]) -> None:
        """Show the status line below the output, if stderr is a terminal."""
        if self._screens[1].is_terminal:
            self._do(functools.partial(self._screens[1].set_status, parts))

    def close(
        self, timeout_s: float | None, last_words: str | None = None, block: Callable[[], str] | None = None
    ) -> None:
        """Wait until the workers' pipes are closed and everything is written.

        Args:
            timeout_s: the longest time to wait; None for no limit. After this time, `last_words` are written and the
                remaining output is dropped.
            last_words: the launcher's last line, which follows all output.
            block: called after the workers' last output. It returns a text that is written before `last_words`.
        """
        self._do(functools.partial(self._close, last_words, block))
        self._is_over.wait(timeout_s)
        if last_words is not None and not self._is_written:
            self._last_words = None
            self._screens[1].write_if_it_is_read(last_words)

    def cut(self) -> None:
        """Make `close` stop waiting and return. Thread-safe."""
        self._is_over.set()

    def _do(self, action: Callable[[], None]) -> None:
        """Run `action` in the reading thread."""
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
                while stream.later:  # show earlier output with the rank that the worker has now
                    stream.rank.set(stream.later.popleft()[1])
                self._show(stream, lines)

    def _print(self, text: str) -> None:
        self._screens[1].write(self, b"", [text.encode("utf-8", "backslashreplace") + b"\n"])

    def _read(self, stream: _Stream) -> bool:
        """Read what has arrived. Return False at the end of the stream."""
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
        """Write lines to the log file and the screen. The last line may be incomplete."""
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
