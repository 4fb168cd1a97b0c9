"""Several hosts with TLS, and hosts of which some have it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import re
import ssl
import sys
import time

import pytest
from test_hosts import PROGRAMS, A, B, embedded, hosts  # noqa: F401
from test_hosts import SECRET as JOB_SECRET
from test_hosts_control import SAID, SECRET, Said, cluster, launchers, run

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import StoreUnreachableError, open_store
from ms_kungfu.launcher.control import ControlServer, RefusedError, call
from ms_kungfu.launcher.machine import Machine
from tests.certificates import Authority
from tests.ports import free_port

pytestmark = pytest.mark.timeout(120)
SOON_S = 30.0  # of the 60 s that the call has


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def host(authority):
    """The variables of a host with all the names of these tests."""
    return authority.sign(A, B, "localhost")


def machine(environ):
    made = Machine()
    made.environ = environ
    return made


@contextlib.asynccontextmanager
async def serving(environ):
    served = []

    async def serve(channel):
        served.append(await channel.receive(SAID))
        channel.send(served[-1])
        await channel.flushed()
        return False

    server, port = ControlServer(machine(environ), SECRET, serve), free_port()
    await server.start(A, port)
    try:
        yield port, served
    finally:
        await server.close()


def refusal(caller, called, secret=SECRET, at=A):
    """What the caller is told, and how soon."""
    told = []

    async def test():
        async with serving(called) as (port, served):
            began = time.monotonic()
            with pytest.raises(RefusedError) as raised:
                await call(machine(caller), B, at, port, secret, 60)
            assert time.monotonic() - began < SOON_S
            assert served == []
            told.append(str(raised.value))
            await asyncio.sleep(0.1)  # the other end says why, too

    run(test())
    return told[0]


# ---- launchers ----


def test_launchers_speak_through_it_whatever_they_say(host):
    async def test():
        async with serving(host) as (port, served):
            channel = await call(machine(host), B, A, port, SECRET, 10)
            long = Said("x" * 3_000_000)
            channel.send(long)
            assert await channel.receive(SAID) == long
            assert served == [long]
            channel.close()

    run(test())


def test_the_secret_is_still_asked_for(host, caplog):
    assert "the called launcher has another secret" in refusal(host, host, b"t" * 16)
    assert "the caller doesn't know the job's secret" in caplog.text


def test_where_one_end_alone_has_it_both_say_so_at_once(host, caplog):
    assert "the called launcher doesn't use TLS, but this host does; set KUNGFU_TLS_CERT" in refusal(host, {})
    assert "reason=\"the caller uses TLS, but this host doesn't; set KUNGFU_TLS_CERT" in caplog.text
    caplog.clear()
    assert "the called launcher uses TLS, but this host doesn't; set KUNGFU_TLS_CERT" in refusal({}, host)
    assert "reason=\"the caller doesn't use TLS, but this host does; set KUNGFU_TLS_CERT" in caplog.text


def test_host_with_wrong_certificate_is_rejected_and_both_ends_report_why(authority, host, tmp_path, caplog):
    stranger = Authority(tmp_path, "other").sign(A, B)
    for theirs in (stranger, {**stranger, "KUNGFU_TLS_CA": host["KUNGFU_TLS_CA"]}):
        said = refusal(theirs, host)
        assert "its certificate isn't accepted" in said or "it doesn't accept this host's certificate" in said
        assert 'reason="it' in caplog.text
        caplog.clear()
    assert "it must be for 127.0.0.1" in refusal(host, authority.sign(B))
    assert "it doesn't accept this host's certificate" in caplog.text


def test_the_connections_of_a_transport_take_their_tls_along(host, monkeypatch):
    made = []

    async def test():
        async with launchers(A, B) as two:
            for each in two:
                keep = each.make_transport

                def make_transport(*fds, keep=keep, **options):
                    made.append(options["tls"])
                    return keep(*fds, **options)

                each.machine.make_transport = make_transport
            parts = await asyncio.gather(*(each.make(cluster(3, A, B)) for each in two))
            assert [sorted(tls) for tls in made] == [
                sorted(c.fileno() for to_host in each.made[0].connections for c in to_host) for each in two
            ]
            assert [len(tls) for tls in made] == [3, 3]
            for part in parts:
                part.close()

    monkeypatch.setattr(Machine, "environ", host)
    run(test())


# ---- jobs ----


def with_tls(authority, *names):
    return {name: authority.sign(name) for name in names}


def test_job_over_two_hosts_with_tls_reduces_averages_and_resizes(hosts, authority):  # noqa: F811
    flags, url = embedded(A)
    flags[-1] = url = url.replace("http:", "https:")
    job = hosts(
        (sys.executable, PROGRAMS / "resizes.py", 4, 1, 3), "-np", 2, *flags, environments=with_tls(authority, A, B)
    )  # fmt: skip
    job.assert_exit(0)


COLLECTIVES = """
import numpy as np
import ms_kungfu as kf
from ms_kungfu import comm
kf.init()
rank, size = kf.current_rank(), kf.current_cluster_size()
for step in range(5):
    for count in (1, 1000, 3_000_000):
        found = comm.all_reduce(np.arange(count, dtype=np.float32) % 89 + rank, name=f"x{count}")
        expected = size * (np.arange(count) % 89) + size * (size - 1) // 2
        assert (found == expected.astype(np.float32)).all(), (step, count)
comm.save("m", np.full(500_000, rank, np.float32))
comm.barrier()
for other in range(size):
    assert (comm.request(other, "m").value == other).all(), other
comm.barrier()
print("right", flush=True)
"""


def test_data_and_models_go_through_it(hosts, script, authority):  # noqa: F811
    job = hosts(script(COLLECTIVES), "-np", 4, environments=with_tls(authority, A, B))
    job.assert_exit(0)
    assert len(job.wait_for("^right$", {A: 2, B: 2})) == 4


@pytest.mark.parametrize("has_it", [A, B])
def test_a_job_of_which_one_host_has_tls_ends_there_with_a_sentence(hosts, script, authority, has_it):  # noqa: F811
    job = hosts(script("pass"), environments=with_tls(authority, has_it))
    job[B].assert_exit(1)
    assert "doesn't use TLS" in job[B].output if has_it == B else "uses TLS" in job[B].output
    job[A].wait_for("connection rejected: from=127.0.0.2 reason=.the caller")
    job[A].signal(2)
    job[A].assert_exit(130)


def test_incomplete_tls_variables_or_foreign_certificate_prevent_the_start(kungfu_run, authority):
    two = ("-np", 2, "-H", f"{A}:1,{B}:1", "-self", A, "true")
    halves = {"KUNGFU_JOB_SECRET": JOB_SECRET, "KUNGFU_TLS_CA": str(authority.file)}
    for environment, why in (
        (halves, "TLS also requires KUNGFU_TLS_CERT and KUNGFU_TLS_KEY; only KUNGFU_TLS_CA is set"),
        ({**halves, **authority.sign(B)}, f"IP address mismatch, certificate is not valid for '{A}'"),
    ):
        job = kungfu_run(*two, environment=environment)
        job.assert_exit(2)
        assert why in job.output


# ---- the config server ----


@pytest.fixture
def server(start_module, host):
    program = start_module("ms_kungfu.config_server", "-port", 0, environment={"KUNGFU_JOB_SECRET": JOB_SECRET, **host})
    return program.wait_for(r"serving (https://\S+/config)")[0][1]


def test_config_server_speaks_https_to_clients_of_the_authority(server, host, tmp_path, monkeypatch):
    for name, value in host.items():
        monkeypatch.setenv(name, value)
    store = open_store(server, JOB_SECRET)
    assert store.put(Cluster((PeerID(A, 10000),), (), 0)).version == 0
    assert store.get().version == 0
    assert store.watch(0, 0.2) is None
    clear = open_store(server.replace("https:", "http:"))
    with pytest.raises(StoreUnreachableError):
        clear.get()
    for name, value in Authority(tmp_path, "other").sign(A).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StoreUnreachableError, match="its certificate isn't accepted"):
        open_store(server).get()
    context = ssl.create_default_context(cafile=host["KUNGFU_TLS_CA"])  # a client that shows none
    connection = http.client.HTTPSConnection(*re.findall(r"//([^:]+):(\d+)", server)[0], timeout=10, context=context)
    with contextlib.suppress(OSError):  # the server may be done with it before the answer is waited for
        connection.request("GET", "/config")
    with pytest.raises((OSError, http.client.HTTPException)):
        connection.getresponse()
    connection.close()
    for name, value in host.items():
        monkeypatch.setenv(name, value)
    assert store.get().version == 0


def test_a_url_that_does_not_fit_is_refused(kungfu_run, host, script):
    for flags, environment, why in (
        (["-config-server", f"http://{A}:9/config"], host, "isn't encrypted, but KUNGFU_TLS_CERT requires TLS"),
        (["-config-server", f"https://{A}:9/config"], {}, "serves https only with KUNGFU_TLS_CERT"),
    ):
        job = kungfu_run(
            "-np", 2, "-H", f"{A}:1,{B}:1", "-self", A, "-w", "-builtin-config-port", 9, *flags, *script("pass"),
            environment={"KUNGFU_JOB_SECRET": JOB_SECRET, **environment},
        )  # fmt: skip
        job.assert_exit(2)
        assert why in job.output
