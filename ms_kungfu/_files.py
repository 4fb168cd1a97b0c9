"""Open files in folders that other programs can write to, without waiting and without surprises."""

from __future__ import annotations

import errno
import os
import stat

_KINDS = {
    stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFDIR: "a folder", stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a device",
}  # fmt: skip


def open_regular(
    path: str | os.PathLike[str], flags: int = os.O_RDONLY, *, dir_fd: int | None = None, devices: bool = False
) -> int:
    """Open a regular file.

    `open` waits at a FIFO until another process opens its other end, for ever perhaps, and signal handlers of Python
    don't run meanwhile. A symbolic link at a place that this package writes to leads to a file that isn't its own.

    Args:
        path: What is read may be behind symbolic links (mounted secrets are); what is written may not.
        flags: As of `os.open`.
        dir_fd: As of `os.open`.
        devices: Accept character devices (``/dev/null``), and for writing also symbolic links and a FIFO that another
            process reads (``/dev/stderr`` before ``| tee``): for a path that the user has named.

    Returns:
        The descriptor, closed on exec, which the caller owns.

    Raises:
        OSError: It isn't there or isn't a regular file; `strerror` says which.
    """
    writes = flags & os.O_ACCMODE != os.O_RDONLY
    wanted = flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (os.O_NOFOLLOW if writes and not devices else 0)
    name = os.fspath(path)
    try:
        fd = os.open(name, wanted, 0o666, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ELOOP and wanted & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "it is a symbolic link, not a regular file", name) from None
        if error.errno == errno.ENXIO:  # of a FIFO that no process reads, and of a socket
            reader = " that no process reads," if devices else ""
            raise OSError(errno.ENXIO, f"it is a FIFO{reader} or a socket, not a regular file", name) from None
        raise
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        # Without waiting, a FIFO is opened for writing alone only if another process reads it.
        has_reader = kind == stat.S_IFIFO and flags & os.O_ACCMODE == os.O_WRONLY
        if kind != stat.S_IFREG and not (devices and (kind == stat.S_IFCHR or has_reader)):
            raise OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'something else')}, not a regular file", name)
        os.set_blocking(fd, True)  # of a device or a FIFO
        return fd
    except BaseException:
        os.close(fd)
        raise


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file. OSError as of `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()
