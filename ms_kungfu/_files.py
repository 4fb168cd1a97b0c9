"""Open files safely in folders to which other programs can write: never block, and never follow a planted link."""

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

    Unlike `open`, this function never blocks at a FIFO, and never writes through a symbolic link, which may point to
    another program's file.

    Args:
        path: the path of the file. For reading, the path may contain symbolic links, as the paths of mounted secrets
            do. For writing, its last component must not be a symbolic link.
        flags: as in `os.open`.
        dir_fd: as in `os.open`.
        devices: whether to accept character devices, such as ``/dev/null``. For writing, the function then also accepts
            symbolic links, and a FIFO that another process reads. Set this only for paths that the user has named.

    Returns:
        The descriptor. It is closed on exec, and the caller owns it.

    Raises:
        OSError: if the file doesn't exist or isn't a regular file; `strerror` names the reason.
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
        # With O_NONBLOCK, opening a FIFO for writing succeeds only if another process is reading the FIFO.
        has_reader = kind == stat.S_IFIFO and flags & os.O_ACCMODE == os.O_WRONLY
        if kind != stat.S_IFREG and not (devices and (kind == stat.S_IFCHR or has_reader)):
            raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a regular file", name)
        os.set_blocking(fd, True)  # undoes O_NONBLOCK
        return fd
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """Return the content of a regular file. Raise OSError as `open_regular` does."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def reading_error(error: BaseException | None) -> BaseException | None:
    """Return the cause of `error` if the file couldn't be read but may be intact; None if the content is damaged.

    MindSpore converts an OSError to a ValueError, so the function also looks at the causes of `error`.
    """
    while error is not None and not isinstance(error, (OSError, MemoryError)):
        error = error.__cause__
    return error


def lock_within(fd: int, limit_s: float) -> bool:
    """Lock an open file. If another process holds the lock, wait up to `limit_s` seconds.

    Return whether this process got the lock. The kernel releases the lock if the process is killed.
    A process that hangs with the lock delays every other process by at most `limit_s`.

    Raises:
        OSError: if the file system doesn't support such locks.
    """
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_RETRY_S)
    return False
