"""Start a command on each host over ssh, from one shell (kungfu-distribute).

If the command fails on one host, kungfu-distribute ends it on all hosts. But if the command, or a script that it runs,
starts kungfu-run on these hosts, kungfu-run decides how the end of the command on one host affects the others. With -w,
the other hosts continue. So a failure ends the command on all hosts only if no job has begun yet. When a job begins,
the kungfu-run on the head node notifies the shell on its host (KUNGFU_DISTRIBUTE_SHELL). That shell prints a marker
among the command's output.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import secrets
import shlex
import shutil
import signal
import sys
from argparse import Namespace
from asyncio.subprocess import Process
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Callable

from ms_kungfu import env
from ms_kungfu._flags import FlagParser, UsageError, duration, failed
from ms_kungfu._run_loop import run
from ms_kungfu.launcher.secret import SecretError, given_secret
from ms_kungfu.launcher.state.hosts import Host, parse_hosts, read_hostfile
from ms_kungfu.launcher.state.policy import EXIT_TIMEOUT

PROGRAM = "kungfu-distribute"
# No user can answer ssh's questions, so ssh must not ask any. ssh notices a failed host within 15 s.
_SSH = ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
_SSH += ["-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3"]
_SSH_FAILED = 255
_OTHERS_MAY_TAKE_S = 3.0  # after the first failure, the time for the other hosts to print their messages and exit
_ENDING_MAY_TAKE_S = 45.0  # longer than the default -grace-period of kungfu-run; a second signal ends this wait
_LINE_BYTES = 1 << 16
_BEGUN = b"\0kungfu-run has begun\0\n"
_NO_FLAGS = {
    "logdir": "use kungfu-run's own flag on each host: kungfu-run -logdir DIR",
    "v": "the command's output is always shown, with the host's name before each line",
    "q": "kungfu-distribute prints only why it ends",
    "np": "use kungfu-run's own flag: kungfu-distribute -H ... kungfu-run -np N python train.py",
}
# The shell of each host runs this script. A process doesn't notice when the ssh that started it has ended. So a helper
# process waits for the end of standard input, and then signals the shell. The shell hasn't reaped the command yet, so
# the command's PID can't have been reused.
_SCRIPT = """\
IFS= read -r secret
[ -z "$secret" ] || export KUNGFU_JOB_SECRET="$secret"
unset secret
cd {folder} || exit 1
PATH={path}:$PATH
{exports}
export KUNGFU_DISTRIBUTE_SHELL=$$
trap 'printf "\\000kungfu-run has begun\\000\\n"' USR1
exec 3<&0
{command} </dev/null 3<&- & command=$!
trap 'kill -TERM $command 2>/dev/null' TERM HUP INT
{{ read -r nothing <&3; kill -TERM $$; }} >/dev/null 2>&1 & watch=$!
exec 3<&-
while :; do
  {{ wait $command; }} 2>/dev/null
  code=$?
  kill -0 $command 2>/dev/null || break
done
trap '' TERM
kill -KILL $watch 2>/dev/null
exit $code
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command on all hosts.

    Exit status: 124 after -timeout, 128 + n if interrupted by signal n, 2 for a wrong command line, 1 if a host can't
    be reached, 0 if the command succeeds. If the command fails, the exit status is that of the command on the first
    host on which it fails. If a job has begun, the exit status is that of the command on the head node.
    """
    try:
        flags, command = _parse(list(sys.argv[1:] if arguments is None else arguments))
        secret = _secret_for(command, flags.secret_file)
    except (UsageError, SecretError) as error:
        return failed(PROGRAM, error, 2)
    return run(_Distribution(flags, command, secret).run())


def _parse(arguments: list[str]) -> tuple[Namespace, list[str]]:
    parser = FlagParser(
        PROGRAM,
        f"{PROGRAM} -H HOST:SLOTS[:PUBLIC ADDRESS],... [flags] command [arguments]",
        "Starts a command, usually kungfu-run, on each host over ssh. A kungfu-run without -H uses these hosts.",
        _NO_FLAGS,
    )
    parser.flag("H", "the hosts, as in kungfu-run -H; ssh connects to the public address", type=parse_hosts)
    parser.flag("hostfile", "file with the hosts, instead of -H", type=read_hostfile, metavar="FILE")
    parser.flag("u", "user to log in as (default: ssh's default)", type=_user, metavar="USER")
    parser.flag(
        "dir", "folder to start in, on each host (default: the current folder)", default=os.getcwd(), metavar="DIR"
    )
    parser.flag(
        "timeout", "end the command on all hosts after this time, with exit status 124", type=duration, metavar="TIME"
    )
    parser.flag(
        "secret-file", "file with the job's secret (default: $KUNGFU_JOB_SECRET, else a new one)", metavar="FILE"
    )
    flags, command = parser.parse(arguments)
    if not command:
        raise UsageError(f"no command; write it after the flags: {PROGRAM} -H a:2,b:2 kungfu-run ...")
    if flags.H and flags.hostfile:
        raise UsageError("-H and -hostfile both name the hosts; give only one of them")
    flags.hosts = flags.H or flags.hostfile
    if not flags.hosts:
        raise UsageError("no hosts; name them with -H or -hostfile")
    if shutil.which("ssh") is None:
        raise UsageError("ssh isn't in PATH; install the OpenSSH client")
    return flags, command


def _user(text: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._@\\-]*\$?", text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a user name")
    return text


def _secret_for(command: Sequence[str], file: str | None) -> str:
    """Return the secret that the hosts share, or "" if the command sets its own secret or needs none."""
    words = {word.lstrip("-").partition("=")[0] for word in command if word.startswith("-")}
    if words & {"secret-file", "no-secret"}:
        if file is not None:
            raise UsageError("-secret-file is given, but the command sets its own secret; give only one of them")
        return ""
    return given_secret(file) or secrets.token_hex(32)


def script_for(command: Sequence[str], folder: str, hosts: Sequence[Host] = ()) -> str:
    """Return the script that the shell of each host runs, quoted for any shell.

    The script reads the secret from standard input, because every user of a machine can read a command line.
    """
    # An ssh login doesn't activate this program's Python environment.
    here = str(Path(sys.executable).parent)
    each = shlex.quote(",".join(f"{host.name}:{host.slots}" for host in hosts))
    exports = [f"export {env.DISTRIBUTE_HOSTS.name}={each}"] if len(hosts) > 1 else []
    # Each host has its own TLS files at these paths.
    given = [(variable.name, variable.get()) for variable in (env.TLS_CERT, env.TLS_KEY, env.TLS_CA)]
    exports += [f"export {name}={shlex.quote(path)}" for name, path in given if path]
    script = _SCRIPT.format(
        folder=shlex.quote(folder), path=shlex.quote(here), command=shlex.join(command), exports="\n".join(exports)
    )
    return f'exec sh -c \'eval "$(printf %b "{_in_any_shell(script)}")"\''


def _in_any_shell(script: str) -> str:
    """Return the script with escapes for printf.

    The result contains only characters that csh doesn't change in quotes. In quotes, csh accepts neither a line end
    nor `!`.
    """
    return re.sub(rb"[^A-Za-z0-9 ./_=-]", lambda found: b"\\0%03o" % found[0][0], os.fsencode(script)).decode()


class _Distribution:
    def __init__(self, flags: Namespace, command: Sequence[str], secret: str) -> None:
        self._flags, self._secret = flags, secret
        self._script = script_for(command, flags.dir, flags.hosts)
        self._hosts: Sequence[Host] = flags.hosts
        self._heads: set[Host] = set()  # the head nodes of jobs that have begun
        self._gone: dict[
            Host, tuple[int, str]
        ] = {}  # host on which the command failed while the other hosts continued -> exit code and reason
        self._ssh: dict[Host, Process] = {}
        self._why = ""
        self._code = 0
        self._hurries = False  # true: end the command on all hosts immediately

    async def run(self) -> int:
        # Python 3.9 binds an event to the loop of the thread that makes it.
        self._over, self._hurry = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            why = f"interrupted by {signal.Signals(number).name}"
            loop.add_signal_handler(number, self._end, why, 128 + number, True)
        timer = None
        if self._flags.timeout:
            why = f"still running after -timeout {self._flags.timeout:g} s"
            timer = loop.call_later(self._flags.timeout, self._end, why, EXIT_TIMEOUT, True)
        everywhere = asyncio.gather(*(self._on(host) for host in self._hosts))
        over = asyncio.ensure_future(self._over.wait())
        either: list[asyncio.Future[Any]] = [everywhere, over]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not everywhere.done():
            if not self._hurries:
                await asyncio.wait([everywhere], timeout=_OTHERS_MAY_TAKE_S)
            for process in self._ssh.values():
                if process.stdin is not None:
                    process.stdin.close()  # this ends the command on that host
            hurry = asyncio.ensure_future(self._hurry.wait())
            ends: list[asyncio.Future[Any]] = [everywhere, hurry]
            await asyncio.wait(ends, timeout=_ENDING_MAY_TAKE_S, return_when=asyncio.FIRST_COMPLETED)
            hurry.cancel()
            for process in self._ssh.values():
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await asyncio.wait([everywhere], timeout=_OTHERS_MAY_TAKE_S)
        over.cancel()
        if timer is not None:
            timer.cancel()
        for host, (code, how) in self._gone.items():
            if code != self._code:  # with the same code, the command ended because the job ended
                went_on = "were left to end on their own" if self._why else "continued without it"
                failed(PROGRAM, f"{host.name} was lost: {how}; the others {went_on}", code)
        return failed(PROGRAM, self._why, self._code) if self._why else 0

    def _end(self, why: str, code: int, hurries: bool = False) -> None:
        """End the command on all hosts. If this function is called again, only the first reason is reported."""
        if self._hurries and hurries:
            self._hurry.set()
        if not self._over.is_set():
            self._why, self._code, self._hurries = why, code, hurries
            self._over.set()

    async def _on(self, host: Host) -> None:
        login = ["-l", self._flags.u] if self._flags.u else []
        # Start ssh in a new session, so that only this program gets Ctrl-C and then ends the command on all hosts.
        try:
            process = await asyncio.create_subprocess_exec(
                *_SSH, *login, "--", host.login, self._script,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:  # for example: no free descriptor, too many processes, or a command that is too long
            self._end(f"ssh to {host.name} can't be started: {error.strerror or error}", 1)
            return
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        self._ssh[host] = process
        process.stdin.write(self._secret.encode() + b"\n")
        if self._over.is_set():
            process.stdin.close()
        prefix = f"[{host.name}] ".encode()
        await asyncio.gather(
            _pass_on(process.stdout, prefix, sys.stdout.buffer, lambda: self._heads.add(host)),
            _pass_on(process.stderr, prefix, sys.stderr.buffer),
        )
        code = await process.wait()
        if code == _SSH_FAILED:
            code, why = 1, f"ssh to {host.login} failed, or its connection ended (code {_SSH_FAILED}; see its output)"
        else:
            code = code if code >= 0 else 128 - code
            why = f"the command exited with code {code} on {host.name}"
        if code and (host in self._heads or not self._heads):
            self._end(why, code)
        elif code and not self._over.is_set():
            self._gone[host] = (code, why)


async def _pass_on(
    stream: asyncio.StreamReader, prefix: bytes, to: BinaryIO, on_begun: Callable[[], None] | None = None
) -> None:
    """Copy output line by line, so that lines of different hosts don't mix."""
    rest = b""
    while chunk := await stream.read(_LINE_BYTES):
        chunk = rest + chunk
        if on_begun is not None and _BEGUN in chunk:
            chunk = chunk.replace(_BEGUN, b"")
            on_begun()
        *lines, rest = chunk.split(b"\n")
        if len(rest) >= _LINE_BYTES:
            lines, rest = [*lines, rest], b""
        _write(to, b"".join(prefix + line + b"\n" for line in lines))
    _write(to, prefix + rest + b"\n" if rest else b"")


def _write(to: BinaryIO, text: bytes) -> None:
    with contextlib.suppress(OSError, ValueError):  # the reader has closed the pipe; the hosts continue
        to.write(text)
        to.flush()


if __name__ == "__main__":
    sys.exit(main())
