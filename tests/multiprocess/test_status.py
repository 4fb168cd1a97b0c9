"""`kungfu-run status`: what it shows of jobs, with and without -w, over one and several hosts, and to which users."""

import http.client
import json
import os
import re
import signal
import socket
import sys
import time
from urllib.parse import urlsplit

import pytest
from launching import IN_VERSION, ONE_FOLDER, RECOVERY_PROGRAM, ROOT, Terminal

from ms_kungfu.config_server import secret_file
from ms_kungfu.launcher.status_socket import jobs_of_this_user
from tests.ports import free_port

pytestmark = pytest.mark.timeout(240)

A, B = "127.0.0.1", "127.0.0.2"


@pytest.fixture
def status(start_module, tmp_path):
    """Runs ``kungfu-run status WORDS`` as the user of the jobs of this test: exit code and standard output."""

    def run(*words, **environment):
        command = start_module(ONE_FOLDER, "status", *words, environment={"PYTHONPATH": str(ROOT), **environment})
        code = command.wait()
        assert "Traceback" not in command.output
        return code, "\n".join(command.stdout) or "\n".join(command.stderr)

    return run


@pytest.fixture
def one_job(status):
    """The document of the one job that runs, once it answers and `holds` of it."""

    def ask(holds=lambda job: True, *words, timeout=60.0):
        deadline = time.monotonic() + timeout
        while True:
            code, text = status("--json", *words)
            jobs = json.loads(text) if code == 0 else [{"error": text}]
            assert len(jobs) == 1, text
            if "error" not in jobs[0] and holds(jobs[0]):
                return jobs[0]
            assert time.monotonic() < deadline, text

    return ask


def test_ranks_steps_and_the_reasons_of_the_last_changes(job, status, one_job):
    run = job("-np", 2)
    first = run.in_version(0, 2)
    told = one_job(lambda job: all((p["step"] or 0) > 1 and p["step_s"] for p in job["processes"]))
    assert {p["rank"]: p["pid"] for p in told["processes"]} == first
    assert {(p["host"], p["standing"], p["state"]) for p in told["processes"]} == {(A, "member", "running")}
    assert (told["state"], told["cluster"], told["wanted"]) == ("running", {"version": 0, "size": 2}, None)
    assert told["command"][1].endswith("recovery.py")

    assert run.command("resize", 3)[0] == 0
    there = run.in_version(1, 3)
    os.kill(there[2], signal.SIGKILL)
    run.in_version(2, 2)
    later = one_job(lambda job: job["changes"][-1]["version"] == 2 and job["changes"][-1]["chosen_at"])
    start, growth, death = later["changes"]
    assert (start["size"], start["size_before"]) == (2, None)
    assert (growth["size"], growth["size_before"]) == (3, 2)
    assert "kungfu-run resize" in growth["why"]
    assert growth["chosen_at"] >= growth["wanted_at"] >= start["chosen_at"]
    assert (death["size"], death["size_before"]) == (2, 3)
    assert f"pid {there[2]}) was killed by SIGKILL" in death["why"]
    assert {p["rank"]: p["pid"] for p in later["processes"]} == first

    assert one_job(lambda job: True, later["config_server"])["job"] == told["job"]
    code, text = status()
    lines = text.splitlines()
    assert code == 0
    assert lines[0].startswith(f"job of process {run.program.process.pid} on {A}, since ")
    assert "running, cluster version 2 of 2 workers" in lines[1]
    rows = [line.split() for line in lines if line.split()[1:2] == [A]]
    assert [row[:4] for row in rows] == [[str(r), A, f"{A}:{10000 + r}", str(first[r])] for r in range(2)]
    assert all(int(row[4]) > 0 and row[-1] == "running" for row in rows)
    assert lines[-1].endswith("the others go on without it")
    run.finish(2)
    assert status() == (0, "no job of this user runs on this machine")


def test_live_view_shows_a_job_until_ctrl_c_or_its_end(job, start_module):
    run = job("-np", 2)
    pids = run.in_version(0, 2)
    environment = {"PYTHONPATH": str(ROOT), "XDG_RUNTIME_DIR": str(run.program.runtime_dir), "TERM": "xterm"}
    views = [Terminal(start_module, ONE_FOLDER, "top", environment=environment) for _ in range(2)]
    for view in views:
        row = rf" +1 {A} +{pids[1]} +[1-9]\d* .* running$"
        while not any(re.match(row, line) for line in view.rows()):
            assert view.read(), view.rows()
    views[0].program.signal(signal.SIGINT)
    while views[0].read():
        pass
    assert views[0].program.wait() == 0
    run.finish(2)
    while views[1].read():
        pass
    assert views[1].program.wait() == 0
    assert views[1].rows()[-1] == "The job has ended."


def test_joining_worker_is_shown_in_the_status_before_it_has_joined(job, one_job):
    run = job("-np", 1, program=["slow=1000"])
    run.in_version(0, 1)
    assert run.command("resize", 2)[0] == 0
    run.wait_for(r"^parked pid (\d+)")
    told = one_job(lambda job: job["state"] == "resizing")
    assert (told["cluster"]["size"], told["wanted"]["size"]) == (1, 2)
    assert told["why"] == "cluster version 1 waits for 1 worker to start"
    assert [(p["standing"], p["state"], p["why"]) for p in told["processes"]] == [
        ("member", "running", ""),
        ("joining", "running", "joining, not ready yet"),
    ]
    os.kill(told["processes"][0]["pid"], signal.SIGSTOP)
    one_job(lambda job: job["processes"][0]["why"] == "stopped by a signal")
    os.kill(told["processes"][0]["pid"], signal.SIGCONT)
    run.program.signal(signal.SIGTERM)
    run.program.assert_exit(128 + signal.SIGTERM)


def test_a_job_that_does_not_change_and_one_that_is_killed(kungfu_run, script, status, one_job):
    run = kungfu_run("-np", 2, *script("import time; print('there', flush=True); time.sleep(1000)"))
    run.wait_for("^there", 2)
    told = one_job()
    assert (told["config_server"], told["follows_changes"]) == (None, False)
    assert [(p["rank"], p["state"], p["why"], p["step"]) for p in told["processes"]] == [
        (0, "running", "hasn't joined yet", None),
        (1, "running", "hasn't joined yet", None),
    ]
    run.signal(signal.SIGSTOP)
    code, text = status()
    assert (code, text.count("\n")) == (1, 0)
    assert text.startswith(f"the job of process {run.process.pid} doesn't answer within 3 s")
    run.signal(signal.SIGKILL)
    run.wait()
    run.assert_gone(time.monotonic())
    assert status() == (0, "no job of this user runs on this machine")


def test_a_job_that_ends_says_so(kungfu_run, script, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setattr(secret_file, "_EVERYBODYS", ())
    stays = "import signal, time; signal.signal(2, signal.SIG_IGN); print('there', flush=True); time.sleep(1000)"
    told = []
    for _ in range(5):  # it takes a second to end, which a busy machine may let pass
        run = kungfu_run("-grace-period", "1s", *script(stays))
        run.wait_for("^there")
        run.signal(signal.SIGINT)
        while run.process.poll() is None:
            told += jobs_of_this_user(5)
        assert all("is just ending" in job["error"] for job in told if "error" in job)
        ends = [job for job in told if job.get("state") == "ending"]
        if ends:
            break
    assert {job["state"] for job in told if "error" not in job} <= {"running", "ending"}
    assert {job["why"] for job in ends} == {"interrupted by SIGINT"}
    assert [(p["state"], p["why"]) for p in ends[0]["processes"]] == [("running", "hasn't joined yet")]
    assert list(jobs_of_this_user(5)) == []


def test_two_jobs_of_which_one_is_asked_for(job, kungfu_run, script, status):
    one = job("-np", 1)
    one.in_version(0, 1)
    other = kungfu_run("-np", 1, *script("import time; print('there', flush=True); time.sleep(1000)"))
    other.wait_for("^there")
    _, text = status("--json")
    assert {j["launcher"]["pid"] for j in json.loads(text)} == {one.program.process.pid, other.process.pid}
    url = one.wait_for(r"config server: url=(http://\S+/config)")[0][1]
    _, text = status(url.replace("127.0.0.1", "localhost"), "-json")
    (told,) = json.loads(text)
    assert told["launcher"]["pid"] == one.program.process.pid
    (told,) = json.loads(status("-config-server", url, "-json")[1])
    assert told["launcher"]["pid"] == one.program.process.pid
    code, text = status(url, "-config-server", url)
    assert (code, "both name a job; give only one of them" in text) == (2, True)
    other.signal(signal.SIGTERM)
    other.wait()
    one.finish(1)


def test_from_elsewhere_the_secret_shows_it_and_nothing_else_does(job, status, tmp_path):
    run = job("-np", 1)
    run.in_version(0, 1)
    url = run.wait_for(r"config server: url=(http://\S+/config)")[0][1]
    secret = next(run.program.runtime_dir.rglob("*.secret")).read_text()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    there = {"XDG_RUNTIME_DIR": str(elsewhere), "TMPDIR": str(elsewhere)}
    code, text = status(url, "--json", **there, KUNGFU_JOB_SECRET=secret)
    assert (code, [job["launcher"]["pid"] for job in json.loads(text)]) == (0, [run.program.process.pid])
    code, text = status(url, **there)
    assert (code, "no job of this user" in text, "\n" in text) == (1, True, False)
    code, text = status(url, **there, KUNGFU_JOB_SECRET="00")
    assert (code, "403" in text, "\n" in text) == (1, True, False)
    parts = urlsplit(url)
    for header, expected in (({}, 401), ({"Authorization": "Bearer 00"}, 403), ({"Authorization": secret}, 401)):
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=10)
        connection.request("GET", "/config/status", headers=header)
        response = connection.getresponse()
        assert (response.status, b"launcher" in response.read()) == (expected, False)
        connection.close()
    run.finish(1)


def test_a_config_server_without_a_job_shows_what_it_holds(start_module, status, tmp_path):
    (tmp_path / "cluster.json").write_text(json.dumps({"Workers": ["10.0.0.1:10000", "10.0.0.2:10000"]}))
    server = start_module("ms_kungfu.config_server", "-port", 0, "-init", tmp_path / "cluster.json")
    url = server.wait_for(r"serving (http://\S+/config)")[0][1]
    code, text = status(url)
    assert code == 0
    assert text.splitlines()[0] == f"config server {url}"
    assert "version 0 of 2 workers is desired" in text
    assert [line.split()[1] for line in text.splitlines() if ":10000" in line] == ["10.0.0.1", "10.0.0.2"]


def test_status_clients_that_do_not_read_delay_no_other(job, one_job):
    run = job("-np", 1)
    run.in_version(0, 1)
    path = next(run.program.runtime_dir.rglob("*.status"))
    silent = []
    for _ in range(60):
        silent.append(socket.socket(socket.AF_UNIX))
        silent[-1].settimeout(10)
        silent[-1].connect(f"/proc/self/fd/{os.open(path.parent, os.O_RDONLY)}/{path.name}")
    assert one_job()["state"] == "running"
    for each in silent:
        each.close()
    run.finish(1)


def test_every_host_reports_the_controllers_status_of_all_hosts(start_module, one_job, status, tmp_path):
    secret, port = "0123456789abcdef" * 2, free_port()
    words = ["-np", 2, "-H", f"{A}:1,{B}:1", "-port", port]
    program = [sys.executable, RECOVERY_PROGRAM]
    runs = {}
    for host in (A, B):
        folder = tmp_path / host
        folder.mkdir(mode=0o700)
        runs[host] = start_module(
            "ms_kungfu.launcher", "-self", host, *words, *program,
            environment={"KUNGFU_JOB_SECRET": secret, "XDG_RUNTIME_DIR": str(folder), "TMPDIR": str(folder)},
        )  # fmt: skip
        if host == A:
            runs[A].wait_for(f"waiting for hosts: hosts={B}")
            code, text = status(XDG_RUNTIME_DIR=str(folder))
            assert (code, f"starting: waits for kungfu-run on {B}" in text) == (0, True), text
    pids = {host: int(run.wait_for(IN_VERSION.format(0, 2))[0][2]) for host, run in runs.items()}

    def document(host, **more):
        code, text = status("--json", XDG_RUNTIME_DIR=str(tmp_path / host), TMPDIR=str(tmp_path / host), **more)
        assert code == 0, text
        return json.loads(text)

    deadline = time.monotonic() + 60
    while not all(p["step"] for host in (A, B) for job in document(host) for p in job["processes"]):
        assert time.monotonic() < deadline
    for host in (A, B):
        (told,) = document(host)
        assert {p["host"]: p["pid"] for p in told["processes"]} == pids
        assert told["launcher"] == {"host": A, "pid": runs[A].process.pid}
        assert [each["name"] for each in told["hosts"]] == [A, B]
    # Where one machine plays both, the job is shown once.
    os.rename(next((tmp_path / B).rglob("*.status")), tmp_path / A / "ms_kungfu" / "1.other.status")
    assert len(document(A)) == 1
    for run in runs.values():
        run.signal(signal.SIGUSR1)
    for run in runs.values():
        run.assert_exit(0)
