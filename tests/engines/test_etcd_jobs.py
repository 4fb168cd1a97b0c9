"""Jobs whose wanted cluster is in an etcd of three members, which are killed, stopped and away."""

from __future__ import annotations

import base64
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import open_store
from ms_kungfu.errors import ConfigServerError
from tests.multiprocess.launching import IN_VERSION, RECOVERY_PROGRAM
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(180)
STEADY = Path(__file__).with_name("programs") / "steady.py"
ELECTION_MS = 2500
SECRET = "0123456789abcdef" * 2
A, B, C = (f"127.0.0.{number}" for number in (1, 2, 3))
NOBODY = dict.fromkeys(("ETCDCTL_USER", "ETCDCTL_PASSWORD", "ETCDCTL_CACERT", "ETCDCTL_CERT", "ETCDCTL_KEY"), "")


def in_version(program, version, size):
    found = program.wait_for(rf"^in version {version} rank (\d+) of {size} pid (\d+)", size, timeout=60)
    return {int(match[1]): int(match[2]) for match in found}


def versions(etcd, job):
    """Of etcd's own history, which has neither gap nor fork."""
    history = etcd.history(job)
    assert [each["nth"] for each in history] == list(range(1, len(history) + 1))
    found = [each["Version"] for each in history if each["Cluster"] is not None]
    assert found == list(range(len(found)))
    return found


def command(start_module, *words):
    done = start_module("ms_kungfu.launcher", *words)
    return done.wait(), done.output


def finish(program, size):
    program.signal(signal.SIGUSR1)
    program.assert_exit(0)
    program.assert_gone(time.monotonic())
    assert len({match[1] for match in program.wait_for(r"^finished pid \d+ step (\d+)", size)}) == 1


# ---- what a job does with it ----


def test_a_job_follows_what_is_written_to_etcd(etcd, kungfu_run, start_module):
    url = etcd.url("follows")
    job = kungfu_run("-w", "-np", 2, "-config-server", url, sys.executable, RECOVERY_PROGRAM)
    job.wait_for(IN_VERSION.format(0, 2), 2)
    code, told = command(start_module, "resize", 3, "-config-server", url)
    assert (code, "cluster version 1: 2 -> 3 workers" in told) == (0, True), told
    job.wait_for(IN_VERSION.format(1, 3), 3)
    code, told = command(start_module, "evict", 0, "-config-server", url)
    assert code == 0, told
    job.wait_for(IN_VERSION.format(2, 2), 2)
    code, told = command(start_module, "status", url)
    assert (code, "version 2" in told) == (0, True), told
    finish(job, 2)
    assert versions(etcd, "follows") == [0, 1, 2]


def test_workers_ask_for_a_size_and_the_next_job_counts_on(etcd, kungfu_run):
    url = etcd.url("asks")
    for first in (0, 2):
        job = kungfu_run("-w", "-np", 1, "-config-server", url, sys.executable, RECOVERY_PROGRAM, f"schedule={20}:2")
        job.wait_for(IN_VERSION.format(first, 1), 1)
        job.wait_for(IN_VERSION.format(first + 1, 2), 2)
        finish(job, 2)
    assert versions(etcd, "asks") == [0, 1, 2, 3]


@pytest.mark.parametrize("away_s", [3.0, pytest.param(30.0, marks=pytest.mark.long)])
def test_training_continues_without_etcd_and_failures_and_changes_wait(etcd_of, kungfu_run, away_s):
    etcd = etcd_of()
    url = etcd.url("away")
    job = kungfu_run("-w", "-np", 3, "-config-server", url, sys.executable, STEADY)
    before = in_version(job, 0, 3)
    etcd.close()
    os.kill(before[2], signal.SIGKILL)
    job.wait_for("the others go on without it")
    time.sleep(away_s)
    assert "in version 1" not in job.output
    steps = [int(match[1]) for match in job.wait_for(r"^step (\d+) longest", 2 * int(away_s))]
    assert steps[-1] > steps[0]
    for member in range(3):
        etcd.start(member)
    after = in_version(job, 1, 2)
    assert {*after.values()} == {before[0], before[1]}
    finish(job, 2)
    assert versions(etcd, "away") == [0, 1]


def lose_members(etcd, job, kungfu_run, times, slack_s):
    """Kills the leader and a follower in turn, `times` in all, under a job of 6 workers."""
    run = kungfu_run("-w", "-np", 6, "-config-server", etcd.url(job), sys.executable, STEADY)
    in_version(run, 0, 6)
    at = len(run.lines)
    for number in range(times):
        leader = etcd.leader()
        lost = leader if number % 2 == 0 else (leader + 1) % 3
        etcd.kill(lost)
        time.sleep(1.5)
        etcd.start(lost)
        etcd.wait_until_ready()
    longest = [float(match[1]) for match in map(re.compile(r"longest ([\d.]+)").search, run.lines[at:]) if match]
    assert max(longest) < ELECTION_MS / 1000 + slack_s, longest  # a worker that waits for etcd would wait for that
    return run


@pytest.mark.parametrize(
    ("times", "slack_s"), [(2, 30.0), pytest.param(20, 0.0, marks=[pytest.mark.long, pytest.mark.timing])]
)
def test_no_step_waits_for_etcd(etcd_of, kungfu_run, start_module, times, slack_s):
    etcd = etcd_of(election_ms=ELECTION_MS)
    run = lose_members(etcd, "members", kungfu_run, times, slack_s)
    code, told = command(start_module, "resize", 5, "-config-server", etcd.url("members"))
    assert code == 0, told
    in_version(run, 1, 5)
    finish(run, 5)
    assert versions(etcd, "members") == [0, 1]


def test_a_job_over_several_hosts_is_joined_by_way_of_etcd(etcd, start_module):
    url, port = etcd.url("hosts"), free_ports(1)[0]
    words = ["-H", f"{A}:2,{B}:2", "-port", port, "-w", "-np", 4, "-config-server", url, sys.executable, STEADY]
    secret = {"KUNGFU_JOB_SECRET": SECRET}
    runs = [start_module("ms_kungfu.launcher", "-self", host, *words, environment=secret) for host in (A, B)]
    for run in runs:
        run.wait_for(r"^in version 0 rank \d of 4 ", 2, timeout=60)
    assert f"config server: url={url}" in runs[0].output, "which -join and resize take"
    runs.append(start_module("ms_kungfu.launcher", "-join", url, "-self", f"{C}:2", environment=secret))
    runs[2].wait_for("host registered: head_node=", timeout=60)
    while C not in (open_store(url).get().slots or {}):
        time.sleep(0.05)
    store = open_store(url)
    held = store.get()
    store.put(held.resized(6, range(10000, 10010)))
    for run in runs:
        run.wait_for(rf"^in version {held.version + 1} rank \d of 6 ", 2, timeout=60)
    runs[1].signal(signal.SIGTERM)
    runs[1].assert_exit(0)
    runs[0].wait_for(r"^in version \d+ rank \d of 4 ", 2 + 2, timeout=60)
    runs[0].signal(signal.SIGUSR1)
    for run in (runs[0], runs[2]):
        run.assert_exit(0)
    versions(etcd, "hosts")
    code, told = command(start_module, "status", url)
    assert (code, "  ended: exit code 0" in told) == (0, True), told
    code, told = command(start_module, "status", "--json", url)
    assert (code, re.search(r'"exit_code": 0\b', told) is not None) == (0, True), told  # examples/kubernetes asks so


# ---- what is refused ----


def refused(run, *parts):
    """In one sentence, and nothing is left running."""
    assert run.wait(40) == 1, run.output
    run.assert_gone(time.monotonic())
    (line,) = [line for line in run.stderr if line.startswith("kungfu-run: ")]
    for part in parts:
        assert part in line, line
    assert "Traceback" not in run.output


def test_an_etcd_that_is_not_there(kungfu_run):
    ports = free_ports(2)
    url = f"etcd://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}/job"
    refused(kungfu_run("-w", "-config-server", url, "sleep", 10), url, "Connection refused", "is it running?")


def test_server_that_is_not_etcd_is_refused(start_module, kungfu_run, tmp_path):
    (tmp_path / "other").mkdir(mode=0o700)  # the server leaves its secret, for as long as it runs
    environment = {"XDG_RUNTIME_DIR": str(tmp_path / "other")}
    server = start_module("ms_kungfu.config_server", "-port", 0, environment=environment)
    port = server.wait_for(r"serving http://\S+:(\d+)/config")[0][1]
    refused(
        kungfu_run("-w", "-config-server", f"etcd://127.0.0.1:{port}/job", "sleep", 10),
        f"127.0.0.1:{port} sent an answer that doesn't follow etcd's v3 API", "is this the client address",
    )  # fmt: skip


def test_full_etcd_database_is_reported_and_written_once_space_is_free(etcd_of):
    etcd = etcd_of(1, flags=("--quota-backend-bytes=1000000",))
    store = open_store(etcd.url("full"))
    first = store.put(Cluster((PeerID(A, 10000),), (), 0))
    filling = base64.b64encode(os.urandom(100_000)).decode()
    for number in range(100):
        key = base64.b64encode(f"filling{number % 2}".encode()).decode()
        if "error" in etcd.call("/v3/kv/put", {"key": key, "value": filling}):
            break
    with pytest.raises(ConfigServerError, match="its database is full; free space with etcdctl compact"):
        store.put(replace(first, version=1))
    assert store.get() == first
    etcd.compact()
    etcd.etcdctl("defrag")
    etcd.etcdctl("alarm", "disarm")
    assert store.put(replace(first, version=1)).version == 1


def test_users_and_passwords_as_etcdctl_has_them(etcd_of, kungfu_run):
    etcd = etcd_of(1)
    url = etcd.url("guarded")
    for words in (
        ["user", "add", "root:rootpass"],
        ["user", "add", "kungfu:right"],
        ["user", "add", "other:right"],
        ["role", "add", "jobs"],
        ["role", "grant-permission", "jobs", "readwrite", "--prefix=true", "/ms_kungfu/"],
        ["user", "grant-role", "kungfu", "jobs"],
        ["user", "grant-role", "root", "root"],
        ["auth", "enable"],
    ):
        etcd.etcdctl(*words)

    def run(**environment):
        words = ["-w", "-config-server", url, sys.executable, "-c", "import time; time.sleep(1)"]
        return kungfu_run(*words, environment={**NOBODY, **environment})

    refused(run(), url, "requires a user", "set ETCDCTL_USER=NAME:PASSWORD")
    refused(run(ETCDCTL_USER="kungfu:wrong"), url, "rejects user 'kungfu'", "correct ETCDCTL_USER")
    refused(run(ETCDCTL_USER="other:right"), url, "user 'other' may not", "etcdctl role grant-permission")
    for right in ({"ETCDCTL_USER": "kungfu:right"}, {"ETCDCTL_USER": "kungfu", "ETCDCTL_PASSWORD": "right"}):
        well = run(**right)
        well.assert_exit(0)
        assert "right" not in well.output


def test_certificates_as_etcdctl_has_them(etcd_of, kungfu_run, tmp_path):
    def openssl(*words):
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=tmp_path, stdin=subprocess.DEVNULL)

    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=ca", "-keyout", "ca.key",
            "-out", "ca.crt")  # fmt: skip
    (tmp_path / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("server", "client"):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out",
                f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", "-days",
                "2", "-extfile", "names", "-out", f"{name}.crt")  # fmt: skip
    files = {word: str(tmp_path / word) for word in ("ca.crt", "server.crt", "server.key", "client.crt", "client.key")}
    etcd = etcd_of(
        1, flags=("--cert-file", files["server.crt"], "--key-file", files["server.key"], "--client-cert-auth",
                "--trusted-ca-file", files["ca.crt"])
    )  # fmt: skip
    url = etcd.url("tls").replace("etcd:", "etcds:")

    def run(**environment):
        words = ["-w", "-config-server", url, sys.executable, "-c", "import time; time.sleep(1)"]
        return kungfu_run(*words, environment={**NOBODY, **environment})

    refused(run(), url, "certificate isn't trusted", "ETCDCTL_CACERT")
    pair = {"ETCDCTL_CERT": files["client.crt"], "ETCDCTL_KEY": files["client.key"]}
    run(ETCDCTL_CACERT=files["ca.crt"], **pair).assert_exit(0)
