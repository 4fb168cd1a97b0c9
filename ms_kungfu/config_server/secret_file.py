"""Store the job's secret in a file, where ``kungfu-run resize`` finds it if the same user runs it in another shell.

The file (mode 0600) is in a directory that belongs to the user (mode 0700). Both are opened without following links,
and are then checked. So neither a link nor another user's directory in /tmp can redirect the secret.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from ms_kungfu._files import open_regular

_SUFFIX = ".secret"
_EVERYBODYS = ("/tmp", "/var/tmp")


class SecretFileError(Exception):
    """A directory for the secret can't be trusted or used. The message is for the user."""


@dataclass(frozen=True)
class SecretFile:
    """A secret file that this process has written and can remove."""

    path: Path
    inode: int

    def remove(self) -> None:
        """Remove the file, unless a later server has replaced the file."""
        with contextlib.suppress(OSError):
            if os.lstat(self.path).st_ino == self.inode:
                os.unlink(self.path)


def write_secret(url: str, secret: str) -> SecretFile:
    """Write the secret of the config server at `url` to a file that only this user can read.

    The file replaces that of an earlier server at the same URL.
    """
    troubles = []
    for directory in own_directories():
        try:
            with made(directory) as folder:
                temporary = f".{secrets.token_hex(8)}"
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                fd = os.open(temporary, flags, 0o600, dir_fd=folder)
                try:
                    with os.fdopen(fd, "w") as file:
                        os.fchmod(fd, 0o600)
                        file.write(secret)
                        inode = os.fstat(fd).st_ino
                    os.rename(temporary, _name(url), src_dir_fd=folder, dst_dir_fd=folder)
                except OSError:  # for example a full disk
                    os.unlink(temporary, dir_fd=folder)
                    raise
                return SecretFile(directory / _name(url), inode)
        except (OSError, SecretFileError) as error:
            troubles.append(str(error))
    raise SecretFileError("the job's secret can't be written to a file: " + "; ".join(troubles))


def read_secret(url: str) -> str | None:
    """Return the secret of this user's config server at `url`; None if no file can be trusted."""
    for directory in own_directories():
        try:
            with opened(directory) as folder:
                fd = open_regular(_name(url), os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
                with os.fdopen(fd) as file:
                    info = os.fstat(fd)
                    if info.st_uid == os.geteuid() and not info.st_mode & 0o077:
                        return file.read(4096).strip()
        except (OSError, SecretFileError):
            continue
    return None


def servers_of_this_user() -> list[str]:
    """Return the URLs of this user's config servers with a secret file. Some of the servers may have ended.

    The URLs have the default path.
    """
    found = set()
    for directory in own_directories():
        with contextlib.suppress(OSError, SecretFileError), opened(directory) as folder:
            for name in os.listdir(folder):
                scheme, _, rest = unquote(name[: -len(_SUFFIX)]).rpartition("+")
                host, _, port = rest.rpartition("_")
                if name.endswith(_SUFFIX) and host and port.isdigit():
                    found.add(f"{scheme or 'http'}://{f'[{host}]' if ':' in host else host}:{port}/config")
    return sorted(found)


def is_same_server(one: str, other: str) -> bool:
    """Return whether two URLs name the same config server on this machine."""
    return _name(one) == _name(other)


def secret_from(environment: Mapping[str, str], url: str) -> str | None:
    """Return the secret from the environment or, if none is set there, from the file for `url`."""
    return environment.get("KUNGFU_JOB_SECRET") or read_secret(url)


def own_directories() -> Iterator[Path]:
    """Yield candidates for a directory that only this user can access. The best candidate is the first.

    The writer and the reader of a secret try all candidates, because a user's shells may have different environment
    variables. For the same reason, /tmp comes before $TMPDIR.
    """
    own = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    if os.path.isdir(own):
        yield Path(own) / "ms_kungfu"
    for folder in dict.fromkeys((*_EVERYBODYS, os.environ.get("TMPDIR"))):
        if folder:
            yield Path(folder) / f"ms_kungfu-{os.geteuid()}"


@contextlib.contextmanager
def made(directory: Path) -> Iterator[int]:
    """Open a directory and yield its descriptor. Create the directory if it doesn't exist."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    with opened(directory) as folder:
        yield folder


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[int]:
    """Open a directory and yield its descriptor.

    Raises:
        SecretFileError: other users can access the directory.
        OSError: the directory doesn't exist or can't be opened.
    """
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        info = os.fstat(folder)
        if info.st_uid != os.geteuid() or info.st_mode & 0o077:
            raise SecretFileError(f"{directory} must belong to this user alone (mode 0700)")
        yield folder
    finally:
        os.close(folder)


def _name(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https"):  # an etcd cluster doesn't belong to a user of this machine
        return quote(url, safe="") + _SUFFIX
    host = parts.hostname or "localhost"
    # A URL with 127.0.0.1, localhost or a similar name means a server on this machine, which its port identifies.
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if address.is_loopback or address.is_unspecified:
            host = "localhost"
    if parts.scheme == "https":
        return quote(f"https+{host}_{parts.port or 443}", safe="") + _SUFFIX
    return quote(f"{host}_{parts.port or 80}", safe="") + _SUFFIX
