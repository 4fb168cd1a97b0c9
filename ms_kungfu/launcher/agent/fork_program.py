"""Import MindSpore in a worker, fork the fork server (which forks other workers), and run the worker's program.

`fork_server` runs this file with the interpreter of the workers' command. So the file imports only the standard
library.

1. A process must have only one thread when it forks. NumPy's OpenBLAS starts threads while it is imported, but ends the
   threads at each fork, and starts them again when it needs them. So the worker forks once before it counts its
   threads. If another thread is left, the worker runs its program without a fork server.
2. The fork server and the workers are children of the supervisor, as if the supervisor had started them: each is forked
   by a process that ends at once. The supervisor is a subreaper, so it becomes their parent.
3. A forked worker waits until the supervisor has written a byte to its gate. The supervisor writes this byte after it
   has recorded the worker's process ID, so the supervisor misses no exit. If the supervisor closes the gate instead,
   the worker ends.
4. A forked worker replaces the values that the import has read or drawn: the device ID, the key of `multiprocessing`,
   and random numbers. Two workers never begin with the same state of `random`, of NumPy, or of MindSpore's generator.
5. If the import fails, the worker starts again without this file, so that the error occurs in the worker's program.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import importlib.util
import json
import multiprocessing
import os
import socket
import sys
import threading
import time
import types
import warnings
from importlib.machinery import SourceFileLoader
from typing import Any

_MAX_MESSAGE = 1024 * 1024
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_SIGKILL = 9
_THREADS_S = 0.1
_NAME = "kungfu-forks"  # `_processes.FORK_SERVER`

_libc = ctypes.CDLL(None, use_errno=True)


class _CommandLine:
    """The memory in which the kernel finds this process's command line, so that ps shows what the process runs."""

    def __init__(self) -> None:
        with open("/proc/self/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        self._begin, self._end = int(fields[45]), int(fields[46])

    def show(self, words: list[str]) -> None:
        text = b"".join(os.fsencode(word) + b"\0" for word in words)
        room = self._end - self._begin
        if 0 < len(text) <= room:
            ctypes.memmove(self._begin, text.ljust(room, b"\0"), room)


def _preload() -> bool:
    """Import MindSpore. Return whether workers can be forked now."""
    import mindspore  # noqa: F401

    with contextlib.suppress(ImportError):  # each worker imports msgspec
        import msgspec  # noqa: F401
    _make_unique()  # raises an error if this MindSpore keeps the values elsewhere
    with warnings.catch_warnings(), contextlib.suppress(OSError):
        warnings.simplefilter("ignore")  # Python's warning about a fork while other threads exist
        trial = os.fork()
        if trial == 0:
            os._exit(0)
        os.waitpid(trial, 0)
    until = time.monotonic() + _THREADS_S
    while len(os.listdir("/proc/self/task")) > 1:  # the kernel lists a thread until shortly after its end
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    gc.collect()
    gc.freeze()  # so that garbage collections in workers don't modify shared pages
    return True


def _make_unique() -> None:
    import numpy as np
    from mindspore._c_expression import MSContext, ms_ctx_param
    from mindspore.common import generator

    MSContext.get_instance().set_param(ms_ctx_param.device_id, int(os.environ["DEVICE_ID"]))
    multiprocessing.current_process().authkey = os.urandom(32)
    np.random.seed()
    generator.default_generator._seed.set_data(generator._random_seeded_generator()._seed)


def _fork_server(channel: socket.socket, supervisor: int) -> tuple[dict[str, Any], list[int]] | None:
    """Fork the fork server. Return None in this worker; in a forked worker, its start request and descriptors."""
    try:
        between = os.fork()
    except OSError:
        return None
    if between:
        os.waitpid(between, 0)
        return None
    try:
        parent = os.getpid()
        if os.fork():
            os._exit(0)
        while os.getppid() == parent:
            time.sleep(0.001)
        _become_child_of(supervisor)
        _libc.prctl(_PR_SET_NAME, _NAME.encode(), 0, 0, 0)
        _CommandLine().show([_NAME])
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)
        os.dup2(silent, 2)
        os.close(silent)
        channel.send(str(os.getpid()).encode())
        return _serve(channel)
    except BaseException:  # the supervisor then starts workers without the fork server
        os._exit(1)


def _become_child_of(supervisor: int) -> None:
    """Form a process group, and end when the supervisor ends, like each child of the supervisor."""
    os.setpgid(0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, _SIGKILL, 0, 0, 0)
    if os.getppid() != supervisor:  # the supervisor was killed before the line above ran
        os._exit(1)


def _serve(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a worker for each request. Only workers return, each with its start request and descriptors."""
    while True:
        text, fds, _, _ = socket.recv_fds(channel, _MAX_MESSAGE, 3)
        if not text:
            os._exit(0)
        ours, workers = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)
            os.setpgid(0, 0)
            os.write(workers, str(os.getpid()).encode())
            for fd in (ours, workers):
                os.close(fd)
            return json.loads(text), fds
        os.close(workers)  # so that the read below returns if the worker couldn't be forked
        os.waitpid(between, 0)
        channel.send(os.read(ours, 16))
        for fd in (ours, *fds):
            os.close(fd)


def _become_worker(request: dict[str, Any], fds: list[int], supervisor: int) -> None:
    """Wait for a byte at the gate, and apply the request's settings for this worker."""
    stdout, stderr, gate = fds
    if not os.read(gate, 1):
        os._exit(1)
    _become_child_of(supervisor)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    for fd in fds:
        os.close(fd)
    if request["cores"]:
        # This fails if the cpuset has just been changed. The worker then runs on the fork server's cores.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, request["cores"])
    for variable, value in request["environment"].items():
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
    with contextlib.suppress(AttributeError):
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined]  # Python keeps the fork server's ID
    _make_unique()


def _run(is_module: bool, program: list[str]) -> None:
    """Run the program as the module `__main__`, as the interpreter does."""
    main = types.ModuleType("__main__")
    if is_module:
        spec = importlib.util.find_spec(program[0])
        if spec is None or spec.loader is None:
            sys.exit(f"{sys.executable}: No module named {program[0]}")
        path = str(spec.origin)
        sys.argv[0] = path
        code = spec.loader.get_code(program[0])  # type: ignore[attr-defined]
        main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        main.__dict__["__cached__"] = spec.cached
    else:
        path = os.path.join(os.getcwd(), program[0])
        main.__loader__ = SourceFileLoader("__main__", path)
        main.__dict__["__cached__"] = None
        try:
            with open(path, "rb") as file:
                source = file.read()
        except OSError as error:
            print(f"{sys.orig_argv[0]}: can't open file {path!r}: {error}", file=sys.stderr)
            sys.exit(2)
        code = compile(source, path, "exec", dont_inherit=True)
    main.__file__ = path
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__annotations__"] = {}
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _hide_own_frames() -> None:
    """Leave this file out of the traceback that Python is about to print."""
    show = sys.excepthook

    def without_own(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = without_own


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    settings = json.loads(channel.recv(_MAX_MESSAGE))
    with open("/proc/self/comm", "rb") as file:
        name = file.read().strip()
    is_module, program, supervisor = settings["is_module"], settings["program"], settings["supervisor"]
    sys.argv = list(program)
    sys.orig_argv = [*settings["python"], *(["-m"] if is_module else []), *program]
    sys.path[0] = settings["folder"]
    shown = _CommandLine()
    shown.show(sys.orig_argv)
    forked = None
    try:
        if _preload():
            forked = _fork_server(channel, supervisor)
        else:
            channel.send(b"0")
    except Exception:
        with contextlib.suppress(OSError):
            channel.send(b"0")
        channel.close()
        os.execvp(sys.orig_argv[0], sys.orig_argv)
    channel.close()
    if forked is not None:
        _become_worker(*forked, supervisor)
        _libc.prctl(_PR_SET_NAME, name, 0, 0, 0)
        shown.show(sys.orig_argv)
    _run(is_module, program)


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        _hide_own_frames()
        raise
