"""Keep files complete if several workers save to the same path.

``mindspore.save_checkpoint`` removes the file, writes ``NAME.tmp`` next to it and renames that file.
``mindspore.export`` writes directly to the file. In programs for msrun, workers often save to the same path at the same
time. These workers then write to the same temporary file, and a reader may find no file or an incomplete file. With
this module, a worker saves to a unique name in the same folder, and then renames that file to the path. So a reader
always finds the complete file of the last worker that saved, even if a worker is killed during a save.

This module replaces the two internal functions with which MindSpore writes all these files. So the replacement also
applies if the program had already imported MindSpore's public functions.
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

_UNFINISHED = ".unfinished-"  # `ms_kungfu.elastic.checkpoint` uses the same prefix
_log = logging.getLogger(__name__)
_written: dict[Path, tuple[int, int]] = {}  # path -> (inode, time) of the file that this process wrote there
_told = False


def install() -> None:
    """Replace MindSpore's two functions once. Outside of a worker, the replacements only call MindSpore's functions."""
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
    """Return the replacement of ``_export``. The suffix and the number of the exported files depend on the format."""

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
    """Create a folder next to `path`, and remove the folder when the context ends.

    The folder is hidden, so no callback treats it as a checkpoint.
    """
    folders = f".{path.name}.{socket.gethostname()}-{os.stat('/proc/self/ns/pid').st_ino}-"
    _remove_abandoned(path.parent, folders)
    folder = path.parent / f"{folders}{os.getpid()}-{threading.get_ident():x}-{uuid.uuid4().hex[:6]}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, folders: str) -> None:
    """Remove each folder whose name begins with `folders` and whose process was killed during a save."""
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
    """Warn once if another process has written to `path` since this worker last saved to it.

    Don't warn before this worker's first save to `path`, because this rank may legitimately replace a failed rank.
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
            "misuse: check=save path=%s. Another process, or another function of this process, wrote the "
            "file after this worker had saved it. Each file is complete, and the last one stays. Save on one "
            "worker only (`if kf.current_rank() == 0:`), or use a different path on each worker",
            path,
        )
