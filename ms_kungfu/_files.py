"""Open files in folders to which other programs can write, without blocking and without following planted links."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time

_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder", stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a device",
}  # fmt: skip
_RETRY_S = 0.01


def open_regular(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, dir_fd: int | None = None, devices: bool = False
) -> int:
    """Open a regular file.

    `open` blocks at a FIFO until another process opens the other end, and Python runs no signal handlers meanwhile. A
    symbolic link at a path that this package writes to may lead to a file of another program.

    Args:
        path: the file. A path to read may contain symbolic links, as mounted secrets do. A path to write may not end
            in one.
        flags: as in `os.open`.
        dir_fd: as in `os.open`.
        devices: for a path that the user has named. Accept character devices (``/dev/null``). For writing, also accept
            symbolic links and a FIFO that another process reads (``/dev/stderr`` before ``| tee``).

    Returns:
        The descriptor. It is closed on exec, and the caller owns it.

    Raises:
        OSError: if the file doesn't exist or isn't a regular file; `strerror` says which.
    """
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    wanted = flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (os.O_NOFOLLOW if writes and not devices else 0)
    name = os.fspath(path)
    try:
        fd = os.open(name, wanted, 0o666, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP and wanted & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "it is a symbolic link, not a regular file", name) from None
        if error.errno == errno.ENXIO:  # a FIFO that no process reads, or a socket
            reader = " that no process reads," if devices else ""
            raise OSError(errno.ENXIO, f"it is a FIFO{reader} or a socket, not a regular file", name) from None
        raise
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        # With O_NONBLOCK, opening a FIFO for writing succeeds only if another process reads it.
        has_reader = kind == stat.S_IFIFO and flags & os.O_ACCMODE == os.O_WRONLY
        if kind != stat.S_IFREG and not (devices and (kind == stat.S_IFCHR or has_reader)):
            raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a regular file", name)
        os.set_blocking(fd, True)  # for a device or a FIFO
        return fd
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file. Raise OSError as `open_regular` does."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def reading_error(error: BaseException | None) -> BaseException | None:
    """Return why a file, which may be intact, wasn't read; None if its content is damaged.

    The reason is `error` or one of its causes: MindSpore converts an OSError to a ValueError.
    """
    while error is not None and not isinstance(error, (OSError, MemoryError)):
        error = error.__cause__
    return error


def lock_within(fd: int, limit_s: float) -> bool:
    """Lock an open file, and wait up to `limit_s` for other processes. Return whether the lock was taken.

    The kernel releases the lock if this process is killed. A process that stands still with the lock delays others
    only by the limit.

    Raises:
        OSError: if the file system has no such locks.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_RETRY_S)
    return False
