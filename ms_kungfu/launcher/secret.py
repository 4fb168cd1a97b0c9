"""Read the secret that a job's hosts share, from a file that the user names (``-secret-file``)."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping

from ms_kungfu import env
from ms_kungfu.config_server.secret_file import secret_from

MAKE_ONE = (
    "create one with (umask 077; openssl rand -hex 32 >job.secret), copy the file to each host and pass it with "
    "-secret-file, or its text as KUNGFU_JOB_SECRET; in a trusted network, -no-secret runs without a secret"
)
SLURM_MAKES_ONE = (
    "srun passes its environment to all nodes: export KUNGFU_JOB_SECRET=$(openssl rand -hex 32); "
    "in a trusted network, -no-secret runs without a secret"
)
_MOST_BYTES = 4096


class SecretError(Exception):
    """The secret can't be read or trusted. The message is for the user and doesn't contain the secret."""


def read_secret_file(path: str) -> str:
    """Return the hexadecimal digits in a secret file.

    As with an ssh key, the file must belong to this user, and no other user may have permission to read or write it.
    """
    try:
        # Open without blocking, so that the call doesn't wait for a writer if the path is a FIFO.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SecretError(f"-secret-file {path} can't be read: {error.strerror}") from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            raise SecretError(f"-secret-file {path} is not a file")
        if info.st_uid not in (os.geteuid(), 0):
            raise SecretError(f"another user owns -secret-file {path} and can read it; create your own file")
        if info.st_mode & 0o077:
            raise SecretError(
                f"-secret-file {path} can be read or written by other users (mode {stat.S_IMODE(info.st_mode):04o}); "
                f"chmod 600 {path}, and create a new secret if another user may have read this one"
            )
        text = os.read(fd, _MOST_BYTES + 1)
    finally:
        os.close(fd)
    if len(text) > _MOST_BYTES:
        raise SecretError(f"-secret-file {path} has more than {_MOST_BYTES} bytes; it is not a secret")
    if re.fullmatch(rb"\s*([0-9A-Fa-f]{2})+\s*", text) is None:
        raise SecretError(f"-secret-file {path} must contain an even number of hexadecimal digits, and nothing else")
    return text.decode().strip()


def given_secret(file: str | None) -> str | None:
    """Return the secret that the user has given in `file` or in the environment, or None."""
    try:
        given = env.JOB_SECRET.get()
    except ValueError as error:
        raise SecretError(str(error)) from None
    if file is None:
        return given
    if given is not None:
        raise SecretError("-secret-file and KUNGFU_JOB_SECRET both set the job's secret; give only one of them")
    return read_secret_file(file)


def secret_for(environment: Mapping[str, str], file: str | None, url: str) -> str | None:
    """Return the secret of the job whose config server is at `url`.

    If `file` is given, read the secret from it. Otherwise, take the secret from the environment, or else from the file
    that the config server has written for this user.
    """
    return secret_from(environment, url) if file is None else given_secret(file)
