"""Any local user may connect to a config server. What he does there must not matter to the job."""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import ms_kungfu.config_server.connections as connections_module
import ms_kungfu.config_server.server as server_module
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import open_store
from ms_kungfu.cluster_store.store import ConfigStore
from ms_kungfu.config_server.server import ConfigServer

pytestmark = pytest.mark.timeout(180)
PROGRAMS = Path(__file__).parent / "programs"
STRANGERS, EACH = 10, 500
LIMIT = 1024  # descriptors of the launcher or the server
SLACK = 64  # descriptors beside those of connections: the launcher with three workers needs some 40


def few_descriptors():
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, LIMIT))


@pytest.fixture
def strangers():
    """``strangers(port)`` returns once 5,000 connections have been made, of all bad kinds."""
    started = []

    def start(port):
        for _ in range(STRANGERS):
            command = [sys.executable, str(PROGRAMS / "stranger.py"), str(port), str(EACH)]
            started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for process in started:
            assert process.stdout.readline() == f"{EACH} connections\n"

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def port_of(url):
    return int(url.split(":")[2].split("/")[0])


def descriptors_of(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.mark.alone  # of connections
def test_job_is_not_disturbed_by_5000_idle_or_slow_connections(kungfu_run, start_module, strangers):
    job = kungfu_run(
        "-np", 1, "-w", sys.executable, PROGRAMS / "follower.py", 3, preexec_fn=few_descriptors
    )  # fmt: skip
    url = job.wait_for(r"config server: url=(http://\S+/config)")[0][1]
    job.wait_for("rank 0 of 1 began")
    strangers(port_of(url))
    assert descriptors_of(job.process.pid) < server_module._MAX_CONNECTIONS + SLACK
    before = len(job.lines)
    command = start_module(
        "ms_kungfu.launcher", "resize", 3, "-config-server", url, environment={"XDG_RUNTIME_DIR": str(job.runtime_dir)}
    )
    command.assert_exit(0)
    job.wait_for("rank . of 3 finished", 3, timeout=60)
    job.assert_exit(0)
    said = "\n".join(job.lines[before:])
    assert not any(word in said.lower() for word in ("error", "fail", "descriptor", "warning", "too many")), said
    job.assert_gone(time.monotonic())


@pytest.mark.alone
def test_config_server_answers_beside_5000_unauthenticated_connections(start_module, strangers):
    secret = "5ec7e7"
    server = start_module(
        "ms_kungfu.config_server", "-port", 0, environment={"KUNGFU_JOB_SECRET": secret}, preexec_fn=few_descriptors
    )
    client = open_store(server.wait_for(r"serving (http://\S+/config)")[0][1], secret)
    client.put(Cluster((PeerID("127.0.0.1", 10000),), (), 0))
    found = []
    follower = threading.Thread(target=lambda: found.append(client.watch(0, 60)))
    follower.start()  # has begun to wait before the strangers come
    strangers(port_of(client.url))
    assert descriptors_of(server.process.pid) < server_module._MAX_CONNECTIONS + SLACK
    for version in range(1, 6):
        assert client.put(Cluster((PeerID("127.0.0.1", 10000 + version),), (), version)).version == version
        assert client.get().version == version
    follower.join(30)
    assert [cluster.version for cluster in found] == [1]
    assert server.process.poll() is None
    assert server.stderr == []


@contextlib.asynccontextmanager
async def serving(**options):
    server = ConfigServer(ConfigStore(Cluster((PeerID("127.0.0.1", 10000),), (), 0)), "5ec7e7", **options)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def answer_of(url):
    return await asyncio.get_running_loop().run_in_executor(None, open_store(url).get)


def test_failed_http_face_restarts_on_its_port_and_the_store_is_kept(monkeypatch, caplog):
    monkeypatch.setattr(server_module, "_RESTART_S", 0.0)
    failed = threading.Event()
    real = server_module._Face.accept

    async def fail_once(self, *arguments):
        if not failed.is_set():
            failed.set()
            raise OSError("no memory")
        await real(self, *arguments)

    monkeypatch.setattr(server_module._Face, "accept", fail_once)

    async def run():
        async with serving() as server:
            assert (await answer_of(server.url)).version == 0

    asyncio.run(run())
    assert failed.is_set()
    assert 'config server failed: error="OSError: no memory" action=restart' in caplog.text


@pytest.mark.alone  # the server's thread has to come to its turn within 0.3 s
def test_client_that_hangs_up_on_a_busy_job_has_written_nothing(caplog):
    document = b'{"Workers": [], "Runners": []}'
    head = f"PUT /config HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer 5ec7e7\r\nContent-Length: {len(document)}\r\n\r\n"

    async def run():
        async with serving() as server:
            await answer_of(server.url)  # its loop has begun
            for body in (document, b"x" * len(document)):  # one that would be stored, and none
                with socket.create_connection((server.host, server.port)) as client:
                    client.sendall(head.encode() + body)
                    time.sleep(0.3)  # and with it the job's loop, for which the request waits
                time.sleep(0.3)  # its end has been seen
                await asyncio.sleep(0.1)
            assert (await answer_of(server.url)).version == 0

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_request_has_its_time_and_no_more(monkeypatch):
    monkeypatch.setattr(connections_module, "_REQUEST_S", 0.2)

    async def run():
        async with serving() as server:
            body_missing = (
                b"PUT /config HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer 5ec7e7\r\nContent-Length: 9\r\n\r\n"
            )
            for words in (b"", b"GET /config HTT", body_missing):
                reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server.url))
                writer.write(words)
                with contextlib.suppress(ConnectionError):
                    assert await asyncio.wait_for(reader.read(), 20) == b""
                writer.close()

    asyncio.run(run())


def test_latest_of_many_long_polls_is_answered_at_once(monkeypatch):
    monkeypatch.setattr(server_module, "connection_limit", lambda most: 8)
    wait = b"GET /config?newer_than=0&timeout=50 HTTP/1.1\r\nHost: x\r\n\r\n"

    async def run():
        async with serving() as server:
            waiting = [await asyncio.open_connection("127.0.0.1", port_of(server.url)) for _ in range(5)]
            for _, writer in waiting:
                writer.write(wait)
            lines = [asyncio.ensure_future(reader.readline()) for reader, _ in waiting]
            done, pending = await asyncio.wait(lines, return_when=asyncio.FIRST_COMPLETED)
            assert [line.result() for line in done] == [b"HTTP/1.1 304 Not Modified\r\n"]
            assert len(pending) == 4
            server.put({"Workers": ["127.0.0.1:10001"]})
            assert {await line for line in pending} == {b"HTTP/1.1 200 OK\r\n"}
            for _, writer in waiting:
                writer.close()

    asyncio.run(run())


def test_launcher_raises_its_descriptor_limit_and_workers_keep_the_users(kungfu_run, script):
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    soft = min(200, hard)
    job = kungfu_run(
        *script(
            "import os, resource\n"
            "print('worker', resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
            "guard = os.getppid()\n"
            "launcher = int(open(f'/proc/{guard}/stat').read().rpartition(')')[2].split()[1])\n"
            "print('launcher', resource.prlimit(launcher, resource.RLIMIT_NOFILE)[0])\n"
        ),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)),
    )
    job.assert_exit(0)
    assert f"worker {soft}" in job.lines
    assert f"launcher {hard}" in job.lines


def test_text_that_cannot_be_encoded_is_reported_only_if_it_is_our_own(monkeypatch, caplog):
    async def answer(server, head):
        reader, writer = await asyncio.open_connection(server.host, server.port)
        writer.write(b"GET /config HTTP/1.1\r\nHost: us\r\nConnection: close\r\n" + head + b"\r\n")
        status = (await reader.readline()).split()[1]
        writer.close()
        return status

    async def ours(self, request):
        "\udcc3".encode()

    async def run(head):
        async with serving() as server:
            return await answer(server, head)

    assert asyncio.run(run(b"Expect: \xc3\r\n")) == b"500"
    assert caplog.text == ""
    monkeypatch.setattr(server_module._Face, "_get", ours)
    assert asyncio.run(run(b"")) == b"500"
    assert "UnicodeEncodeError" in caplog.text


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /config HTTP/1.1\r\n\r\n",
        b"echo\x01me /config HTTP/1.1\r\nHost: us\r\n\r\n",
        b"GET /config HTTP/echome\r\nHost: us\r\n\r\n",
        b"PUT /config HTTP/1.1\r\nHost: us\r\nContent-Length: echome\r\n\r\n",
        b"GET /config HTTP/1.1\r\nHost: us\r\necho\xc3me\r\n\r\n",
    ],
    ids=["no-host", "method", "version", "length", "header"],
)
def test_malformed_request_is_answered_without_an_echo(sent):
    async def answer():
        async with serving() as server:
            reader, writer = await asyncio.open_connection(server.host, server.port)
            writer.write(sent)
            answer = await reader.read()
            writer.close()
            return answer

    head, _, body = asyncio.run(answer()).partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert body == b'{"error": "this is not a valid HTTP request"}'
