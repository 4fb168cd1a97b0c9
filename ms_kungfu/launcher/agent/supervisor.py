"""Run the supervisor, a small process between launcher and workers. It ensures that no process outlives the launcher.

The supervisor is forked before the launcher has started a thread. The supervisor is the parent of all workers. It holds
one end of a socket pair, whose other end closes when the launcher ends or is killed. The supervisor then kills all its
descendants and exits. It is a separate process, and the parent of the workers, for these reasons:

- A killed launcher can't clean up. PR_SET_PDEATHSIG alone reaches only direct children. It doesn't reach the Python
  process that ``bash -c "python train.py"`` starts. PR_SET_PDEATHSIG also kills the children when the *thread* that
  forked them ends. The supervisor has only one thread, so this can't happen.
- The supervisor is a child subreaper. A descendant that loses its parent becomes a child of the supervisor, even if the
  descendant has left its process group by setsid. So if the supervisor kills its children until it has none, it has
  killed all its descendants.
- Only the supervisor reaps and signals workers. So a signal never goes to a process ID that now belongs to
  another process. The supervisor and the fork server, which fork workers, have one thread each, so no other thread can
  hold a lock at the fork.
- If the supervisor itself is killed, the kernel kills the workers (PR_SET_PDEATHSIG). The launcher is also a subreaper,
  and kills the workers' descendants. These survive only if launcher and supervisor are killed at the same instant.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Union

from ms_kungfu import env
from ms_kungfu._processes import children, descendants
from ms_kungfu._run_time import run_time
from ms_kungfu.broker_protocol import close_all, receive_fds
from ms_kungfu.launcher.agent.fork_server import ForkServer, Start
from ms_kungfu.launcher.state.hangs import waits_for_a_core
from ms_kungfu.launcher.state.policy import CANT_RUN
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.codec import Reads, encode

if TYPE_CHECKING:
    from ms_kungfu.launcher.preloading import Preloading

_log = logging.getLogger(__name__)
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_MAX_MESSAGE = 64 * 1024
_PATIENCE_S = 10.0
_POLL_S = 0.002
_EVENTS: Reads[m.Started | m.Exited] = Reads(Union[m.Started, m.Exited])
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGKILL)
_TRACKERS_S = 2.0
_GROUP_S = 0.5
_GRAPHS = "kungfu-graphs-"

_libc = ctypes.CDLL(None, use_errno=True)


class Supervisor:
    """The launcher's proxy for the supervisor process.

    It communicates with the supervisor through a socket. Only one thread may use it.
    """

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self._pid = pid
        self._channel = channel
        self._reaped = False

    @classmethod
    def fork(cls, command: Sequence[str]) -> Supervisor:
        """Fork the supervisor of workers that run `command`. This process must have only one thread."""
        preloading = None
        if env.PRELOAD.get() and os.path.basename(command[0]).startswith("python"):
            from ms_kungfu.launcher.preloading import preloading_of  # loads `ast`, which other programs don't need

            preloading = preloading_of(command, os.environ)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                ours.close()
                _SupervisorProcess(theirs, list(command), preloading).run()
                status = 0
            finally:
                os._exit(status)  # the supervisor must not return into the launcher's code or run its atexit handlers
        theirs.close()
        return cls(pid, ours)

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is an event or the supervisor has ended."""
        return self._channel.fileno()

    def start(
        self,
        key: int,
        environment: Mapping[str, str | None],
        cores: Iterable[int],
        stdout: int,
        stderr: int,
        *,
        has_device: bool,
    ) -> None:
        """Start a worker. An event (`next_event`) reports whether this has succeeded.

        Args:
            key: the worker's key.
            environment: changes to the launcher's environment. None removes a variable.
            cores: the cores on which the worker may run; an empty collection means all cores.
            stdout: the descriptor for the worker's stdout.
            stderr: the descriptor for the worker's stderr.
            has_device: whether the worker uses a GPU or an Ascend device.
        """
        message = {"start": key, "environment": dict(environment), "cores": sorted(cores), "has_device": has_device}
        with contextlib.suppress(OSError):  # the supervisor has ended; next_event reports that
            socket.send_fds(self._channel, [_encode(message)], [stdout, stderr])

    def signal(self, number: int, key: int | None = None) -> None:
        """Send a signal to the process group of the worker `key`, or to the groups of all workers if `key` is None.

        A worker that has exited already gets no signal.
        """
        with contextlib.suppress(OSError):
            self._channel.send(_encode({"signal": number, "key": key}))

    def wake(self) -> None:
        """Continue the supervisor if it is stopped (SIGSTOP). A stopped supervisor can't end the workers or itself."""
        if not self._reaped:
            with contextlib.suppress(OSError):
                os.kill(self._pid, signal.SIGCONT)

    def remove_at_end(self, path: Path, inode: int) -> None:
        """Make the supervisor remove a file after the launcher has ended, if the file still has this inode."""
        with contextlib.suppress(OSError):
            self._channel.send(_encode({"remove": str(path), "inode": inode}))

    def next_event(self) -> m.Started | m.Exited | None:
        """Block until the next event. Return None if the supervisor has ended."""
        try:
            message = self._channel.recv(_MAX_MESSAGE)
        except OSError:
            return None
        return _EVENTS(message) if message else None

    def close(self) -> None:
        """Kill all remaining workers, and wait until the supervisor has ended."""
        if self._reaped:
            return
        self.wake()
        self._reaped = True
        self._channel.close()
        # The supervisor itself never needs longer than this. If it hangs, kill it; the kernel then kills its workers.
        deadline = run_time() + 1.5 * _PATIENCE_S
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self._pid, os.WNOHANG)[0] == 0:
                if run_time() >= deadline:
                    os.kill(self._pid, signal.SIGKILL)
                time.sleep(_POLL_S)
        # Descendants are left only if the supervisor was killed, or if they didn't exit while the supervisor waited.
        for pid in kill_descendants(_PATIENCE_S / 10):
            why = "gets no core on which it could end" if waits_for_a_core(pid) else "hangs in the kernel"
            _log.warning('process left behind: pid=%d reason="can\'t be killed now: it %s"', pid, why)


def kill_descendants(patience_s: float = _PATIENCE_S) -> list[int]:
    """Kill and reap all descendants of this process, which must be a subreaper. Return the descendants that are left.

    The function returns when no descendant is left, or when no descendant has exited for `patience_s` seconds. In the
    second case, the remaining processes hang in the kernel, are in a frozen cgroup, or get no core. They exit as soon
    as they run again. Python's resource trackers get some time to end without being killed.
    """
    deadline, trackers_until = run_time() + patience_s, run_time() + _TRACKERS_S
    while True:
        left = children(os.getpid())
        for pid in left:
            if run_time() >= trackers_until or not is_resource_tracker(pid):
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
        try:
            reaped, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if reaped:
            deadline = run_time() + patience_s
        elif run_time() >= deadline:
            return left
        else:
            time.sleep(_POLL_S)


def is_resource_tracker(pid: int) -> bool:
    """Return whether the process is a resource tracker, which removes a Python program's shared memory.

    A resource tracker ends after the program and all its forked children have ended. If the tracker were killed, the
    files of these processes in /dev/shm would remain.
    """
    with contextlib.suppress(OSError):
        return b"resource_tracker import main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def kill_group(leader: int, patience_s: float = _GROUP_S) -> None:
    """Kill the other processes in the process group of a leader that has exited. The leader must not have been reaped.

    1. When this function returns, no process in the group runs, except resource trackers. So a rank publishes nothing
       after its exit has been reported.
    2. If the group contains a resource tracker, this process kills those of its children that are in the group, one by
       one. Only this process reaps these children, so the kernel can't give their IDs to other processes before.
       When a child has been killed, its own children become children of this process, and are killed next.
    3. If this takes longer than `patience_s` seconds, the whole group is killed.
    """
    deadline = run_time() + patience_s
    while trackers := (rest := _children_in(leader)) and list(filter(is_resource_tracker, _with_their_children(rest))):
        rest = [pid for pid in rest if pid not in trackers]
        if not rest:
            return
        if run_time() >= deadline:
            break
        for pid in rest:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(_POLL_S)
    with contextlib.suppress(OSError):
        os.killpg(leader, signal.SIGKILL)


def _children_in(group: int) -> list[int]:
    """Return this process's children in the group, without the group's leader."""
    found = []
    for pid in children(os.getpid()):
        with contextlib.suppress(OSError):
            found += [pid] if pid != group and os.getpgid(pid) == group else []
    return found


def _with_their_children(pids: Iterable[int]) -> list[int]:
    return [each for pid in pids for each in (pid, *descendants(pid))]


class _SupervisorProcess:
    """The supervisor's process. Its loop handles the launcher's requests and the exits of its children."""

    def __init__(self, channel: socket.socket, command: list[str], preloading: Preloading | None) -> None:
        self._channel = channel
        self._command = command
        self._forks = ForkServer(preloading)
        self._leaders: dict[int, int] = {}  # process ID of a group leader -> its worker's key
        self._remove: list[tuple[str, int]] = []

    def run(self) -> None:
        os.setsid()  # so that Ctrl-C at the terminal reaches only the launcher, which handles it
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        set_process_name("kungfu-guard")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
            if signal.getsignal(number) != signal.SIG_IGN:  # workers ignore a signal that nohup has set to ignored
                signal.signal(number, _nothing)  # a worker doesn't inherit a handler, but would inherit SIG_IGN
        wake_in, wake_out = socket.socketpair()
        for end in (wake_in, wake_out):
            end.setblocking(False)
        signal.set_wakeup_fd(wake_out.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _nothing)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(wake_in, selectors.EVENT_READ)
            graphs = _make_folder()
            try:
                while self._serve_once(selector, wake_in):
                    pass
            finally:
                kill_descendants()
                if graphs is not None:
                    shutil.rmtree(graphs, ignore_errors=True)
                for path, inode in self._remove:
                    with contextlib.suppress(OSError):
                        if os.lstat(path).st_ino == inode:
                            os.unlink(path)

    def _serve_once(self, selector: selectors.BaseSelector, wake: socket.socket) -> bool:
        self._start_waiting()
        news = self._forks.news()
        if news is not None:
            selector.register(news[0], selectors.EVENT_READ)
        for key, _ in selector.select(news and news[1]):
            if key.fileobj is wake:
                with contextlib.suppress(BlockingIOError):
                    wake.recv(4096)
        if news is not None:
            selector.unregister(news[0])
        self._reap()
        try:
            message, fds = receive_fds(self._channel, _MAX_MESSAGE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not message:
            return False
        try:
            self._obey(json.loads(message), fds)
        finally:
            close_all(fds)
        return True

    def _obey(self, request: dict[str, Any], fds: list[int]) -> None:
        if "start" in request:
            start = Start(request["start"], request["has_device"], request["environment"], request["cores"], *fds)
            fds.clear()  # `start` closes them
            self._start(start)
        elif "signal" in request:
            self._signal(request["signal"], request["key"])
        else:
            self._remove.append((request["remove"], request["inode"]))

    def _signal(self, number: int, wanted: int | None) -> None:
        for start in [each for each in self._forks.waiting if wanted in (None, each.key) and number in _ENDING]:
            self._forks.waiting.remove(start)
            start.close()
            self._tell(m.Exited(start.key, -number))
        for pid, key in list(self._leaders.items()):
            if wanted in (None, key):
                with contextlib.suppress(OSError):
                    os.killpg(pid, number)

    def _start(self, start: Start) -> None:
        if not self._forks.suits(start):
            self._execute(start)
        elif not self._forks.is_importing():
            if not self._fork(start):
                self._execute(start, forks_others=True)
        elif start.joins_later:
            self._execute(start)
        else:
            self._forks.waiting.append(start)

    def _start_waiting(self) -> None:
        """Start the workers that wait for the end of an import, if the import has ended."""
        if not self._forks.is_importing():
            for start in self._forks.waiting:
                if not self._fork(start):
                    self._execute(start)
            self._forks.waiting.clear()

    def _fork(self, start: Start) -> bool:
        """Make the fork server fork a worker. Return whether that has succeeded."""
        forked = self._forks.fork(start)
        if forked is None:
            return False
        pid, gate = forked
        start.close()
        self._leaders[pid] = start.key
        self._tell(m.Started(start.key, pid))
        with contextlib.suppress(OSError):  # the worker has been killed
            os.write(gate, b"1")
        os.close(gate)
        return True

    def _execute(self, start: Start, *, forks_others: bool = False) -> None:
        """Start a worker. `forks_others`: whether the worker imports MindSpore and then forks the fork server."""
        forking = self._forks.command() if forks_others else None
        command, channel = forking or (self._command, None)
        try:
            process = subprocess.Popen(
                command,
                env=start.environment(),
                stdin=subprocess.DEVNULL,
                stdout=start.stdout,
                stderr=start.stderr,
                pass_fds=() if channel is None else (channel.fileno(),),
                preexec_fn=_preparation(start.cores),
            )
        except (OSError, subprocess.SubprocessError) as error:
            missing = isinstance(error, FileNotFoundError)
            what = (error.strerror if isinstance(error, OSError) else None) or str(error)
            self._tell(m.Exited(start.key, 127 if missing else CANT_RUN, f"can't run {self._command[0]!r}: {what}"))
            return
        finally:
            start.close()
            if channel is not None:
                channel.close()
        process.returncode = 0  # `_reap` waits for the process, so Popen must not
        self._leaders[process.pid] = start.key
        self._tell(m.Started(start.key, process.pid))

    def _reap(self) -> None:
        while True:
            try:
                # WNOWAIT leaves the zombie, so that no other process group can get its ID before the rest of the group
                # is killed.
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            pid = found.si_pid
            key = self._leaders.pop(pid, None)
            if key is not None:
                kill_group(pid)
            _, status = os.waitpid(pid, 0)
            if key is not None:
                self._tell(m.Exited(key, os.waitstatus_to_exitcode(status)))
            else:
                self._forks.has_exited(pid)

    def _tell(self, event: m.Started | m.Exited) -> None:
        with contextlib.suppress(OSError):  # if the launcher has ended, the loop notices that
            self._channel.send(encode(event))


def _preparation(cores: list[int]) -> Callable[[], None]:
    """Return a function that a child of this process runs between fork and exec."""
    supervisor = os.getpid()

    def prepare() -> None:
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:  # the supervisor was killed before the line above ran
            os._exit(1)
        # If a shell starts the launcher with "&", the launcher ignores SIGINT. Workers must not ignore SIGINT, because
        # the launcher passes this signal on to them.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        if cores:
            # This fails if the cpuset has just been changed. The worker then runs on any core.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cores)

    return prepare


def _make_folder() -> str | None:
    """Create the folder in which workers share compiled graphs. Remove the folders of supervisors that were killed.

    If another container shares /tmp, its supervisors look as if they had ended, so their folders are removed, too.
    Their workers then share no compiled graphs.
    """
    os.environ.pop(env.GRAPHS.name, None)
    if not env.PRELOAD.get():
        return None
    with contextlib.suppress(OSError):
        for left in Path(tempfile.gettempdir()).glob(f"{_GRAPHS}*-*"):
            owner = left.name[len(_GRAPHS) :].partition("-")[0]
            if owner.isdecimal() and left.stat().st_uid == os.geteuid() and not Path("/proc", owner).exists():
                shutil.rmtree(left, ignore_errors=True)
        os.environ[env.GRAPHS.name] = tempfile.mkdtemp(prefix=f"{_GRAPHS}{os.getpid()}-")
    return env.GRAPHS.get()


def _encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode()


def _nothing(*_: object) -> None:
    pass


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def set_process_name(name: str) -> None:
    """Set the name that ps and top show, so that launcher and supervisor differ from other Python processes."""
    with contextlib.suppress(OSError):
        _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)
