# ruff: noqa: F811
"""Before a job on several hosts has begun: which host waits for which, for how long, and what a waiting host says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launching import RECOVERY_PROGRAM
from test_hosts import ENDS, SECRET, A, B, C, all_in_version, embedded, finish, free_port, hosts  # noqa: F401

from ms_kungfu.launcher.control import ControlServer
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.wire import messages as m

D = "127.0.0.4"
pytestmark = pytest.mark.timeout(120)
COMMANDS = [sys.executable, "-m", "ms_kungfu.launcher"]


def told(run, *words):
    """What `kungfu-run resize` or `evict` says, and its exit status."""
    done = subprocess.run([*COMMANDS, *words], env=run.environment, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr, done.returncode


# ---- requests for another size before it has begun ----


def test_size_requested_while_a_host_is_missing_applies_at_the_start(hosts):
    flags, url = embedded(A)
    job = hosts([sys.executable, RECOVERY_PROGRAM], *flags, "-np", 4, slots={A: 2, B: 1, C: 1},
                environments={C: {"KUNGFU_JOB_SECRET": "ff" * 16}})  # fmt: skip
    job[C].assert_exit(1)
    job[A].wait_for(f"host registered: host={B} ")
    assert "cluster version 1: 4 -> 3 workers" in told(job[A], "resize", "3", "-config-server", url)[0]
    assert told(job[A], "evict", "0", "-config-server", url)[1] == 0
    output, code = told(job[A], "resize", "9", "-config-server", url)
    assert code == 1
    assert "slots" in output
    job.runs[C] = job.start_one(C)
    all_in_version(job, 2, {A: 1, B: 1})
    finish(job, {A: 1, B: 1})


# ---- which host waits for which ----


@pytest.fixture
def launch(kungfu_run, script):
    """Starts kungfu-run on a host: launch(host, -H, port, *flags, variable=value)."""

    def start(host, listed, port, *flags, **environment):
        words = ["-self", host, "-H", listed, "-port", port, *flags, *script(ENDS), "0"]
        return kungfu_run(*words, environment={"KUNGFU_JOB_SECRET": SECRET, **environment})

    return start


def test_two_hosts_that_both_wait_as_the_head_node_end_with_a_sentence(launch):
    port = free_port()
    orders = {A: f"{A}:1,{B}:1", B: f"{B}:1,{A}:1"}
    runs = {host: launch(host, listed, port) for host, listed in orders.items()}
    for host, other in ((A, B), (B, A)):
        runs[host].assert_exit(1)
        assert runs[host].stderr[-1] == (
            f"kungfu-run: {other} waits as the head node, too: give the same -H, in the same order, on all hosts, and "
            f"the same -config-server ({host} has -H {orders[host]}, {other} has -H {orders[other]})"
        )


def test_wait_for_a_host_that_calls_another_one_is_reported_at_both(launch):
    port = free_port()
    head, other = launch(A, f"{A}:1,{B}:1", port), launch(B, f"{C}:1,{A}:1,{B}:1", port)
    head.wait_for(rf"kungfu-run on {B} has -H {C}:1,{A}:1,{B}:1 and calls {C}; this host has -H {A}:1,{B}:1\. Give the")
    other.wait_for(
        rf"hosts differ: host={A} reason=.kungfu-run waits on that host as the head node of -H {A}:1,{B}:1, but this"
    )
    for run in (head, other):
        run.signal(signal.SIGINT)
        run.assert_exit(130)


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        ({"calls": A, "for_s": 9.5}, f"{B} calls {A}:PORT but can't connect; is that port open on this host"),
        pytest.param(
            {"calls": C, "in_a_job": True},
            f"{B} takes part in another job, controlled by {C}; give each job on the host its own -port",
            marks=pytest.mark.long,
        ),
    ],
)
def test_head_node_reports_the_reason_of_a_host_that_does_not_come(launch, answer, told):
    port = free_port()
    head = launch(A, f"{A}:1,{B}:1", port, KUNGFU_JOIN_TIMEOUT="8")

    async def host_b():
        async def serve(channel):
            assert await channel.receive(m.FIRST_WORDS) == m.WaitingController(A, f"{A}:1,{B}:1")
            channel.send(m.Calls(f"{A}:1,{B}:1", **answer))
            await channel.flushed()
            return False

        server = ControlServer(Machine(), bytes.fromhex(SECRET), serve)
        await server.start(B, port)
        try:
            await asyncio.get_running_loop().run_in_executor(None, head.wait)
        finally:
            await server.close()

    asyncio.run(host_b())
    head.assert_exit(1)
    told = told.replace("PORT", str(port))
    assert told in head.output
    assert f"waiting for hosts: hosts={B} KUNGFU_JOIN_TIMEOUT=8" in head.output
    assert f"no message came from {B} within 8 s (KUNGFU_JOIN_TIMEOUT)" in head.stderr[-1]
    assert told in head.stderr[-1]


def test_head_node_reports_once_why_hosts_do_not_answer(launch):
    """In one line for all that have the reason in common. Another program listens at one, and hangs up."""
    port, listed = free_port(), f"{A}:1,{B}:1,{C}:1,{D}:1"
    with socket.create_server((D, port)) as stranger:
        threading.Thread(target=hang_up, args=(stranger,), daemon=True).start()
        head = launch(A, listed, port, KUNGFU_JOIN_TIMEOUT="15")
        head.assert_exit(1)
    told = [line.partition("no answer: hosts=")[2] for line in head.stderr if "no answer: " in line]
    assert sorted(told) == [
        f'{B}:{port},{C}:{port} reason="Connection refused". Remedy: is kungfu-run running there, and is port '
        f"{port} open?",
        f'{D}:{port} reason="another listener closed the connection". Remedy: does another program use port '
        f"{port} there? -port sets another port, the same on all hosts",
    ]
    assert f"Last result for {B}: no answer from {B}:{port}: Connection refused" in head.stderr[-1]


def hang_up(listener):
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def test_host_with_another_program_is_reported_there_and_at_the_head_node(kungfu_run, script, tmp_path):
    """Where another one has the interpreter and the script is its own affair."""
    port, (python, worker) = free_port(), script("import ms_kungfu as kf\nkf.init()")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "worker.py").write_text(Path(worker).read_text())
    commands = {
        A: [python, worker, "--epochs=1"],
        B: [python, worker, "--epochs=2"],
        C: ["python3", tmp_path / "elsewhere" / "worker.py", "--epochs=1"],
    }
    runs = {
        host: kungfu_run(
            "-self", host, "-H", f"{A}:1,{B}:1,{C}:1", "-port", port, "-np", 3, *command,
            environment={"KUNGFU_JOB_SECRET": SECRET, "PATH": f"{Path(python).parent}:{os.environ['PATH']}"},
        )
        for host, command in commands.items()
    }  # fmt: skip
    for run in runs.values():
        run.assert_exit(0)
    warned = {
        host: [line for line in run.stderr if "should run the same training" in line] for host, run in runs.items()
    }
    assert [len(warned[host]) for host in (A, B, C)] == [1, 1, 0]
    for host in (A, B):
        assert f'{B} runs "' in warned[host][0]
        assert f'worker.py --epochs=2", but {A} runs "' in warned[host][0]
        assert warned[host][0].endswith('worker.py --epochs=1": all hosts should run the same training"')
        started = next(line for line in runs[A].lines if "worker started: " in line)
        assert host != A or runs[A].lines.index(warned[host][0]) < runs[A].lines.index(started)


# ---- for how long ----


def test_calling_host_reports_why_no_host_answers_and_retries_for_a_time(launch):
    port = free_port()
    run = launch(B, f"{A}:1,{B}:1", port, KUNGFU_JOIN_TIMEOUT="8")
    run.assert_exit(1)
    reasons = [line for line in run.stderr if "no answer: " in line]
    assert len(reasons) == 1
    assert (
        f'no answer: hosts={A}:{port} reason="Connection refused". Remedy: is kungfu-run running there, and is port'
        in reasons[0]
    )
    assert "within 8 s (KUNGFU_JOIN_TIMEOUT)" in run.stderr[-1]


def test_head_node_that_rejected_a_host_reports_how_long_it_still_waits(launch):
    port = free_port()
    head = launch(A, f"{A}:1,{B}:1", port, "-np", 2)
    launch(B, f"{A}:1,{B}:1", port, "-np", 1).assert_exit(1)
    refused = f"-np is 1 on {B}, but 2 on {A}; give the same flags on all hosts"
    head.wait_for(rf"{refused}.; {B} can still register within \d+ s \(KUNGFU_JOIN_TIMEOUT\)")
    launch(B, f"{A}:1,{B}:1", port, "-np", 2, KUNGFU_JOB_SECRET="ff" * 16).assert_exit(1)
    head.wait_for(rf"connection rejected: from={B} .*; {B} can still register within \d+ s")
    head.signal(signal.SIGINT)
    head.assert_exit(130)


@pytest.mark.parametrize(
    ("host", "told"),
    [
        (A, f"kungfu-run: the job has not begun within -timeout 2 s: no message came from {B}"),
        (
            B,
            f"kungfu-run: the job has not begun within -timeout 2 s: its head node, {A}, was not reached: Connection "
            "refused",
        ),
    ],
)
def test_a_timeout_holds_while_a_host_is_missing(launch, host, told):
    run = launch(host, f"{A}:1,{B}:1", free_port(), "-timeout", "2s")
    run.assert_exit(124)
    assert run.stderr[-1] == told


@pytest.mark.long
def test_timeout_of_the_head_node_ends_the_hosts_that_have_come(launch):
    port, listed = free_port(), f"{A}:1,{B}:1,{C}:1"
    runs = [launch(A, listed, port, "-timeout", "8s"), launch(B, listed, port, "-timeout", "8s")]
    for run in runs:
        run.assert_exit(124)
    assert f"the job has not begun within -timeout 8 s: no message came from {C}" in runs[0].stderr[-1].replace(
        f"{B}, ", ""
    )


def test_a_config_port_that_is_taken_is_the_same_on_all_hosts(launch):
    with socket.create_server((A, 0)) as server:
        taken = server.getsockname()[1]
        run = launch(A, f"{A}:1,{B}:1", free_port(), "-w", "-builtin-config-port", taken)
        run.assert_exit(1)
        assert run.stderr[-1].endswith("is taken; give another port (the same port on all hosts)")
