"""kungfu-distribute over an ssh of the tests' own, which runs the host's command line here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
from launching import RECOVERY_PROGRAM
from test_hosts import free_port

from ms_kungfu._run_loop import run
from ms_kungfu.launcher.distribute import _Distribution, script_for
from tests.event_loops import EventOfPython39

MODULE = "ms_kungfu.launcher.distribute"
# Like ssh without a terminal: what runs on the host doesn't end when the ssh is killed, but loses its input.
FAKE_SSH = f"""#!{sys.executable}
import json, os, subprocess, sys
*options, host, command = sys.argv[1:]
with open(os.path.join(os.path.dirname(sys.argv[0]), host + ".json"), "w") as file:
    json.dump(sys.argv[1:], file)
if host == "down":
    print("ssh: connect to host down port 22: No route to host", file=sys.stderr)
    sys.exit(255)
environment = {{k: v for k, v in os.environ.items() if k != "KUNGFU_JOB_SECRET"}}
read, write = os.pipe()
environment.update(AT=host, SSH=str(os.getpid()))
shell = subprocess.Popen(["sh", "-c", command], stdin=read, env=environment, start_new_session=True)
os.close(read)
import threading
def pump():
    while data := os.read(0, 4096):
        os.write(write, data)
    os.close(write)
threading.Thread(target=pump, daemon=True).start()
sys.exit(shell.wait())
"""


@pytest.fixture
def distribute(start_module, tmp_path):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE_SSH)
    (folder / "ssh").chmod(0o755)

    def start(*arguments, environment=None):
        path = f"{folder}:{os.environ['PATH']}"
        return start_module(MODULE, *arguments, environment={"PATH": path, **(environment or {})})

    return start


def told_to_ssh(tmp_path, host):
    return json.loads((tmp_path / "bin" / f"{host}.json").read_text())


def test_the_command_runs_on_each_host_and_each_line_has_its_host(distribute, tmp_path):
    program = distribute(
        "-H", "a:2,b:1:login.b,[fd00::3]:1", "-u", "ml", "sh", "-c", 'echo "at $AT $1"', "x", "it's $HOME"
    )
    program.assert_exit(0)
    assert sorted(program.stdout) == [
        "[[fd00::3]] at fd00::3 it's $HOME",
        "[a] at a it's $HOME",
        "[b] at login.b it's $HOME",
    ]
    assert program.stderr == []
    words = told_to_ssh(tmp_path, "login.b")
    assert words[words.index("-l") + 1] == "ml"
    assert "BatchMode=yes" in words


def test_distribute_runs_the_command_in_the_same_folder_and_environment(distribute, tmp_path):
    program = distribute("-H", "a", "sh", "-c", "pwd; command -v python")
    program.assert_exit(0)
    assert program.stdout == [f"[a] {tmp_path}", f"[a] {Path(sys.executable).parent / 'python'}"]
    (tmp_path / "with space").mkdir()
    program = distribute("-H", "a", "-dir", tmp_path / "with space", "pwd")
    program.assert_exit(0)
    assert program.stdout == [f"[a] {tmp_path}/with space"]
    program = distribute("-H", "a", "-dir", "/no/such/folder", "pwd")
    program.assert_exit(1)
    assert "/no/such/folder" in program.output


def test_all_hosts_get_one_secret_that_is_on_no_command_line(distribute, tmp_path):
    program = distribute("-H", "a,b", "sh", "-c", "echo $KUNGFU_JOB_SECRET")
    program.assert_exit(0)
    made = {line.partition(" ")[2] for line in program.stdout}
    assert len(made) == 1
    secret = made.pop()
    assert len(bytes.fromhex(secret)) == 32
    assert secret not in json.dumps(told_to_ssh(tmp_path, "a"))

    program = distribute("-H", "a,b", "sh", "-c", "echo $KUNGFU_JOB_SECRET", environment={"KUNGFU_JOB_SECRET": "5ec2"})
    program.assert_exit(0)
    assert program.stdout == ["[a] 5ec2", "[b] 5ec2"] or program.stdout == ["[b] 5ec2", "[a] 5ec2"]
    (tmp_path / "job.secret").write_text("ab12\n")
    (tmp_path / "job.secret").chmod(0o600)
    program = distribute("-H", "a", "-secret-file", "job.secret", "sh", "-c", "echo $KUNGFU_JOB_SECRET")
    program.assert_exit(0)
    assert program.stdout == ["[a] ab12"]


@pytest.mark.parametrize("flag", ["-secret-file=x", "--no-secret"])
def test_a_command_with_a_secret_of_its_own_gets_none(flag, distribute):
    program = distribute("-H", "a", "sh", "-c", "echo secret=$KUNGFU_JOB_SECRET", flag)
    program.assert_exit(0)
    assert program.stdout == ["[a] secret="]


def test_the_first_failure_is_the_exit_code_and_ends_the_others(distribute):
    program = distribute("-H", "a,b", "sh", "-c", "[ $AT = a ] && exit 7; exec sleep 600")
    program.assert_exit(7)
    assert program.stderr == ["kungfu-distribute: the command exited with code 7 on a"]
    program.assert_gone(time.monotonic())


def test_a_host_that_cannot_be_reached_ends_all(distribute):
    program = distribute("-H", "a,down", "sleep", "600")
    program.assert_exit(1)
    assert "[down] ssh: connect to host down port 22: No route to host" in program.stderr
    assert program.stderr[-1].startswith("kungfu-distribute: ssh to down failed")
    program.assert_gone(time.monotonic())


# ---- a job that goes on ----

# As kungfu-run does it on the head, which is a; b fails then, and a ends with its argument once b has.
# The head ends once kungfu-distribute has waited for the other host's ssh.
GOES_ON = """
if [ $AT = a ]; then
  kill -USR1 $KUNGFU_DISTRIBUTE_SHELL; echo begun; touch begun
  until [ -e failed ]; do sleep 0.05; done
  while kill -0 $(cat failed) 2>/dev/null; do sleep 0.05; done
  exit $1
fi
until [ -e begun ]; do sleep 0.05; done
sleep 1; echo $SSH >failing; mv failing failed; exit 7
"""


@pytest.mark.parametrize("code", [0, 3])
def test_head_node_alone_reports_the_end_of_a_job_that_has_begun(code, distribute):
    program = distribute("-H", "a,b", "sh", "-c", GOES_ON, "x", code)
    program.assert_exit(code, timeout=30)
    assert program.stdout == ["[a] begun"]
    went_on = "were left to end on their own" if code else "continued without it"
    told = f"kungfu-distribute: b was lost: the command exited with code 7 on b; the others {went_on}"
    assert program.stderr == [told, *(["kungfu-distribute: the command exited with code 3 on a"] if code else [])]


LAUNCHES = 'echo launcher $AT $$; exec "$0" -m ms_kungfu.launcher -self $AT "$@"'


def test_a_job_over_the_hosts_of_kungfu_distribute_outlives_one_of_them(distribute):
    a, b = "127.0.0.1", "127.0.0.2"
    program = distribute(
        "-H", f"{a}:1,{b}:1", "sh", "-c", LAUNCHES, sys.executable, "-port", free_port(), "-np", 2, "-w",
        "-builtin-config-port", free_port(), sys.executable, RECOVERY_PROGRAM,
    )  # fmt: skip
    launchers = {match[1]: int(match[2]) for match in program.wait_for(r"\] launcher (\S+) (\d+)$", 2)}
    program.wait_for(r"in version 0 rank \d of 2 ", 2, timeout=60)
    os.kill(launchers[b], signal.SIGKILL)
    program.wait_for(r"in version 1 rank 0 of 1 ", 1, timeout=60)
    os.kill(launchers[a], signal.SIGUSR1)
    program.assert_exit(0, timeout=30)
    told = f"{b} was lost: the command exited with code 137 on {b}; the others continued without it"
    assert program.stderr[-1] == f"kungfu-distribute: {told}"
    assert not any("\0" in line for line in program.lines)
    assert [line for line in program.stdout if re.search("finished pid", line)]
    program.assert_gone(time.monotonic(), within=5)


def test_job_with_lost_head_node_ends(distribute):
    a, b = "127.0.0.1", "127.0.0.2"
    program = distribute(
        "-H", f"{a}:1,{b}:1", "sh", "-c", LAUNCHES, sys.executable, "-port", free_port(), "-np", 2, "sleep", 600
    )
    launchers = {match[1]: int(match[2]) for match in program.wait_for(r"\] launcher (\S+) (\d+)$", 2)}
    program.wait_for(r"worker started: worker [01] .*", 2, timeout=60)
    os.kill(launchers[a], signal.SIGKILL)
    program.assert_exit(137, timeout=30)
    assert program.stderr[-1] == f"kungfu-distribute: the command exited with code 137 on {a}"
    program.assert_gone(time.monotonic(), within=5)


def test_one_host_is_no_job_over_several(distribute):
    program = distribute("-H", "a:2", "sh", "-c", 'echo "hosts ${KUNGFU_DISTRIBUTE_HOSTS-none}"')
    program.assert_exit(0)
    assert program.stdout == ["[a] hosts none"]
    program = distribute("-H", "a:2,[fd00::3]", "sh", "-c", "echo $KUNGFU_DISTRIBUTE_HOSTS")
    program.assert_exit(0)
    assert {line.rpartition(" ")[2] for line in program.stdout} == {"a:2,[fd00::3]:1"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_everywhere(number, distribute):
    program = distribute(
        "-H", "a,b", "sh", "-c", "trap 'echo ended; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    )
    program.wait_for("up", 2)
    program.signal(number)
    program.assert_exit(128 + number)
    assert sum("ended" in line for line in program.stdout) == 2
    assert program.stderr == [f"kungfu-distribute: interrupted by {number.name}"]
    program.assert_gone(time.monotonic())


def test_the_command_ends_everywhere_when_this_shell_is_killed(distribute):
    program = distribute("-H", "a,b", "sh", "-c", "echo up; exec sleep 600")
    program.wait_for("up", 2)
    program.process.kill()
    program.process.wait()
    program.assert_gone(time.monotonic(), within=5)


def test_a_limit_on_time(distribute):
    program = distribute("-H", "a,b", "-timeout", "300ms", "sleep", "600")
    program.assert_exit(124)
    program.assert_gone(time.monotonic())


def test_long_output_arrives_whole(distribute):
    program = distribute("-H", "a", sys.executable, "-c", "print('x' * 300000); print('end', end='')")
    program.assert_exit(0)
    assert "".join(line.removeprefix("[a] ") for line in program.stdout) == "x" * 300000 + "end"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "no command"),
        (["-H", "a"], "no command"),
        (["true"], "no hosts; name them with -H or -hostfile"),
        (["-H", "a:x", "true"], "'a:x' is not host:slots"),
        (["-H", "-oProxyCommand=x", "true"], "is neither a host name nor an IP address"),
        (["-H", "a", "-u", "-oX", "true"], "'-oX' is not a user name"),
        (["-H", "a", "-np", "2", "true"], "-np: use kungfu-run's own flag"),
        (["-H", "a", "-secret-file", "/no/such", "true"], "-secret-file /no/such can't be read"),
        (["-H", "a", "-secret-file", "/no/such", "x", "-no-secret"], "give only one of them"),
    ],
)
def test_a_wrong_command_line_is_one_sentence(arguments, told, distribute):
    program = distribute(*arguments)
    program.assert_exit(2)
    assert told in program.output
    assert len(program.lines) == 1


def test_an_ssh_that_can_not_be_started_ends_all(distribute):
    program = distribute("-H", "a,b", "echo", *["x" * 50_000] * 3)
    program.assert_exit(1)
    assert program.stderr[-1] == "kungfu-distribute: ssh to a can't be started: Argument list too long"


def test_a_host_has_its_say_where_anothers_worker_was_killed(distribute):
    program = distribute("-H", "a,b", "sh", "-c", "[ $AT = a ] && exit 137; sleep 0.5; echo last words")
    program.assert_exit(137)
    assert "[b] last words" in program.stdout


@pytest.mark.parametrize("shell", ["sh", "bash", "csh", "tcsh"])
def test_script_runs_in_any_login_shell(shell, tmp_path):
    """csh takes no line's end in quotes, and expands `!` there."""
    folder = tmp_path / "it's a!"
    folder.mkdir()
    script = script_for(["sh", "-c", "pwd; echo $0 $KUNGFU_JOB_SECRET", "a!\nö"], str(folder))
    assert not {"\n", "!"} & set(script)
    if shutil.which(shell) is None:
        return
    process = subprocess.Popen([shell, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:  # the end of its standard input would end the command
        process.stdin.write("5ec2e7\n")
        process.stdin.flush()
        assert process.stdout.read() == f"{folder}\na! ö 5ec2e7\n"
    assert process.returncode == 0


def test_distribution_makes_its_events_in_its_own_loop(monkeypatch):
    monkeypatch.setattr(asyncio, "Event", EventOfPython39)
    distribution = _Distribution(Namespace(hosts=(), dir="/", timeout=None), ["true"], "")
    assert run(distribution.run()) == 0
    assert distribution._over.made_in.is_closed()
    assert distribution._hurry.made_in is distribution._over.made_in
