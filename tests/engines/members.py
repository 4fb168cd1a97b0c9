"""An etcd of several members on loopback, whose members a test may kill, stop and start."""

from __future__ import annotations

import base64
import http.client
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests.ports import free_ports

READY_S = 90.0


def why_not() -> str | None:
    return None if shutil.which("etcd") else "etcd is not installed (tests/engines/run.sh installs it)"


class Etcd:
    """Its members run from the start. `election_ms`: how long they wait for a leader that says nothing."""

    def __init__(self, folder: Path, count: int = 3, election_ms: int = 1000, flags: tuple[str, ...] = ()) -> None:
        """An etcd whose `flags` have it speak TLS isn't asked here whether it is ready."""
        self._folder, self._election_ms, self._flags = folder, election_ms, flags
        self._tls = "--cert-file" in flags
        folder.mkdir(parents=True, exist_ok=True)
        ports = free_ports(2 * count)
        self.ports, self._peers = ports[:count], ports[count:]
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * count
        for member in range(count):
            self.start(member)
        if not self._tls:
            self.wait_until_ready()

    def url(self, job: str) -> str:
        return f"etcd://{','.join(f'127.0.0.1:{port}' for port in self.ports)}/{job}"

    # ---- members ----

    def start(self, member: int) -> None:
        peers = [f"m{number}=http://127.0.0.1:{port}" for number, port in enumerate(self._peers)]
        own, client = (
            peers[member].partition("=")[2],
            f"http{'s' if self._tls else ''}://127.0.0.1:{self.ports[member]}",
        )
        with (self._folder / f"m{member}.log").open("ab") as log:
            self._processes[member] = subprocess.Popen(
                [
                    "etcd", f"--name=m{member}", f"--data-dir={self._folder / f'm{member}'}",
                    f"--listen-client-urls={client}", f"--advertise-client-urls={client}",
                    f"--listen-peer-urls={own}", f"--initial-advertise-peer-urls={own}",
                    f"--initial-cluster={','.join(peers)}", f"--election-timeout={self._election_ms}",
                    f"--heartbeat-interval={self._election_ms // 10}", "--logger=zap", *self._flags,
                ],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={"PATH": os.environ["PATH"]},
            )  # fmt: skip

    def kill(self, member: int) -> None:
        process = self._processes[member]
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait()
            self._processes[member] = None

    def signal(self, member: int, number: int) -> None:
        process = self._processes[member]
        assert process is not None
        process.send_signal(number)

    def close(self) -> None:
        for member in range(len(self.ports)):
            self.kill(member)

    def wait_until_ready(self, members: tuple[int, ...] | None = None) -> None:
        deadline = time.monotonic() + READY_S
        for member in range(len(self.ports)) if members is None else members:
            while True:
                try:
                    answer = self.call("/v3/kv/range", {"key": "AA=="}, member, timeout_s=5)
                    if "header" in answer:
                        break
                except (OSError, http.client.HTTPException, ValueError):
                    pass
                assert time.monotonic() < deadline, (self._folder / f"m{member}.log").read_text()[-2000:]
                time.sleep(0.05)

    def leader(self) -> int:
        """Which member leads."""
        for member in range(len(self.ports)):
            if self._processes[member] is not None:
                status = self.call("/v3/maintenance/status", {}, member)
                if status.get("leader", "0") == status["header"]["member_id"]:
                    return member
        raise AssertionError("nobody leads")

    # ---- what is kept ----

    def call(self, path: str, message: dict[str, Any], member: int = 0, timeout_s: float = 10.0) -> dict[str, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[member], timeout=timeout_s)
        try:
            connection.request("POST", path, json.dumps(message))
            answer: dict[str, Any] = json.loads(connection.getresponse().read())
            return answer
        finally:
            connection.close()

    def etcdctl(self, *words: str) -> str:
        endpoints = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        done = subprocess.run(
            ["etcdctl", f"--endpoints={endpoints}", *words], capture_output=True, text=True, stdin=subprocess.DEVNULL,
            env={"PATH": os.environ["PATH"], "ETCDCTL_API": "3"}, check=True,
        )  # fmt: skip
        return done.stdout

    def compact(self) -> None:
        """Forgets all history but the present."""
        revision = self.call("/v3/kv/range", {"key": "AA=="})["header"]["revision"]
        self.call("/v3/kv/compaction", {"revision": revision})

    def history(self, job: str, key: str = "cluster") -> list[dict[str, Any]]:
        """All that a key of the job has ever held, in the order of etcd's revisions. Nothing may be compacted yet."""
        key = base64.b64encode(f"/ms_kungfu/{job}/{key}".encode()).decode()
        held: list[dict[str, Any]] = []
        revision = None
        while revision != 0:
            at = {} if revision is None else {"revision": str(revision)}
            found = self.call("/v3/kv/range", {"key": key, **at}).get("kvs")
            if not found:
                break
            document = json.loads(base64.b64decode(found[0]["value"]))
            held.insert(0, {**document, "revision": int(found[0]["mod_revision"]), "nth": int(found[0]["version"])})
            revision = int(found[0]["mod_revision"]) - 1
        return held
