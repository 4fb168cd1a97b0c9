"""Checkpoints of a whole training state, in MindSpore's own format, for when the whole machine goes.

A file ``step-00000120.ckpt`` is what ``ms.save_checkpoint`` writes: all Parameters under their names, which
``ms.load_checkpoint`` reads and ``ms.load_param_into_net`` takes, and one more entry, ``kungfu``, a JSON text with the
rest of the state (`ms_kungfu.elastic.state`). Buffers are entries ``kungfu/buffer/<path>``.

The text also has ``format``, which is 1 where it is missing, and ``written_by``, the ms_kungfu that wrote the file.
What a reader may leave unread is added without a new format. A file of a newer one is refused, and left as it is.

A file is whole or it isn't there: it is written under another name in the same folder, flushed to the disk and renamed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ms_kungfu._checks import at_least
from ms_kungfu._version import VERSION
from ms_kungfu.comm import Array
from ms_kungfu.elastic.inventory import assign
from ms_kungfu.elastic.state import TrainingState
from ms_kungfu.errors import KungFuError

_log = logging.getLogger(__name__)

FORMAT = 2
_ENTRY = "kungfu"
_FILE = re.compile(r"step-(\d{8,})\.ckpt")
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Snapshot:
    """The state after a step, in memory of its own: arrays with their MindSpore dtypes, and the JSON of the rest."""

    step: int
    arrays: Mapping[str, tuple[Array, Any]]
    host: Mapping[str, Any]


def _tensors(state: TrainingState) -> Iterator[tuple[str, Any]]:
    """All tensors by the names of their entries; those without elements, which MindSpore can't read back, left out."""
    taken: dict[str, int] = {}
    for parameter in state.parameters:
        count = taken[parameter.name] = taken.get(parameter.name, 0) + 1
        # Two optimizers have a global_step each.
        yield parameter.name if count == 1 else f"{parameter.name}/{count}", parameter
    for name, buffer in state.buffers.items():
        yield f"kungfu/buffer/{name}", buffer


def take_snapshot(step: int, state: TrainingState, host: Mapping[str, Any]) -> Snapshot:
    """A copy of the state as it is now; training may go on at once."""
    # asnumpy shares the memory that the next step writes to.
    arrays = {name: (tensor.asnumpy().copy(), tensor.dtype) for name, tensor in _tensors(state) if tensor.size}
    return Snapshot(step, arrays, host)


class CheckpointFolder:
    """The last `keep` checkpoints of one training, written by a thread.

    What goes wrong in writing (a full disk) is a warning, and the checkpoints that there are stay. A snapshot that
    comes while another is being written waits for its turn; a third takes the place of the one that waits.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        self.folder = Path(folder)
        self._keep = keep
        self._lock = threading.Condition()
        self._waiting: Snapshot | None = None  # guarded by _lock, as is _writing
        self._writing = False

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def save(self, snapshot: Snapshot) -> None:
        """Have it written in the background."""
        with self._lock:
            if self._waiting is not None:
                _log.warning("the checkpoint of step %d is left out: the disk is too slow", self._waiting.step)
            self._waiting = snapshot
            if not self._writing:
                self._writing = True
                # Not a daemon: a program that ends finishes its last checkpoint first.
                threading.Thread(target=self._write_all, name="kungfu-checkpoint").start()

    def wait(self) -> None:
        """Until everything is written."""
        with self._lock:
            self._lock.wait_for(lambda: not self._writing)

    def _write_all(self) -> None:
        while True:
            with self._lock:
                snapshot, self._waiting = self._waiting, None
                if snapshot is None:
                    self._writing = False
                    self._lock.notify_all()
                    return
            try:
                self._write(snapshot)
            except Exception as error:  # whatever MindSpore makes of it; training is worth more than its checkpoint
                _log.warning(
                    "the checkpoint of step %d can't be written to %s (%s: %s); training goes on, earlier ones stay",
                    snapshot.step,
                    self.folder,
                    type(error).__name__,
                    error,
                )

    def _write(self, snapshot: Snapshot) -> None:
        import mindspore as ms

        self.folder.mkdir(parents=True, exist_ok=True)
        path = self._path(snapshot.step)
        unfinished = self.folder / f"{_UNFINISHED}{os.getpid()}-{path.name}"
        entries = [
            {"name": name, "data": ms.Tensor(values, dtype=dtype)} for name, (values, dtype) in snapshot.arrays.items()
        ]
        text = json.dumps({"format": FORMAT, "written_by": VERSION, **snapshot.host})
        try:
            ms.save_checkpoint(entries, str(unfinished), append_dict={_ENTRY: text}, crc_check=True)
            _flush(unfinished)
            os.replace(unfinished, path)
            _flush(self.folder)
            _log.info("step %d: checkpoint %s is written", snapshot.step, path)
        except BaseException:
            for rest in self.folder.glob(f"{_UNFINISHED}{os.getpid()}-*"):  # MindSpore writes to yet another name
                rest.unlink(missing_ok=True)
            raise
        for old in self.paths()[: -self._keep]:
            old.unlink(missing_ok=True)

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.ckpt"

    def has(self, step: int) -> bool:
        """Whether there is a checkpoint of this step."""
        return self._path(step).exists()

    def paths(self) -> list[Path]:
        """The checkpoints that there are, by their steps."""
        found = [(_FILE.fullmatch(path.name), path) for path in self.folder.glob("step-*.ckpt")]
        return [path for _, path in sorted((int(match[1]), path) for match, path in found if match)]

    def remove_unfinished(self) -> None:
        """Remove what workers that were killed while they wrote have left. For the start of a job."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            path.unlink(missing_ok=True)

    def load(self) -> tuple[Path, Mapping[str, Any], Mapping[str, Any]] | None:
        """(path, entries, host) of the newest checkpoint that can be read, None if there is none.

        Files that can't be read get another name, so that they are out of the way of those that are written next.
        KungFuError if there are some and none of them can be read, or the newest readable one has a newer format.
        """
        import mindspore as ms

        paths = self.paths()
        for path in reversed(paths):
            try:
                entries = dict(ms.load_checkpoint(str(path), crc_check=True))
                host = json.loads(entries.pop(_ENTRY))
                number, writer = host.pop("format", 1), host.pop("written_by", "of an unknown version")
                if number <= FORMAT:
                    return path, entries, host
                raise KungFuError(
                    f"checkpoint {path} has format {number}, written by ms_kungfu {writer}; ms_kungfu "
                    f"{VERSION} reads formats 1 to {FORMAT}: resume with the version that wrote it, or a "
                    "newer one"
                )
            except (ValueError, KeyError, OSError) as error:
                damaged = path.with_name(path.name + ".damaged")
                os.replace(path, damaged)
                _log.warning("a checkpoint can't be read and is %s now: %s", damaged, error)
        if paths:
            raise KungFuError(f"none of the {len(paths)} checkpoints in {self.folder} can be read")
        return None


def check_folder(folder: str | os.PathLike[str] | None, every: int | None, keep: int, resume: bool) -> None:
    """ValueError where these arguments of `ElasticTraining` don't fit together."""
    for value, what in ((every, "checkpoint_every"), (keep, "keep_checkpoints")):
        if value is not None:
            at_least(1, value, what)
    if folder is None:
        if every is not None or resume:
            given = "checkpoint_every" if every is not None else "resume"
            raise ValueError(f"{given} needs a folder; give checkpoint_dir")
    elif Path(folder).exists() and not Path(folder).is_dir():
        raise ValueError(f"checkpoint_dir is a folder, and {os.fspath(folder)} is something else")


def restore_tensors(state: TrainingState, entries: Mapping[str, Any], path: Path) -> None:
    """The entries of a file into the state's tensors, in place. KungFuError, and nothing changed, if they differ."""
    wanted = {name: tensor for name, tensor in _tensors(state) if tensor.size}
    differing = sorted(set(wanted) ^ set(entries))
    if differing:
        side = "this program" if differing[0] in wanted else "the checkpoint"
        raise KungFuError(
            f"checkpoint {path} is of another training: {differing[0]!r} is in {side} only; resume with the same "
            "program and arguments, or train from the start in another folder"
        )
    for name, tensor in wanted.items():
        entry = entries[name]
        if tuple(entry.shape) != tuple(tensor.shape) or entry.dtype != tensor.dtype:
            rates = ""
            if name.startswith("learning_rate"):
                rates = "; go on with the list that it began with, whose last entry counts for all steps beyond it"
            raise KungFuError(
                f"checkpoint {path} is of another training: {name!r} is {entry.dtype}{tuple(entry.shape)} there and "
                f"{tensor.dtype}{tuple(tensor.shape)} in this program{rates}"
            )
    for name, tensor in wanted.items():
        assign(tensor, entries[name].asnumpy())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
