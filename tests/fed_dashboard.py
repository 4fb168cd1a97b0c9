"""A dashboard server whose job is the test: the test feeds events and samples, and sees the commands."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

from ms_kungfu import job_events as e
from ms_kungfu.launcher.dashboard.requests import CommandRefused
from ms_kungfu.launcher.dashboard.server import DashboardServer

WAIT_S = 20.0


def status(size: int = 4, version: int = 0) -> dict[str, Any]:
    """Return a status document as `kungfu-run status --json` prints it."""
    processes = [
        {
            "rank": rank, "host": "127.0.0.1", "peer": f"127.0.0.1:{10000 + rank}", "pid": 4000 + rank,
            "joined_with": 0, "standing": "member", "state": "running", "why": "", "device": None,
            "step": 10, "step_s": 0.5, "step_ended_s_ago": 0.1,
        }
        for rank in range(size)
    ]  # fmt: skip
    return {
        "job": "0123456789abcdef", "state": "running", "why": "", "launcher": {"host": "127.0.0.1", "pid": 3999},
        "started_at": 1_700_000_000.0, "command": ["python", "train.py"], "follows_changes": True,
        "config_server": "http://127.0.0.1:9100/config",
        "hosts": [{"name": "127.0.0.1", "lost": False, "state": "active"}],
        "cluster": {"version": version, "size": size}, "wanted": None, "processes": processes, "changes": [],
    }  # fmt: skip


class FedDashboard:
    """Run a server from `with` on. `status`: the job's status. `refusal`: why the job refuses each command."""

    def __init__(self, size: int = 4, **options: Any) -> None:
        self.current, self.refusal, self.commands = status(size), "", []
        self._options = options
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> FedDashboard:
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.server = self._in_loop(self._start())
        self.token, self.url = self.server.token, self.server.url
        return self

    def __exit__(self, *error: object) -> None:
        self._in_loop(self.server.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _in_loop(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _start(self) -> DashboardServer:
        server = DashboardServer(self, **self._options)
        server.start()
        await self._loop.run_in_executor(None, server.is_bound.wait, WAIT_S)
        return server

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Block the job's event loop in this block."""
        end = threading.Event()
        self._loop.call_soon_threadsafe(end.wait, WAIT_S)
        try:
            yield
        finally:
            end.set()

    # ---- the job, in its loop ----

    def status(self) -> dict[str, Any]:
        return self.current

    async def obey(self, command: Any) -> str:
        if self.refusal:
            raise CommandRefused(self.refusal)
        self.commands.append(command)
        return "accepted by the test"

    # ---- the test ----

    def feed(self, *events: e.Event) -> None:
        """Emit events, in this order."""
        for event in events:
            self.server.add(event)

    def sample(self, time: float, ranks: list[dict[str, Any]], with_status: bool = True) -> None:
        """Pass on what the ranks do now."""
        self.server.sample({"time": time, "ranks": ranks, **({"status": self.current} if with_status else {})})

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of the answer."""
        return request(self.server.port, method, path, body, **headers)

    def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        """Send a command with the token, and return status and document of the answer."""
        words = {"Authorization": f"Bearer {self.token}", "Content_Type": "application/json", **headers}
        code, _, text = self.request("POST", path, json.dumps(body).encode(), **words)
        return code, json.loads(text)

    def command(self, path: str, body: object) -> socket.socket:
        """Send a command with the token. Return the connection without waiting for the answer."""
        text = json.dumps(body)
        words = {"Host": "localhost", "Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in {**words, "Content-Length": len(text)}.items())
        connection = socket.create_connection(("127.0.0.1", self.server.port), timeout=WAIT_S)
        connection.sendall(f"POST {path} HTTP/1.1\r\n{lines}\r\n{text}".encode())
        return connection

    def stream(self, **headers: str) -> Stream:
        """Connect to /events."""
        return Stream(self.server.port, headers)


def request(port: int, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body of the answer. An underscore in a header's name stands for a hyphen."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        if body or method == "POST":
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


class Stream:
    """A client of /events. Iteration returns (event, id, document) of each message."""

    def __init__(self, port: int, headers: dict[str, str]) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=WAIT_S)
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
        self._connection.sendall(f"GET /events HTTP/1.0\r\nHost: 127.0.0.1:{port}\r\n{lines}\r\n".encode())
        self.file = self._connection.makefile("rb")
        self.status = int(self.file.readline().split()[1])
        while self.file.readline().strip():
            pass

    def __iter__(self) -> Iterator[tuple[str, int | None, Any]]:
        message: dict[str, str] = {}
        for line in self.file:
            name, _, value = line.decode().rstrip("\n").partition(": ")
            if line.strip():
                message[name] = value
            elif "data" in message:
                number = message.get("id")
                yield message.get("event", ""), None if number is None else int(number), json.loads(message["data"])
                message = {}

    def take(self, count: int) -> list[tuple[str, int | None, Any]]:
        """Return the next messages."""
        messages = iter(self)
        return [next(messages) for _ in range(count)]

    def until_silence(self) -> list[bytes]:
        """Return the next lines, up to the comment that the server sends when it has no message."""
        lines = []
        while (line := self.file.readline()) != b":\n":
            assert line, "the server has ended the stream"
            lines.append(line)
        return lines

    def close(self) -> None:
        self.file.close()
        self._connection.close()
