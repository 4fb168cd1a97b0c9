"""Start this process's trace for Perfetto (docs/timeline.md). `ops_src/base/trace.h` describes the trace file."""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ms_kungfu import _core, env
from ms_kungfu._files import open_regular
from ms_kungfu.membership.member import Member

_log = logging.getLogger(__name__)
FORMAT = 1
_TRAINING_TRACK = 1  # trace.cc has the same number
_started = False


def start(member: Member) -> None:
    """Start the trace if KUNGFU_TRACE is set. If the file can't be written, log one line; the job continues."""
    global _started
    folder = member.get(env.TRACE)
    if folder is None or _started or not member.ports.owns_process:
        return
    _started = True
    host = socket.gethostname() if member.self_id is None else member.self_id.host
    path = Path(folder, f"trace-{host}-{os.getpid()}.json")
    begin = "".join(f"{line}\n" for line in ["[", *(json.dumps(event) + "," for event in _first_events(member, host))])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if os.write(fd, begin.encode()) < len(begin):
            os.close(fd)
            raise OSError(0, "the disk is full")
    except OSError as error:
        _log.warning('trace stopped: path=%s reason="%s". The job continues', path, error.strerror)
        return
    _core.trace_start(fd, str(path), member.get(env.TRACE_BYTES))
    atexit.register(_core.trace_stop)


def _first_events(member: Member, host: str) -> list[dict[str, object]]:
    pid = os.getpid()
    described = {
        "format": FORMAT,
        "job": member.get(env.JOB) or "",
        "host": host,
        "clock": _clock(),
        "unix_us": time.time_ns() // 1000,
        "monotonic_us": time.monotonic_ns() // 1000,
    }
    return [
        {"ph": "M", "name": "kungfu_begin", "pid": pid, "tid": 0, "args": described},
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"{host}, pid {pid}"}},
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": _TRAINING_TRACK, "args": {"name": "training"}},
    ]


def _clock() -> str:
    """Return an ID of the boot and the time namespace. Processes with the same ID have the same CLOCK_MONOTONIC."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/time")
    except OSError:  # no /proc, or a kernel without time namespaces
        return socket.gethostname()


@contextmanager
def traced(what: str) -> Iterator[None]:
    """Add this block to the process's trace, with the name `what`."""
    began_ns = _core.trace_now()
    try:
        yield
    finally:
        if began_ns:
            _core.trace_span(what, began_ns)
