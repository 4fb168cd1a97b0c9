"""Let `kungfu-run status` find its user's jobs on this machine.

Each launcher listens on a Unix socket in the folder that contains this user's secrets (`config_server.secret_file`). No
other user can enter that folder.

The launcher sends each client one JSON document, reads nothing, and closes the connection. It serves only a few clients
at the same time, and each client for a few seconds at most. A failure ends only the connection of one client.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Awaitable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable

from ms_kungfu._decoding import MalformedError, ProtocolError, decode
from ms_kungfu.broker_protocol import check_same_user
from ms_kungfu.config_server.secret_file import SecretFileError, made, opened, own_directories
from ms_kungfu.launcher.server import Listener
from ms_kungfu.launcher.within import within

Answer = Callable[[], Awaitable[dict[str, Any]]]
_log = logging.getLogger(__name__)
_SUFFIX = ".status"
_MAX_CLIENTS = 16
_BACKLOG = 128
_FULL_RETRY_S = 0.02
_SEND_S = 5.0
_MAX_ANSWER_BYTES = 16 * 1024 * 1024


class StatusServer:
    """Listen in the event loop, from construction to `close`.

    Raises OSError or SecretFileError if the socket can't be created.
    """

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._loop = asyncio.get_running_loop()
        self._clients: set[asyncio.Task[None]] = set()
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self.path, self.inode = _bind(listening)
        except BaseException:
            listening.close()
            raise
        self._listener = Listener(listening, self._on_accepted)

    def close(self) -> None:
        """Stop listening, and end the connections of clients."""
        self._listener.close()
        for client in self._clients:
            client.cancel()
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self.inode:
                os.unlink(self.path)

    def _on_accepted(self, client: socket.socket, source: Any) -> None:
        task = asyncio.ensure_future(self._serve(client))
        self._clients.add(task)
        task.add_done_callback(self._over)
        if len(self._clients) >= _MAX_CLIENTS:  # further clients wait in the backlog
            self._listener.rest()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._clients.discard(task)
        self._listener.resume()

    async def _serve(self, client: socket.socket) -> None:
        with contextlib.closing(client), contextlib.suppress(OSError, ProtocolError, asyncio.TimeoutError):
            try:
                client.setblocking(False)
                check_same_user(client)
                text = json.dumps(await within(_SEND_S, self._answer()))
                await within(_SEND_S, self._loop.sock_sendall(client, text.encode()))
            except (OSError, ProtocolError, asyncio.TimeoutError):
                raise
            except Exception as error:  # this ends the connection, but not the job
                _log.error('internal error: where=status error="%r"', error, exc_info=error)


def _bind(listening: socket.socket) -> tuple[Path, int]:
    """Make the socket listen in this user's folder. Return the socket's path and inode."""
    trouble: Exception = OSError("no folder for the socket can be used")
    for directory in own_directories():
        try:
            with made(directory) as folder:
                name = f"{os.getpid()}.{secrets.token_hex(4)}{_SUFFIX}"
                # Use a path through the folder's descriptor, because a socket's path is limited to 107 bytes. Give the
                # socket its final name only after it listens, because clients delete a socket that doesn't listen,
                # assuming that a killed launcher has left it.
                listening.bind(f"/proc/self/fd/{folder}/.{name}")
                listening.listen(_BACKLOG)
                os.rename(f".{name}", name, src_dir_fd=folder, dst_dir_fd=folder)
                return directory / name, os.stat(name, dir_fd=folder, follow_symlinks=False).st_ino
        except (OSError, SecretFileError) as error:
            trouble = error
    raise trouble


def never_raises(describe: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Return a function like `describe` that never raises, so that a bug in `describe` can't end the job."""
    logged = set()

    def described() -> dict[str, Any]:
        try:
            return describe()
        except Exception as error:
            if repr(error) not in logged:
                logged.add(repr(error))
                _log.error('internal error: where=status error="%r"', error, exc_info=error)
            return {"error": f"internal error: {error!r}"}

    return described


def jobs_of_this_user(timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yield the status document of each launcher of this user on this machine.

    If a launcher doesn't answer, yield {"error": a message} for it.
    """
    return (job for _, job in jobs_by_launcher(timeout_s))


def jobs_by_launcher(timeout_s: float, pid: int | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each launcher's process ID, and its answer as in `jobs_of_this_user`.

    If `pid` is given, ask only the launcher with that process ID.
    """
    seen: set[str] = set()
    prefix = "" if pid is None else f"{pid}."
    for directory in own_directories():
        with contextlib.suppress(OSError, SecretFileError), opened(directory) as folder:
            names = [n for n in os.listdir(folder) if n.endswith(_SUFFIX) and not n.startswith(".") and n not in seen]
            names = [n for n in names if n.isascii() and n.startswith(prefix) and n.partition(".")[0].isdigit()]
            seen.update(names)
            # Ask all launchers in parallel, because a launcher that doesn't answer takes the whole time limit.
            with ThreadPoolExecutor(_MAX_CLIENTS) as threads:
                answers = threads.map(lambda name: _ask(folder, name, timeout_s), sorted(names))
                for name, found in zip(sorted(names), answers):
                    if found is not None:
                        yield int(name.partition(".")[0]), found


def _ask(folder: int, name: str, timeout_s: float) -> dict[str, Any] | None:
    """Return the launcher's answer, or None if the launcher no longer exists."""
    pid = name.partition(".")[0]
    deadline = time.monotonic() + timeout_s
    text = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.settimeout(timeout_s)
        try:
            _connect(server, f"/proc/self/fd/{folder}/{name}", deadline)
            check_same_user(server)
            server.settimeout(timeout_s)
            while len(text) <= _MAX_ANSWER_BYTES and (piece := server.recv(1 << 16)):
                text += piece
                server.settimeout(max(0.01, deadline - time.monotonic()))
        except (ConnectionRefusedError, FileNotFoundError):  # the launcher was killed, or has just ended
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            return None
        except (socket.timeout, BlockingIOError):
            return {"error": f"the job of process {pid} doesn't answer within {timeout_s:g} s: its launcher is stopped"
                    " or overloaded"}  # fmt: skip
        except OSError:  # the connection was reset
            text = b""
        except ProtocolError:  # not a process of this user
            return None
    try:
        document = decode(text, _MAX_ANSWER_BYTES, raw_bytes=True)
    except MalformedError:  # the launcher has closed the connection in the middle of the document
        return {"error": f"the job of process {pid} is just ending"}
    return document if isinstance(document, dict) else None


def _connect(server: socket.socket, address: str, deadline: float) -> None:
    while True:
        try:
            server.connect(address)
            return
        except BlockingIOError:  # other clients fill the backlog; the socket's timeout doesn't cover this case
            if time.monotonic() > deadline:
                raise
        time.sleep(_FULL_RETRY_S)
