"""What no launcher and no client sends, at random, at the ports that strangers reach: those of the launchers of several
hosts, and the config server's.

``python -m tests.campaigns strangers`` tries more, by ``KUNGFU_FUZZ`` (how many connections to each) and
``KUNGFU_FUZZ_SEED``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import re
import resource
import socket
import ssl
import struct

import msgspec
import pytest
from test_hosts import SECRET as JOBS_SECRET
from test_hosts import A, B, embedded, hosts  # noqa: F401
from test_hosts_control import REGISTRATION, SAID

from ms_kungfu._decoding import ProtocolError
from ms_kungfu._proofs import new_nonce, proof_of
from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import open_store
from ms_kungfu.cluster_store.store import ConfigStore
from ms_kungfu.config_server.server import ConfigServer
from ms_kungfu.launcher.channel import Channel
from ms_kungfu.launcher.control import ControlServer, call
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.wire.codec import encode
from tests import hostile
from tests.hostile import spoiled
from tests.ports import free_port

pytestmark = pytest.mark.timeout(3600 if "KUNGFU_FUZZ" in os.environ else 120)
TRIES = int(os.environ.get("KUNGFU_FUZZ", 400))
SEED = int(os.environ.get("KUNGFU_FUZZ_SEED", 32))
SECRET = b"s" * 16
SOURCES = tuple(f"127.0.0.{number}" for number in (11, 12, 13))
_MAX_GROWTH = 64 << 20  # of the process, whatever comes
_AT_ONCE = 32
_PATIENCE_S = 0.3


@pytest.fixture
def lots():
    """Of each stranger his own, by his number: whose turn it is when is the machine's affair."""
    print(f"KUNGFU_FUZZ_SEED={SEED}")  # shown where it fails
    return lambda number: random.Random(SEED << 32 | number)


def bytes_of(lots, most):
    return lots.randbytes(lots.randrange(most + 1))


async def in_turns(count, try_one):
    """Some at a time."""
    numbers = iter(range(count))

    async def several():
        for number in numbers:
            await try_one(number)

    await asyncio.gather(*(several() for _ in range(_AT_ONCE)))


async def heard_by(host, port, source, pieces, patience_s=None):
    """What comes back of these bytes, until the other end has had enough. With a patience this end doesn't say that it
    sends no more, for which a server of HTTP would go without an answer, but goes when nothing comes for so long."""
    loop, answer = asyncio.get_running_loop(), b""
    with socket.socket() as stranger, contextlib.suppress(OSError, asyncio.TimeoutError):
        stranger.setblocking(False)
        if source is not None:
            stranger.bind((source, 0))
        await loop.sock_connect(stranger, (host, port))
        for piece in pieces:
            await asyncio.wait_for(loop.sock_sendall(stranger, piece), 5)
        if patience_s is None:
            stranger.shutdown(socket.SHUT_WR)
        while piece := await asyncio.wait_for(loop.sock_recv(stranger, 1 << 16), patience_s or 5):
            answer += piece
    return answer


class Growth:
    """Bytes by which this process has been larger than in the first quarter of a test, in which all that it takes at
    most, for as many strangers at a time, is taken."""

    def __init__(self):
        self._first = 0

    def note(self, number):
        if number <= TRIES // 4:
            self._first = self._now()

    def __call__(self):
        return self._now() - self._first

    @staticmethod
    def _now():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- launchers ----


def message(body):
    return struct.pack(">I", len(body)) + body


def conversation(lots, heard):
    """What an unauthenticated client says. `heard`: the words of one that knew the secret."""
    nonce = {"type": "nonce", "nonce": new_nonce(), "protocol": m.PROTOCOL}
    proof = {"type": "proof", "proof": proof_of(b"t" * 16, "caller", new_nonce(), nonce["nonce"])}
    kind = lots.randrange(12)
    if kind > 8:  # a challenge of which any part is something else
        return [message(hostile.message(lots, nonce)), message(hostile.message(lots, proof))]
    if kind == 0:
        return [bytes_of(lots, 200)]
    if kind == 1:  # over the limit, and a bit of it
        return [struct.pack(">I", lots.randint(4097, (1 << 32) - 1)), bytes_of(lots, 3000)]
    if kind == 2:
        return [spoiled(lots, message(json.dumps(nonce).encode()) + message(json.dumps(proof).encode()))]
    if kind == 3:
        return [message(hostile.document(lots)) for _ in range(3)]
    if kind == 4:
        return [message(b"[" * 4000), message(b'{"a":' * 800)]
    if kind == 5:
        return [message(json.dumps(each).encode()) for each in (nonce, proof, {**nonce, **proof})]
    if kind == 6:  # replayed, as it was or nearly
        return heard if lots.random() < 0.5 else [spoiled(lots, b"".join(heard))]
    if kind == 7:
        return [b"GET /config HTTP/1.1\r\nHost: x\r\n\r\n"]
    return [client_hello()]


def client_hello():
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(incoming, outgoing, server_hostname="x").do_handshake()
    return outgoing.read()


class Overheard:
    """Keeps what a caller sends."""

    def __init__(self, monkeypatch):
        self.words = []
        real = Channel.send

        def send(channel, what):
            if isinstance(what, (m.Nonce, m.Proof)):
                self.words.append((id(channel), message(encode(what))))
            real(channel, what)

        monkeypatch.setattr(Channel, "send", send)

    def of(self, channel):
        return [words for whose, words in self.words if whose == id(channel)]


def test_launchers_admit_no_client_that_sends_random_messages(lots, caplog, monkeypatch):
    served, overheard, growth = [], Overheard(monkeypatch), Growth()

    async def serve(channel):
        served.append(await channel.receive(SAID))
        channel.send(served[-1])
        await channel.flushed()
        return False

    async def run():
        server = ControlServer(Machine(), SECRET, serve)
        port = free_port(A)
        await server.start(A, port)

        async def honest():
            channel = await call(Machine(), B, A, port, SECRET, 30)
            channel.send(REGISTRATION)
            assert await asyncio.wait_for(channel.receive(SAID), 30) == REGISTRATION
            words = overheard.of(channel)
            overheard.words.clear()
            channel.close()
            return words

        heard = await honest()
        assert heard
        before = len(os.listdir("/proc/self/fd"))

        async def one_stranger(number):
            growth.note(number)
            own = lots(number)
            await heard_by(A, port, own.choice(SOURCES), conversation(own, heard))
            if number % 100 == 99:
                await honest()
            overheard.words.clear()

        await in_turns(TRIES, one_stranger)
        await honest()
        assert served == [REGISTRATION] * (2 + TRIES // 100)
        assert len(os.listdir("/proc/self/fd")) <= before + 2
        await server.close()

    asyncio.run(run())
    assert growth() < _MAX_GROWTH
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sorted(re.search(r"from=(\S+)", line)[1] for line in told) == sorted(SOURCES), told  # once a source


# ---- the config server ----

_METHODS = ("PUT", "GET", "POST", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "X" * 9)
_PATHS = (
    "/config", "/config/status", "/config?newer_than=-1", "/config?newer_than=5&timeout=0.01", "/config?timeout=nan",
    "/", "*", "/../config", "http://x/config", "/config/" + "x" * 9000, "/%00", "/config?newer_than=" + "9" * 5000,
)  # fmt: skip
_HEADERS = (
    "Host: x", "Host: x\r\nHost: y", "Content-Length: -1", "Content-Length: 99999999999", "Content-Length: 3",
    "Transfer-Encoding: chunked", "Transfer-Encoding: gzip, chunked", "Content-Encoding: gzip", "Expect: 100-continue",
    "Expect: \xc3",
    "Upgrade: websocket\r\nConnection: Upgrade", "Authorization: Bearer", "Authorization: Basic eDp4",
    "Authorization: Bearer 00", "Authorization: Bearer \xff\xfe", "Content-Type: multipart/form-data; boundary=x",
    "Kungfu-Writer: ../x", "X: " + "y" * 9000, "\x00: x", " folded",
)  # fmt: skip


def _one_of(lots, values):
    """The first in half of the cases."""
    return values[0] if lots.random() < 0.5 else lots.choice(values)


def a_request(lots, authorization=""):
    """Something like a request; its body."""
    kind = lots.randrange(6)
    if kind == 0:
        body = bytes_of(lots, 300)
    elif kind == 1:
        body = b"x" * (300 * 1024)  # over what is read
    elif kind == 2:
        body = b"[" * lots.randint(1, 30000)
    elif kind == 3:
        body = spoiled(lots, json.dumps({"Workers": ["127.0.0.1:10000"], "Runners": [], "Version": 7}).encode())
    else:
        body = hostile.document(lots)
    headers = ["Host: x", *lots.sample(_HEADERS, max(0, lots.randrange(-3, 4)))]
    if authorization:
        headers = ["Host: x", authorization, *(["Content-Encoding: gzip"] if lots.random() < 0.1 else [])]
    if lots.random() < 0.7 or authorization:
        headers.append(f"Content-Length: {len(body)}")
    method, path = ("PUT", "/config") if authorization else (_one_of(lots, _METHODS), _one_of(lots, _PATHS))
    head = f"{method} {path} HTTP/1.1\r\n".encode()
    head += "".join(header + "\r\n" for header in headers).encode("latin-1") + b"\r\n"
    if not authorization and lots.random() < 0.3:
        head = spoiled(lots, head)
    if not authorization and lots.random() < 0.2:
        body = bytes_of(lots, len(body))
    return [head, body]


@contextlib.asynccontextmanager
async def serving(cluster):
    server = ConfigServer(ConfigStore(cluster), SECRET.hex())
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


def status_of(answer):
    """0 where there was none."""
    return int(answer.split()[1]) if answer.startswith(b"HTTP/1.") else 0


@pytest.mark.parametrize("knows_the_secret", [False, True])
def test_config_server_answers_random_requests_and_keeps_the_cluster(lots, caplog, knows_the_secret):
    first = Cluster((PeerID("127.0.0.1", 10000),), (), 5)
    authorization = f"Authorization: Bearer {SECRET.hex()}" if knows_the_secret else ""
    statuses, growth = {}, Growth()

    async def run():
        async with serving(first) as server:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(None, open_store(server.url).get)  # its loop has begun
            before = len(os.listdir("/proc/self/fd"))

            async def one(number):
                growth.note(number)
                request = a_request(lots(number), authorization)
                status = status_of(await heard_by(server.host, server.port, None, request, _PATIENCE_S))
                statuses[status] = statuses.get(status, 0) + 1
                if number % 100 == 99:
                    held = await loop.run_in_executor(None, open_store(server.url).get)
                    assert held is not None
                    assert knows_the_secret or held == first
                    assert held.version >= 5

            await in_turns(TRIES, one)
            for _ in range(100):  # the last ones' ends may still be under way
                if len(os.listdir("/proc/self/fd")) <= before + 2:
                    break
                await asyncio.sleep(0.1)
            assert len(os.listdir("/proc/self/fd")) <= before + 2

    asyncio.run(run())
    # 500: aiohttp can't quote an Expect that is no text.
    assert all(status <= 500 for status in statuses), statuses
    if knows_the_secret:  # all but a client that happened to write a document
        assert set(statuses) <= {200, 400, 409, 413, 0}, statuses
    else:
        assert statuses.get(401, 0) + statuses.get(403, 0) > TRIES // 50, statuses
    assert growth() < _MAX_GROWTH
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


# ---- a job ----

PROVEN = "127.0.0.14"  # knows the secret


async def say_proven(host, port, lots):
    """What no launcher says, over a connection that has proved itself."""
    first = lots.choice((
        m.TransportConnection("j", 0, 1, host, 0), m.Ask(PROVEN, 1, "1", ""), m.WaitingController("h", "h:1"),
        m.Agent(m.Registration(host, "1", "", {}, [0])),
        m.Agent(m.Registration(host, "1", "", {}, [0]), report=m.ResyncReport([], {}, [])),
    ))  # fmt: skip
    said = hostile.mutated(lots, msgspec.to_builtins(first), 0.1) if lots.random() < 0.8 else hostile.document(lots)
    channel = await call(Machine(), PROVEN, host, port, bytes.fromhex(JOBS_SECRET), 30)
    try:
        await channel.flushed()
        await asyncio.get_running_loop().sock_sendall(channel._socket, message(said))
        while True:
            await asyncio.wait_for(channel.receive(m.FROM_CONTROLLER), _PATIENCE_S)
    except (OSError, ProtocolError, asyncio.TimeoutError):
        pass
    finally:
        channel.close()


TRAINS = """
import os, sys, time
import numpy as np
import ms_kungfu as kf
from ms_kungfu import comm
kf.init()
step, size = 0, kf.current_cluster_size()
while True:
    done = comm.all_reduce(np.array([os.path.exists(sys.argv[1])], np.int32), "max", name="done")[0]
    brought = np.arange(100_000, dtype=np.float32) % 97 + kf.current_rank() + step % 7
    found = comm.all_reduce(brought, name="gradients")
    expected = size * (np.arange(100_000) % 97 + step % 7) + size * (size - 1) // 2
    assert (found == expected.astype(np.float32)).all(), step
    step += 1
    if step == 1: print("trains", flush=True)
    if done: break
print("right", step, flush=True)
"""


def test_training_ignores_random_clients_and_logs_each_source_once(
    hosts,  # noqa: F811
    script,
    lots,
    tmp_path,
):
    flags, url = embedded(A)
    over = tmp_path / "over"
    job = hosts((*script(TRAINS), over), "-np", 4, *flags)
    job.wait_for("^trains$", {A: 2, B: 2})
    before = {host: len(job[host].stderr) for host in (A, B)}
    config_port = int(url.split(":")[2].split("/")[0])

    async def strangers():
        async def one(number):
            own = lots(number)
            if number % 7 == 6:
                await say_proven((A, B)[number % 2], job.port, own)
            elif number % 3 == 2:
                await heard_by(A, config_port, own.choice(SOURCES), a_request(own))
            else:
                await heard_by((A, B)[number % 3], job.port, own.choice(SOURCES), conversation(own, [b"x"]))

        await in_turns(TRIES, one)

    asyncio.run(strangers())
    over.touch()
    job.wait_for(r"^right \d+$", {A: 2, B: 2})
    job.assert_exit(0)
    for host in (A, B):
        said = job[host].stderr[before[host] :]
        assert not [line for line in said if "internal error" in line or "Traceback" in line], said
        said = [line for line in said if f"connection ended: from={PROVEN} " not in line]
        told = [line for line in said if "connection rejected: " in line]
        assert sorted(re.search(r"from=(\S+)", line)[1] for line in told) == sorted(SOURCES), said
        assert [line for line in said if line not in told and re.search("error|warning|fail", line, re.I)] == []
