"""The secret that the hosts of a job share, from a file of the user's (``-secret-file``)."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping

from ms_kungfu import env
from ms_kungfu.config_server.secret_file import secret_from

MAKE_ONE = (
    "make one with (umask 077; openssl rand -hex 32 >job.secret), copy the file to each host and give it there by "
    "-secret-file, or its text as KUNGFU_JOB_SECRET; -no-secret does without in a network that is trusted"
)
SLURM_MAKES_ONE = (
    "srun passes one on to all nodes that is in its environment: export KUNGFU_JOB_SECRET=$(openssl rand -hex 32); "
    "-no-secret does without in a network that is trusted"
)
_MOST_BYTES = 4096


class SecretError(Exception):
    """The secret can't be read or trusted; the message is for the user, and doesn't contain the secret."""


def read_secret_file(path: str) -> str:
    """Return its hexadecimal digits.

    As for ssh's keys, another user must neither be able to read the file nor own it.
    """
    try:
        # So as not to wait for the writer of a FIFO.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SecretError(f"-secret-file {path} can't be read: {error.strerror}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise SecretError(f"-secret-file {path} is not a file")
        if info.st_uid not in (os.geteuid(), 0):
            raise SecretError(f"-secret-file {path} belongs to another user, which knows it then; make one of your own")
        if info.st_mode & 0o077:
            raise SecretError(
                f"-secret-file {path} can be read or written by others (mode {stat.S_IMODE(info.st_mode):04o}); "
                f"chmod 600 {path}, and make a new secret if another user may have read it"
            )
        text = os.read(fd, _MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(text) > _MOST_BYTES:
        raise SecretError(f"-secret-file {path} has more than {_MOST_BYTES} bytes; it is not a secret")
    if re.fullmatch(rb"\s*([0-9A-Fa-f]{2})+\s*", text) is None:
        raise SecretError(f"-secret-file {path} must hold an even number of hexadecimal digits, and nothing else")
    return text.decode().strip()


def given_secret(file: str | None) -> str | None:
    """Return the user's secret, from `file` or the environment."""
    try:
        given = env.JOB_SECRET.get()
    except ValueError as error:
        raise SecretError(str(error)) from None
    if file is None:
        return given
    if given is not None:
        raise SecretError("-secret-file and KUNGFU_JOB_SECRET both give the job's secret; leave one of them out")
    return read_secret_file(file)


def secret_for(environment: Mapping[str, str], file: str | None, url: str) -> str | None:
    """Return the secret of the job with the config server at `url`.

    It is from `file`, else the environment's, else what the server has left for this user.
    """
    return secret_from(environment, url) if file is None else given_secret(file)
