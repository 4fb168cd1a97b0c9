"""Make files whole that several workers save to one path.

``mindspore.save_checkpoint`` removes the file, writes ``NAME.tmp`` beside it and renames that; ``mindspore.export``
writes into the file itself. So workers that save to one path at the same time, as programs for msrun do, write into one
temporary file, and a reader finds none, or a part. In a worker each save goes to a name of its own in the same folder,
and is renamed to the path. Then a reader finds a whole file, of the last worker, and so does a worker that continues
after another one was killed in its save.

This file replaces the two functions through which MindSpore writes all of them, whatever names the program has bound.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable

from mindspore.train import serialization

from ms_kungfu import env, membership

_UNFINISHED = ".unfinished-"  # of `ms_kungfu.elastic.checkpoint`, which names its files likewise
_log = logging.getLogger(__name__)
_written: dict[Path, tuple[int, int]] = {}  # by this process: inode and time of the file that it has left there
_told = False


def install() -> None:
    """Replace the functions, once. Outside of a worker MindSpore's stay."""
    if getattr(serialization._exec_save, "is_private", False):
        return
    for name, private in (("_exec_save", private_save), ("_export", private_export)):
        replaced = private(getattr(serialization, name))
        replaced.is_private = True  # type: ignore[attr-defined]
        setattr(serialization, name, replaced)


def private_save(save: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of ``_exec_save``."""

    @functools.wraps(save)
    def saving(ckpt_file_name: str, *arguments: Any, **named: Any) -> Any:
        path = Path(ckpt_file_name)
        is_private = path.name.startswith(_UNFINISHED) or serialization._ckpt_fs.backend == "mindio"
        if is_private or not _is_worker():
            return save(ckpt_file_name, *arguments, **named)
        with _folder_beside(path) as folder:
            result = save(str(folder / path.name), *arguments, **named)
            _move(folder / path.name, path)
        return result

    return saving


def private_export(export: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement of ``_export``, whose suffix and number of files depend on the format."""

    @functools.wraps(export)
    def exporting(net: Any, file_name: str, *arguments: Any, **named: Any) -> Any:
        if not _is_worker():
            return export(net, file_name, *arguments, **named)
        path = Path(os.path.realpath(file_name))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _folder_beside(path) as folder:
            result = export(net, str(folder / path.name), *arguments, **named)
            for made in sorted(folder.iterdir()):
                _move(made, path.parent / made.name)
        return result

    return exporting


def _is_worker() -> bool:
    return env.BROKER.get() is not None


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """Return a folder for this call, on the same file system; hidden, so that no callback takes it for a checkpoint."""
    folders = f".{path.name}.{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}-"
    _remove_abandoned(path.parent, folders)
    folder = path.parent / f"{folders}{os.getpid()}-{threading.get_ident():x}-{uuid.uuid4().hex[:6]}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, folders: str) -> None:
    """Remove the `folders` of processes of this host, in this PID namespace, that were killed in a save."""
    for folder in parent.iterdir():
        pid = folder.name[len(folders) :].partition("-")[0]
        if folder.name.startswith(folders) and pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(folder, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    if source.is_dir():
        target.mkdir(mode=0o700, exist_ok=True)
        for each in sorted(source.iterdir()):
            _move(each, target / each.name)
        return
    mine = source.stat()
    _look_for_others(target)
    os.replace(source, target)
    _written[target] = mine.st_ino, mine.st_mtime_ns


def _look_for_others(path: Path) -> None:
    """Warn once of a path that this worker has written, another process after it, and now this one again.

    A single file of another process is no reason: the next rank continues after the one that wrote before.
    """
    global _told
    if _told or path not in _written or env.MSRUN_SIZE.get() is not None or not membership.speaks_for_all():
        return
    try:
        found = path.stat()
    except FileNotFoundError:
        return
    if (found.st_ino, found.st_mtime_ns) != _written[path]:
        _told = True
        _log.warning(
            "misuse: check=save path=%s. Another process, or another function of this one, wrote the file"
            " after this worker saved it: each file is whole, and the last one stays; save at one worker "
            "only, `if kf.current_rank() == 0:`, or to a path of each worker's own",
            path,
        )
