"""Define the actor that runs on each node. The actor starts the node's kungfu-run and forwards its output.

Ray ends the actor's process when the driver or the raylet ends. kungfu-run ends together with the actor
(PR_SET_PDEATHSIG), and kungfu-run's supervisor then ends the workers.
"""

from __future__ import annotations

import ctypes
import math
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from ms_kungfu import env
from ms_kungfu.launcher.agent.output import LineSplitter
from ms_kungfu.launcher.options import PROGRAM

Lines = list[tuple[int, bytes]]  # (descriptor 1 or 2, line)
_PR_SET_PDEATHSIG = 1
# The actor keeps at most this many chunks that the driver hasn't fetched. At the limit, kungfu-run and the workers
# block.
_MOST_CHUNKS = 64
_CHUNK_BYTES = 1 << 16
FUNCTION = "function"  # the file in KUNGFU_RAY_FOLDER that contains the pickled function


def run_launcher() -> None:
    """Run kungfu-run in this process, which an agent has started with ``python -c ... PARENT WORDS``."""
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) or os.getppid() != int(sys.argv.pop(1)):
        sys.exit(1)  # the agent had ended before the prctl call
    # Ray blocks SIGINT in its processes, and sets its own handlers.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    from ms_kungfu.launcher.cli import main

    sys.exit(main())


class Agent:
    """The actor on a node. Ray runs each call of a method in its own thread, so a call may wait."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._chunks: queue.Queue[Lines | None] = queue.Queue(_MOST_CHUNKS)
        self._has_started, self._why_not, self._code = threading.Event(), "", 0

    def free_ports(self, address: str, ports: Sequence[int]) -> list[int]:
        """Return the `ports` on which a process on this node can listen."""
        found = []
        for port in ports:
            with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((address, port))
                except OSError:
                    continue
                found.append(port)
        return found

    def start(
        self, words: Sequence[str], variables: Mapping[str, str], folder: str, cpus: float, function: bytes | None
    ) -> None:
        """Start ``kungfu-run WORDS`` in the driver's folder.

        Args:
            words: the arguments of kungfu-run.
            variables: the driver's environment variables for kungfu-run.
            folder: the driver's current folder.
            cpus: the number of CPUs for each worker.
            function: the pickled function that the workers run; None if they run a command.
        """
        if not _has_working_dir():
            try:
                os.chdir(folder)
            except OSError as error:
                raise ValueError(
                    f"{folder}, the folder in which the job was started, can't be used on {socket.gethostname()}: "
                    f"{error.strerror}; create it on all nodes, or let Ray copy it (working_dir of runtime_env)"
                ) from None
        # In the workers' command, `python` means this process's interpreter, as in kungfu-distribute.
        environment = {**os.environ, **variables, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"}
        # If the user hasn't set OMP_NUM_THREADS, Ray has set it to this actor's number of CPUs, not a worker's.
        if environment.get("OMP_NUM_THREADS") == str(max(1, math.floor(_own_cpus()))):
            environment["OMP_NUM_THREADS"] = str(max(1, math.floor(cpus)))
        if function is not None:
            self._folder = tempfile.TemporaryDirectory(prefix="ms_kungfu-ray-")
            Path(self._folder.name, FUNCTION).write_bytes(function)
            environment[env.RAY_FOLDER.name] = self._folder.name
        # PR_SET_PDEATHSIG ends kungfu-run when the thread that started kungfu-run ends. So a separate thread starts
        # kungfu-run and waits until kungfu-run ends.
        try:
            threading.Thread(target=self._run, args=(words, environment), daemon=True).start()
            self._has_started.wait()
        except RuntimeError as error:
            self._why_not = str(error)
        if self._why_not:
            raise ValueError(f"{PROGRAM} can't be started on {socket.gethostname()}: {self._why_not}")

    def _run(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        program = "from ms_kungfu.ray.agent import run_launcher; run_launcher()"
        try:
            process = self._process = subprocess.Popen(
                [sys.executable, "-c", program, str(os.getpid()), *words], env=dict(environment),
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            readers = [
                threading.Thread(target=self._read, args=(descriptor, stream), daemon=True)
                for descriptor, stream in ((1, process.stdout), (2, process.stderr))
            ]
            for reader in readers:
                reader.start()
        # Possible reasons: the limit on processes or threads, no free memory, or arguments that are too long.
        except (OSError, RuntimeError) as error:
            self._why_not = getattr(error, "strerror", None) or str(error)
            return
        finally:
            self._has_started.set()
        self._code = process.wait()
        for reader in readers:
            reader.join()
        self._chunks.put(None)

    def _read(self, descriptor: int, stream: IO[bytes]) -> None:
        splitter = LineSplitter()
        while data := os.read(stream.fileno(), _CHUNK_BYTES):
            if lines := splitter.feed(data):
                self._chunks.put([(descriptor, line) for line in lines])
        if rest := splitter.flush():
            self._chunks.put([(descriptor, rest + b"\n")])

    def output(self) -> Lines | None:
        """Wait until there is output. Return the output since the last call, or None if kungfu-run has ended."""
        lines = self._chunks.get()
        while lines is not None and not self._chunks.empty():
            more = self._chunks.get()
            if more is None:
                self._chunks.put(None)
                break
            lines += more
        return lines

    def code(self) -> int:
        """Return kungfu-run's exit code after it has ended. As in a shell, it is 128 + n after signal n."""
        return self._code if self._code >= 0 else 128 - self._code

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def returned(self) -> list[bytes]:
        """Return the results of the function on this host: a pickled `End` for each worker that has a result."""
        if self._folder is None:
            return []
        files = [path for path in Path(self._folder.name).iterdir() if path.name.isdecimal()]
        with self._folder:
            return [path.read_bytes() for path in files]


def _own_cpus() -> float:
    """Return the number of CPUs that Ray has given this process."""
    import ray

    return float(ray.get_runtime_context().get_assigned_resources().get("CPU", 0.0))


def _has_working_dir() -> bool:
    """Return whether this process runs in a working directory that the user requested for all nodes."""
    import ray

    return bool(ray.get_runtime_context().runtime_env.get("working_dir"))
