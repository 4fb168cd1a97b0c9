"""Write and read checkpoints of the whole training state, so that training survives the failure of a whole machine.

`Checkpointing` decides when to write a checkpoint, which worker writes it, and from which checkpoint training starts.

Checkpoints are in MindSpore's own format: ``ms.save_checkpoint`` writes each file, e.g. ``step-00000120.ckpt``. The
file contains all Parameters under their names, so ``ms.load_checkpoint`` and ``ms.load_param_into_net`` can read it.
Buffers are in entries ``kungfu/buffer/<path>``. The entry ``kungfu`` is a JSON string with the rest of the state
(`ms_kungfu.elastic.state`) and these fields:

- ``format``: the number of the file format; 1 if the field is missing. The number changes only if older versions of
  ms_kungfu can't ignore an addition to the format. A file with a newer format is rejected, but not changed.
- ``written_by``: the version of ms_kungfu that wrote the file.
- ``conditions``, only with shards: the numeric environment, on which the exact results depend
  (`ms_kungfu.dataset.conditions`).

A checkpoint file is either complete or missing: it is written under another name in the same folder, flushed to the
disk, and then renamed. Before the file is written, all workers flush their ledgers, so that the ledgers can be
continued after a machine has crashed.

Several jobs may use the same folder, one after another. Each job reserves the next job number by creating ``.job-N``;
if two jobs try at the same time, only one of them succeeds. Files of a job with a higher number
(``step-00000120.job2.ckpt``) count as newer.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Callable

from ms_kungfu import membership, runtime
from ms_kungfu._decoding import decode_object
from ms_kungfu._files import open_regular, reading_error
from ms_kungfu._version import VERSION
from ms_kungfu.agreement import broadcast_json, gather_json
from ms_kungfu.comm import Array
from ms_kungfu.dataset import replaying
from ms_kungfu.dataset.conditions import ARGUMENTS, differences
from ms_kungfu.elastic import event_log, program, state_transfer
from ms_kungfu.elastic.options import Options
from ms_kungfu.elastic.state import TrainingState, resume_components
from ms_kungfu.errors import KungFuError
from ms_kungfu.trained.inventory import assign

_log = logging.getLogger(__name__)

FORMAT = 2
_ENTRY = "kungfu"
_MAX_ENTRY = 1 << 30
_FILE = re.compile(r"step-(\d{8,})(?:\.job(\d+))?\.ckpt")
_JOB = re.compile(r"\.job-(\d+)")
_UNFINISHED = ".unfinished-"


@dataclass(frozen=True)
class Snapshot:
    """A copy of the training state after a step.

    `arrays` maps each tensor's name to its values and MindSpore dtype. `host` contains the rest of the state as JSON.
    """

    step: int
    arrays: Mapping[str, tuple[Array, Any]]
    host: Mapping[str, Any]


def named_tensors(state: TrainingState) -> Iterator[tuple[str, Any]]:
    """Yield (name of the checkpoint entry, tensor) for each Parameter and buffer in `state`.

    The result includes tensors without elements. Callers skip these, because MindSpore can't read them from a file.
    """
    taken: dict[str, int] = {}
    for parameter in state.parameters:
        count = taken[parameter.name] = taken.get(parameter.name, 0) + 1
        # Several Parameters may have the same name, e.g. the `global_step` of each optimizer.
        yield parameter.name if count == 1 else f"{parameter.name}/{count}", parameter
    for name, buffer in state.buffers.items():
        yield f"kungfu/buffer/{name}", buffer


def take_snapshot(step: int, state: TrainingState, host: Mapping[str, Any]) -> Snapshot:
    """Return a copy of the current state, so that training can continue while the copy is written."""
    # Copy, because asnumpy shares the memory to which the next step writes.
    arrays = {name: (tensor.asnumpy().copy(), tensor.dtype) for name, tensor in named_tensors(state) if tensor.size}
    return Snapshot(step, arrays, host)


class CheckpointFolder:
    """Write checkpoints to a folder in a background thread, and keep the last `keep` of them.

    If writing fails (e.g. because the disk is full), the thread logs a warning and keeps the earlier checkpoints. While
    a snapshot is being written, one more snapshot can wait. A third snapshot replaces the waiting one.
    """

    def __init__(self, folder: str | os.PathLike[str], keep: int = 3) -> None:
        self.folder = Path(folder)
        self.job = 1
        """The number of this process's job in the folder: see `take_job`."""
        self._keep = keep
        # Other writers must not use this name. A process ID isn't sufficient, because hosts may share the folder.
        self._unfinished = f"{_UNFINISHED}{uuid.uuid4().hex[:12]}-"
        self._lock = threading.Condition()
        self._waiting: Snapshot | None = None  # `_lock` guards `_waiting` and `_writing`
        self._writing = False

    def __fspath__(self) -> str:
        return os.fspath(self.folder)

    def save(self, snapshot: Snapshot) -> None:
        """Write a snapshot in the background."""
        with self._lock:
            if self._waiting is not None:
                _log.warning('checkpoint skipped: step=%d reason="the disk is too slow"', self._waiting.step)
            self._waiting = snapshot
            if not self._writing:
                self._writing = True
                # The thread isn't a daemon, so that Python completes the last checkpoint before the process exits.
                threading.Thread(target=self._write_all, name="kungfu-checkpoint").start()

    def wait(self) -> None:
        """Wait until all snapshots are written."""
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
            except Exception as error:  # MindSpore may raise any error, and a failed checkpoint must not end training
                event_log.checkpoint_failed(snapshot.step, self.folder, error)

    @membership.traced("checkpoint file")
    def _write(self, snapshot: Snapshot) -> None:
        import mindspore as ms

        began = membership.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        if (newest := self._newest_job()) > self.job:  # a race is harmless, because jobs use different file names
            _log.warning(
                'checkpoint skipped: step=%d folder=%s job=%d reason="job %d has begun to use the folder"',
                snapshot.step, self.folder, self.job, newest,
            )  # fmt: skip
            return
        path = self._path(snapshot.step)
        unfinished = self.folder / f"{self._unfinished}{path.name}"
        entries = [
            {"name": name, "data": ms.Tensor(values, dtype=dtype)} for name, (values, dtype) in snapshot.arrays.items()
        ]
        text = json.dumps({"format": FORMAT, "written_by": VERSION, **snapshot.host})
        try:
            ms.save_checkpoint(entries, str(unfinished), append_dict={_ENTRY: text}, crc_check=True)
            _flush(unfinished)
            os.replace(unfinished, path)
            _flush(self.folder)
            event_log.checkpoint_written(snapshot.step, path, membership.monotonic() - began)
        except BaseException:
            for rest in self.folder.glob(f"{self._unfinished}*"):  # MindSpore adds a suffix while it writes a file
                rest.unlink(missing_ok=True)
            raise
        for old in self.paths()[: -self._keep]:
            old.unlink(missing_ok=True)

    def take_job(self) -> int:
        """Return the next job number in this folder, and reserve it unless the folder is read-only."""
        while True:
            number = self._newest_job() + 1
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                os.close(os.open(self._mark(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
            except FileExistsError:
                continue  # another job has just reserved the number
            except OSError as error:
                _log.warning('checkpoint failed: folder=%s error="%s"', self.folder, error)
                return number
            # Keep earlier jobs' files. If they were deleted now, a job that lists the folder might miss all files.
            return number

    def _mark(self, job: int) -> Path:
        return self.folder / f".job-{job}"

    def _newest_job(self) -> int:
        marks = (_JOB.fullmatch(path.name) for path in self.folder.glob(".job-*"))
        return max(self.newest()[0], *(int(match[1]) for match in marks if match), 0)

    def _path(self, step: int) -> Path:
        job = f".job{self.job}" if self.job > 1 else ""
        return self.folder / f"step-{step:08d}{job}.ckpt"

    def has(self, step: int) -> bool:
        """Return whether this job has written a checkpoint of this step."""
        return self._path(step).exists()

    def _files(self) -> dict[tuple[int, int], Path]:
        """Return the checkpoint files by job number and step."""
        found = ((_FILE.fullmatch(path.name), path) for path in self.folder.glob("step-*.ckpt"))
        return {(int(match[2] or 1), int(match[1])): path for match, path in found if match}

    def paths(self) -> list[Path]:
        """Return the checkpoints' paths, the oldest first."""
        return [path for _, path in sorted(self._files().items())]

    def newest(self) -> tuple[int, int]:
        """Return the job number and step of the newest checkpoint; (0, 0) if there is no checkpoint."""
        return max(self._files(), default=(0, 0))

    def check_is_shared(self, newest: Mapping[int, Sequence[int]], rank: int) -> None:
        """Raise KungFuError if another rank's folder contains a newer checkpoint than this rank's folder.

        In that case, the hosts don't share the folder. `newest` maps each rank to the job number and step of its newest
        checkpoint.
        """
        found = {each: tuple(value) for each, value in newest.items()}
        other = max(found, key=lambda each: found[each], default=rank)
        if found and found[other] > found.get(rank, (0, 0)):
            mine = f"step {found[rank][1]}" if any(found.get(rank, ())) else "no checkpoint"
            raise KungFuError(
                f"rank {other} finds a checkpoint of step {found[other][1]} in {self.folder}, but rank {rank} finds "
                f"{mine}: share the folder between all hosts, or copy the folder with the newest checkpoint to each "
                "host"
            )

    def remove_unfinished(self) -> None:
        """Remove unfinished files that workers left when they were killed. Called when a job starts."""
        for path in self.folder.glob(f"{_UNFINISHED}*"):
            path.unlink(missing_ok=True)

    def load(self) -> tuple[Path, Mapping[str, Any], Mapping[str, Any]] | None:
        """Return (path, entries, host) of the newest readable checkpoint; None if the folder contains no checkpoint.

        Damaged files are renamed. Raise KungFuError if the folder contains checkpoints but none of them can be read.
        Renamed damaged files also count as checkpoints. Also raise KungFuError if this version of ms_kungfu doesn't
        support the format of the newest readable file.
        """
        import mindspore as ms

        paths = self.paths()
        for place, path in reversed(list(enumerate(paths))):
            try:
                os.close(open_regular(path))  # reject a FIFO, because MindSpore would wait for a writer
                entries = dict(ms.load_checkpoint(str(path), crc_check=True))
                host = decode_object(entries.pop(_ENTRY), _MAX_ENTRY, raw_bytes=True, own=True)
                number, writer = host.pop("format", 1), host.pop("written_by", "of an unknown version")
                if number <= FORMAT:
                    return path, entries, host
                raise KungFuError(
                    f"checkpoint {path} has format {number} and was written by ms_kungfu {writer}, but ms_kungfu "
                    f"{VERSION} reads formats 1 to {FORMAT}: resume with the version that wrote it, or a newer version"
                )
            except (ValueError, KeyError, TypeError, OSError) as error:
                older = paths[place - 1].name if place else "none"
                if reading := reading_error(error):
                    _log.warning('checkpoint unreadable: path=%s next=%s error="%s"', path, older, reading)
                    continue
                os.replace(path, damaged := path.with_suffix(".ckpt.damaged"))
                _log.warning(
                    'checkpoint damaged: path=%s renamed=%s next=%s error="%s"', path, damaged.name, older, error
                )
        if lost := [*self.paths(), *self.folder.glob("step-*.ckpt.damaged")]:
            raise KungFuError(
                f"none of the {len(lost)} checkpoints in {self.folder} can be read; restore one as step-*.ckpt, or "
                "give another folder to train from the beginning"
            )
        return None


def restore_tensors(
    state: TrainingState, entries: Mapping[str, Any], path: Path, dataset: Mapping[str, Any] | None = None
) -> None:
    """Copy a checkpoint file's entries into the state's tensors. `dataset`: the dataset's state in the checkpoint.

    If names, shapes or dtypes differ, raise KungFuError without changing any tensor.
    """
    wanted = {name: tensor for name, tensor in named_tensors(state) if tensor.size}
    differing = sorted(set(wanted) ^ set(entries))
    if differing:
        side = "this program" if differing[0] in wanted else "the checkpoint"
        raise KungFuError(
            f"checkpoint {path} belongs to another training run: {differing[0]!r} is in {side} only; resume with the "
            "same program and arguments, or train from the start in another folder"
        )
    for name, tensor in wanted.items():
        entry = entries[name]
        if tuple(entry.shape) != tuple(tensor.shape) or entry.dtype != tensor.dtype:
            rates = ""
            if name.startswith("learning_rate"):
                rates = "; resume with the original list of rates, whose last entry applies to all later steps"
                there, here = _batch(dataset), _batch(_dataset_of(state))
                if there and here and there != here:
                    rates += (
                        f". The list's length probably follows from the batch size, which was {there} and is {here} "
                        f"in this program: resume with {there}, then call ElasticDataset.set_batch_size({here})"
                    )
            raise KungFuError(
                f"checkpoint {path} belongs to another training run: {name!r} is {entry.dtype}{tuple(entry.shape)} in "
                f"it and {tensor.dtype}{tuple(tensor.shape)} in this program{rates}"
            )
    for name, tensor in wanted.items():
        assign(tensor, entries[name].asnumpy())


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _dataset_of(state: TrainingState) -> Mapping[str, Any] | None:
    return next((component.capture() for component in state.components if component.name == "dataset"), None)


def _batch(dataset: Mapping[str, Any] | None, with_shards: bool = False) -> str:
    """Return the batch size in a dataset's state, written like arguments of `ElasticDataset`; "" without a state."""
    if dataset is None:
        return ""
    per_worker, of_all = dataset["batch"]
    size = f"batch_size={per_worker}" if of_all is None else f"global_batch_size={of_all}"
    return f"{size}, shards={dataset['shards']}" if with_shards and dataset.get("shards") else size


def _other_batch(there: str, here: str) -> str:
    """Describe the difference between the checkpoint's and the program's batch size; "" if there is none."""
    if not there or not here or there == here:
        return ""
    told = f"the checkpoint's {there} instead of the program's {here}. To change the batch size, call"
    return f"{told} ElasticDataset.set_batch_size({here}) on all workers at the beginning of an epoch"


class Checkpointing:
    """Decide when to write checkpoints, and restore them. All methods except `is_due` are collective.

    `prepare` is a collective function that is called before the state is copied for a checkpoint.
    """

    def __init__(
        self, options: Options, training: program.Training, prepare: Callable[[], None] = lambda: None
    ) -> None:
        folder = options.checkpoint_dir
        if folder is not None and not isinstance(folder, CheckpointFolder):
            folder = CheckpointFolder(folder, options.keep_checkpoints)
        self.folder = folder
        """The folder of the checkpoints; None if the program doesn't use checkpoints."""
        self._every = options.checkpoint_every
        self._resume = options.resume
        self._training, self._prepare = training, prepare

    def _conditions(self) -> Mapping[str, Any]:
        """Return the numeric environment; {} without shards, because exact results then depend on the cluster size."""
        return {} if self._training.dataset is None else self._training.dataset.conditions()

    @property
    def training(self) -> tuple[str, int] | None:
        """(hash of the folder's path, this job's number in the folder), for the ledger; None without a folder."""
        if self.folder is None:
            return None
        return f"{zlib.crc32(os.fsencode(os.path.abspath(self.folder.folder))):08x}", program.current().job

    def is_due(self, step: int) -> bool:
        return self._every is not None and step % self._every == 0

    @membership.spending("checkpoint")
    def write(self, step: int) -> None:
        """Make the lowest rank write the state in the background. Do nothing in a replay.

        Raise ValueError if the program hasn't given a folder.
        """
        if replaying.current() is not None:
            return
        if self.folder is None:
            raise ValueError("can't write a checkpoint without a folder; give checkpoint_dir")
        self._prepare()
        now, mine = self._training.training_state, program.current()
        state_transfer.average(now.averaged)
        if self._training.dataset is not None:
            self._training.dataset.sync_ledger()  # all workers do this before one of them writes the checkpoint
        own = gather_json({c.name: c.capture() for c in now.components if c.own}, "kungfu/checkpoint")
        mine.checkpoint, mine.writes_checkpoint = step, runtime.current_rank() == min(own)
        if not mine.writes_checkpoint:
            return
        self.folder.job = mine.job
        host = {"components": {c.name: c.capture() for c in now.components if not c.own}, "own": list(own.values())}
        if conditions := self._conditions():
            host["conditions"] = conditions
        self.folder.save(take_snapshot(step, now, host))

    def make_up(self, step: int) -> None:
        """Write another checkpoint if the writer of the last one may have failed before its file was complete.

        Called after training, and after a change of the cluster as soon as all workers have the training state.
        """
        mine, folder = program.current(), self.folder
        last = mine.checkpoint
        if folder is None or last is None:
            return

        def look() -> str:
            # While the worker that writes the checkpoint is a member, it remains the lowest rank. If that worker was
            # removed, it still completes its checkpoint; then the checkpoint that is written below is superfluous.
            return "writing" if mine.writes_checkpoint else "there" if folder.has(last) else "lost"

        folder.job = mine.job
        found = state_transfer.from_lowest_rank(partial(broadcast_json, look))
        if found != "writing":
            mine.checkpoint = None
        if found == "lost":
            _log.warning('checkpoint lost: step=%d next_step=%d reason="the worker that wrote it failed"', last, step)
            self.write(step)

    def begin(self, joined: bool, goes_on: bool) -> bool:
        """Restore the newest checkpoint when a training call begins; return whether a checkpoint was restored.

        No checkpoint is restored in three cases:

        - This worker has joined a running job (`joined`).
        - An earlier training call has used the same folder.
        - Training continues in the middle of a call (`goes_on`).
        """
        if self.folder is None:
            return False
        path = os.path.abspath(self.folder.folder)
        known = program.current().checkpoint_folders
        resumed = not joined and not goes_on and path not in known and self._restore(self.folder)
        if program.is_behind():
            return False  # the checkpoint belongs to a later training call, and that call will restore it
        # A joining worker must not read the folder later either, because the other workers have already read the
        # folder.
        known.add(path)
        return resumed

    def _restore(self, folder: CheckpointFolder) -> bool:
        """Restore the newest checkpoint; return whether it was restored.

        If the checkpoint was written in a later training call, that call restores the checkpoint, because the state
        belongs to the objects of that call. The file isn't read again before that call. Only the lowest rank reads the
        file, because other hosts may lack the folder.
        """
        now, rank, mine = self._training.training_state, runtime.current_rank(), program.current()
        path = os.path.abspath(folder.folder)
        known = mine.call_of_checkpoint.get(path, 0)  # the same on all workers
        if known > mine.calls:
            mine.call_of_state = known
            return False

        def receive(root: int) -> Any:
            newest = gather_json(folder.newest(), "kungfu/newest") if self._resume else {}
            answer = broadcast_json(lambda: self._open(folder, now, newest), root)
            if answer.get("host") is not None:
                state_transfer.broadcast_tensors(now, root)
            return answer

        answer = state_transfer.from_lowest_rank(receive)
        if answer["error"]:
            raise KungFuError(answer["error"])
        mine.call_of_state = answer.get("call", 0)
        if mine.call_of_state > mine.calls:
            mine.call_of_checkpoint[path] = mine.call_of_state
            return False
        mine.job = answer["job"]
        host = answer["host"]
        if host is None:
            return False
        # If the checkpoint has no entry for this rank, the rank continues like a joining worker.
        beyond = rank >= len(host["own"])
        own = host["own"][0 if beyond else rank]
        found = {**host["components"], **own}
        # Read the program's own numeric environment now, before the checkpoint changes it.
        conditions = self._conditions() or {"shards": None}
        there, dataset = host.get("conditions", {}), self._training.dataset
        gives_shards = False
        if dataset is not None and dataset.shards is not None:
            # The dataset continues with the values that the checkpoint has for these arguments.
            conditions = {**conditions, **{name: there[name] for name in ARGUMENTS if name in there}}
            gives_shards = not dataset.shards_are_chosen and "shards" in there
        batch = _other_batch(*(_batch(each, gives_shards) for each in (found.get("dataset"), _dataset_of(now))))
        differing = self._resume_components(now, found, answer["path"], of_another=beyond)
        mine.checkpoint, mine.job = None, answer["job"]  # overwrite the file's values, which belong to an earlier job
        if membership.speaks_for_all():
            event_log.resumed(answer["path"])
        if differing and membership.speaks_for_all():
            _log.warning(
                'checkpoint differs: path=%s state="%s". State that the file lacks keeps its initial value; '
                "state that the program lacks is ignored",
                answer["path"], ", ".join(differing),
            )  # fmt: skip
        if batch and membership.speaks_for_all():
            _log.warning("checkpoint differs: path=%s. Training continues with %s", answer["path"], batch)
        told = differences(there, conditions)
        if told and membership.speaks_for_all():
            _log.warning(
                'numeric environment differs: path=%s differing="%s". Results may differ from an uninterrupted run',
                answer["path"], told,
            )  # fmt: skip
        return True

    def _resume_components(
        self, now: TrainingState, found: Mapping[str, Any], path: str, of_another: bool
    ) -> list[str]:
        """Restore the components (collective).

        Raise KungFuError on all workers if one worker can't continue from the file.
        """
        refusal, differing = "", list[str]()
        try:
            differing = resume_components(now.components, found, of_another=of_another)
        except (KungFuError, ValueError) as error:
            refusal = str(error)
        for rank, told in gather_json(refusal, "kungfu/resumed").items():
            if told:
                raise KungFuError(f"rank {rank} can't resume from {path}: {told}")
        return differing

    def _open(
        self, folder: CheckpointFolder, now: TrainingState, newest: Mapping[int, Sequence[int]]
    ) -> dict[str, Any]:
        try:
            folder.check_is_shared(newest, runtime.current_rank())
            folder.remove_unfinished()
            if not self._resume:
                if there := folder.paths():
                    already = f"{folder.folder} has {len(there)} checkpoints of an earlier training"
                    return {"error": f"{already}; resume from them, or give another folder"}
                return {"error": "", "host": None, "job": folder.take_job()}
            found = folder.load()
            call = found[2]["components"].get("progress", {}).get("call", 0) if found is not None else 0
            if call > program.current().calls:
                return {"error": "", "call": call}
            job = folder.take_job() if replaying.current() is None else 1
            if found is None:
                _log.info("no checkpoint: folder=%s. Training starts from the beginning", folder.folder)
                return {"error": "", "host": None, "job": job}
            path, entries, host = found
            restore_tensors(now, entries, path, host["components"].get("dataset"))
            return {"error": "", "host": host, "job": job, "path": str(path)}
        except Exception as error:
            # Catch any error, because the other workers wait for the result.
            known = isinstance(error, KungFuError)
            return {"error": str(error) if known else f"{type(error).__name__}: {error}"}
