"""Implement the command line of kungfu-run."""

from __future__ import annotations

import contextlib
import difflib
import errno
import logging
import os
import queue
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Callable

from ms_kungfu._files import open_regular
from ms_kungfu._flags import UsageError, failed
from ms_kungfu._processes import raise_descriptor_limit
from ms_kungfu._run_loop import run
from ms_kungfu.launcher import signals
from ms_kungfu.launcher.agent.output import Output
from ms_kungfu.launcher.agent.progress import has_line
from ms_kungfu.launcher.agent.supervisor import Supervisor, set_process_name
from ms_kungfu.launcher.control import RefusedError
from ms_kungfu.launcher.engine_flags import EngineRequest
from ms_kungfu.launcher.joining import ask
from ms_kungfu.launcher.options import PROGRAM, JoinRequest, Options, parse_command_line
from ms_kungfu.launcher.slurm import SpareTaskError
from ms_kungfu.launcher.state.progress import SHOWN_IN_LINE

_log = logging.getLogger(__name__)
_COMMANDS = ("resize", "evict", "status", "top", "explain", "report", "trace")
_SWITCH_INTERVAL_S = 5e-4
_LEAST_DESCRIPTORS = 32  # enough for the launcher and one worker
_LIKENESS = 0.8  # a word that is at least this similar to a command is probably a misspelled command
_NEVER = logging.CRITICAL + 1
_MAX_LOG_LINES = 10_000  # lines that may wait to be written to the file of -logfile
_LOG_CLOSE_S = 1.0  # time to write the last lines to that file


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns: The exit status. If a worker has failed, it is the status of the first worker that failed (128 + n if
    signal n killed it). It is 124 after -timeout, 128 + n if signal n interrupted the job, 2 for a wrong command line,
    and 1 if the job can't start. Otherwise, it is 0.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words and words[0] in _COMMANDS:
        return command(words[0])(words[1:])
    near = difflib.get_close_matches(words[0], _COMMANDS, 1, _LIKENESS) if words else []
    if near and shutil.which(words[0]) is None:
        return failed(PROGRAM, f"unknown command {words[0]}; did you mean {PROGRAM} {near[0]}?", 2)
    try:
        with _early_log():
            wanted = parse_command_line(words)
        if isinstance(wanted, EngineRequest):
            # Replace this process by the engine's program, which starts kungfu-run on each node.
            os.execv(sys.executable, [sys.executable, "-m", f"ms_kungfu.{wanted.engine}", *words])
        # A joining host asks for the job's program before it forks the supervisor, which has to know the program.
        return _run(ask(wanted) if isinstance(wanted, JoinRequest) else wanted)
    except UsageError as error:
        return failed(PROGRAM, error, 2)
    except RefusedError as error:
        return failed(PROGRAM, error, 1)
    except SpareTaskError:
        return 0
    except KeyboardInterrupt:  # raised before the job has installed its own handler
        return 128 + signal.SIGINT


def command(name: str) -> Callable[[list[str]], int]:
    """Return a command's function. The commands' modules are imported here, so that a job doesn't load them."""
    from ms_kungfu.launcher.commands import evict, resize
    from ms_kungfu.launcher.dashboard.report import report
    from ms_kungfu.launcher.explain_command import explain
    from ms_kungfu.launcher.status_command import status
    from ms_kungfu.launcher.top_command import top
    from ms_kungfu.launcher.trace_command import trace

    return dict(zip(_COMMANDS, (resize, evict, status, top, explain, report, trace)))[name]


def _run(options: Options) -> int:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit != resource.RLIM_INFINITY and limit < _LEAST_DESCRIPTORS:
        return failed(PROGRAM, f"{limit} open files (ulimit -n) are too few; the minimum is {_LEAST_DESCRIPTORS}", 1)
    # If standard output is closed, the next file that is opened must not become standard output.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if options.in_slurm:  # Slurm sends SIGUSR1 to all processes of the step, and by default SIGUSR1 kills the workers
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # Fork the supervisor before any thread exists, and before the imports below, so that the supervisor stays small.
    supervisor = Supervisor.fork(options.command)
    try:
        from ms_kungfu.launcher.agent.agent import Agent
        from ms_kungfu.launcher.controller.controller import Controller
        from ms_kungfu.launcher.state.start_error import StartError

        set_process_name(PROGRAM)
        raise_descriptor_limit()  # after the fork, so that the workers keep the user's limit
        # During a change of the cluster, each worker waits until the launcher has answered all workers. Python's
        # default switch interval of 5 ms would delay these answers.
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        _create_log_folder(options.logdir)
        output = Output(
            options.logdir, quiet=not options.show_workers, prefix=options.prefix,
            several=options.may_have_several_workers, host=options.host.name,
        )  # fmt: skip
        _set_up_log(options, output)
        if options.size == 1 and "-np" in options.command:
            _log.warning("misuse: check=flags flag=-np. The program gets this flag; put kungfu-run's flags before it")
        try:

            async def main() -> int:
                return await Agent(options, supervisor, output, Controller).run()

            return run(main())
        except StartError as error:
            return failed(PROGRAM, error, 1)
        finally:
            signals.ignore_from_now_on(options.in_slurm)
    except OSError as error:  # a log file that can't be created
        return failed(PROGRAM, f"-logfile {error.filename}: {error.strerror}" if error.filename else error, 1)
    finally:
        supervisor.close()


def _create_log_folder(folder: Path | None) -> None:
    """Create the folder of -logdir. Raise RefusedError if the folder can't be written."""
    try:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise RefusedError(f"-logdir {folder} can't be written: {error.strerror}; give another folder") from None


class _ToOutput(logging.Handler):
    """Write the launcher's log to stderr, in the right order relative to the workers' output."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        self._output.say(f"[{PROGRAM}] {self.format(record)}")


class _ToFile(logging.Handler):
    """Write the launcher's log to the file of -logfile, in a separate thread.

    A hung disk, a stopped terminal or a pipe with a slow reader blocks only that thread. `emit` never waits, and the
    queue of lines is bounded. If a write fails or the queue is full, the launcher reports the failure once, and the job
    continues without the file. (`test_logfile_on_a_stopped_terminal_blocks_no_signal`.)
    """

    def __init__(self, path: Path, output: Output) -> None:
        super().__init__()
        self._path, self._output = path, output
        self._fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, devices=True)
        self._lines: queue.Queue[bytes | None] = queue.Queue(_MAX_LOG_LINES)  # None: no line follows
        self._thread = threading.Thread(target=self._run, name="kungfu-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(self.format(record).encode("utf-8", "backslashreplace") + b"\n")
        except queue.Full:
            self._give_up("it accepts no data")

    def close(self) -> None:
        """Wait for up to `_LOG_CLOSE_S` seconds until the last lines are written. `logging` calls this at exit."""
        super().close()
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(None)
            self._thread.join(_LOG_CLOSE_S)

    def _run(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                while line:
                    line = line[os.write(self._fd, line) :]
        except OSError as error:
            self._give_up(error.strerror or str(error))

    def _give_up(self, error: str) -> None:
        if self.level != _NEVER:
            self.setLevel(_NEVER)
            self._output.say(f"{PROGRAM}: {self._path} can't be written; the job goes on without it: {error}")


def _formatter(prefix: str = "") -> logging.Formatter:
    return logging.Formatter(f"{prefix}%(asctime)s %(message)s", "%H:%M:%S")


@contextlib.contextmanager
def _early_log() -> Iterator[None]:
    """Log to stderr until the options are known."""
    log, screen = logging.getLogger("ms_kungfu"), logging.StreamHandler()
    screen.setFormatter(_formatter(f"[{PROGRAM}] "))
    log.addHandler(screen)
    try:
        yield
    finally:
        log.removeHandler(screen)


def _set_up_log(options: Options, output: Output) -> None:
    log = logging.getLogger("ms_kungfu")
    log.setLevel(logging.INFO)
    log.propagate = False
    screen = _ToOutput(output)
    screen.setFormatter(_formatter())
    # Always print errors, even with -q, because the user has to know why the job has ended.
    screen.setLevel(logging.ERROR if options.quiet or options.logfile else logging.INFO)
    if has_line(options, output):
        screen.addFilter(lambda record: record.levelno > logging.INFO or not record.msg.startswith(SHOWN_IN_LINE))
    log.addHandler(screen)
    if options.logfile is not None:
        options.logfile.parent.mkdir(parents=True, exist_ok=True)
        file = _ToFile(options.logfile, output)
        file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(file)
        log.info('job: workers=%d pid=%d command="%s"', options.size, os.getpid(), " ".join(options.command))
