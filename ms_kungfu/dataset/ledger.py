"""Write the ledger of the samples used, and read it for `ms_kungfu.dataset.audit`.

Each worker appends to its own file. It writes one line of JSON per committed step, with one ``write`` call per line. So
only the last line of a killed worker's file may be incomplete. The lines are synced to disk only before a checkpoint.
So a crash of the process loses no line, but a crash of the machine may lose the lines after the last checkpoint.

A file begins with a header:
- ``ledger``: the format of the file
- ``written_by``: the version of ms_kungfu that wrote the file
- ``job``: the ID of the job, which is the same for all its workers
- ``data``: the index of the ElasticDataset in the program
- ``uid``: the ID of the worker
- ``time``: the time in seconds since 1970
- ``stopped``: the reason if the file ends before the training run, otherwise null

If the dataset has shards, the header also has ``conditions``, the numeric environment (`ms_kungfu.dataset.conditions`).
If the workers compared sample contents, the header has ``contents`` (`ms_kungfu.dataset.contents`): ``samples``, the
number of hashed samples, and the hashes ``some`` and ``all``. If the contents are the same in all processes, the hashes
are the same in all files.

The line of a step has ``rank``, and ``share``, the positions that were delivered to this worker. The line also has the
values that are the same for all workers:
- the epoch, the step's number in the epoch, the cluster version and the cluster size
- ``members``: the ranks to which ``batch`` was assigned, in the order of their blocks
- ``participants``: the ranks whose shares the step's update contains
- ``total``, ``seed`` and ``shuffle``, which map positions to samples
- ``first``: the number of the update's first step, if the update covers several steps (accumulated gradients)

So any worker's line suffices to compute all workers' shares, including that of a worker that failed before it wrote its
own line. At the end of an epoch, each worker writes a line with ``steps``, the number of steps, and ``left``, the
positions that ``drop_remainder`` leaves out. Both kinds of line also have ``job``, ``data`` and ``time``.

Under ``kungfu-run --msrun``, a line may have ``ranks``, the number of ranks in the virtual world. A worker's share then
consists of the blocks of all virtual ranks whose work the worker does (`ms_kungfu.dataset.sharding`).

The line of a step that is partitioned into shards has these entries:
- ``shards``: the number of shards in a full ``global_batch``
- ``weights``: the weights by which shards are assigned to the members; empty if all members have equal weights
- ``sums``: the number of ShardedSteps that ran on the step's batch

The update of such a step covers the whole ``batch`` even if workers failed in the step; ``participants`` are the
workers that did not fail. A ``share`` lists the shards that were delivered to a worker: first the worker's own shards,
then shards of workers that failed in the step. A worker without a shard receives the last shard, but the result that it
computes isn't used.

At a fixed interval of steps, a line has a ``fingerprint`` of this worker's state after the step. The fingerprint's
``step`` is the number of steps since training began. Its ``tensors`` maps each tensor's name in a checkpoint to a
CRC-32 of the tensor's bytes. All workers have the same fingerprint. `ms_kungfu.replay` compares it with the fingerprint
of another run.

The last entry of a line is ``crc``, a CRC of the line's text that continues from the ``crc`` of the previous line. So a
reader detects a line that is missing, repeated or altered. If whole lines are missing at the end of a file, the audit
can detect this only from other workers' files. The ``crc`` of the next line doesn't continue from the header's, because
the header may be rewritten.

*Formats.* Format 1 has no header and no ``crc``, and its ``share`` is computed instead of observed. Format 2 has no
shards; files without shards still use format 2. Format 3 has shards and their partition (`ops_src/shards/partition.h`),
which the audit recomputes. A different partition rule needs a new format. An entry that readers may ignore can be added
to a header or a line without a new format. A new kind of line, or a new meaning of an entry, needs the next format
number, which older readers reject.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable

import msgspec

from ms_kungfu import env, runtime
from ms_kungfu._decoding import decode_object
from ms_kungfu._files import open_regular, read_regular
from ms_kungfu._version import VERSION
from ms_kungfu.dataset.contents import Contents
from ms_kungfu.dataset.sharding import EpochCursor, Range, Step
from ms_kungfu.errors import KungFuError

FORMAT = 3  # the newest format that this version can read; ledgers with shards use it
_WITHOUT_SHARDS = 2
ERRORS = ("raise", "warn")
_HEADER_BYTES = 1024  # fixed, because a full disk has no space for a header that grows
_REASON_CHARS = 80
_MAX_LINE = 64 * 1024 * 1024
_WRONG = (ValueError, LookupError, TypeError, AttributeError, OverflowError)  # raised for a line that isn't a record
_PLACE = ("epoch", "step", "steps", "rank", "version")
_log = logging.getLogger(__name__)
_process = secrets.token_hex(6)


def job() -> str:
    """Return the job's ID, which is the same for all workers of the job and different for each job."""
    return env.JOB.get() or _process


def worker_of(file: str) -> str:
    """Return the name of the worker that wrote a ledger file, given the file's name.

    A worker has one file per ElasticDataset, and additional files after a restart.
    """
    return file.rpartition("-")[0] or file


def seal(values: dict[str, Any], before: int = 0) -> tuple[bytes, int]:
    """Return `values` as a line without a newline, and the line's crc. `before` is the crc of the previous line."""
    text = msgspec.json.encode(values)[:-1]
    crc = zlib.crc32(text, before)
    return text + b',"crc":"%08x"}' % crc, crc


def is_sealed(line: bytes, before: int = 0) -> bool:
    """Return whether the line is unaltered and was written directly after the line with the crc `before`."""
    text, _, rest = line.rpartition(b',"crc":"')
    return rest == b'%08x"}' % zlib.crc32(text, before)


class Ledger:
    """This worker's ledger file in `folder`.

    The constructor creates the folder if it is missing. The file is created when its first line is written. If a line
    can't be written and `errors` is "raise", OSError is raised for that line and each later line. With "warn", the file
    ends before that line, a warning is logged, and training continues. In both cases, the header contains the reason.

    Args:
        folder: the folder of the ledger.
        data: the index of the ElasticDataset in the program.
        errors: what happens if a line can't be written: "raise" or "warn".
        sharded: whether steps are partitioned into shards.
        conditions: a function that returns the numeric environment.
        fingerprints: the number of steps between two fingerprints; 0 if none are recorded.
        contents: a function that returns the hashes of the source's samples, or None if they are unknown.
    """

    def __init__(
        self,
        folder: Path,
        data: int,
        errors: str = "raise",
        *,
        sharded: bool = False,
        conditions: Callable[[], dict[str, Any]] | None = None,
        fingerprints: int = 0,
        contents: Callable[[], Contents | None] | None = None,
    ) -> None:
        if errors not in ERRORS:
            raise ValueError(f"ledger_errors must be {' or '.join(map(repr, ERRORS))}, got {errors!r}")
        self._folder = folder
        self._data = data
        self._errors = errors
        self._format = FORMAT if sharded else _WITHOUT_SHARDS
        self._conditions, self._contents = conditions, contents
        self._told: dict[str, Any] = {}  # optional entries of the header
        self._fingerprints = fingerprints
        self._file: Any = None
        self._job = ""  # unknown until the first line, because a starting standby doesn't know its job
        self._whole = 0  # number of bytes in complete lines
        self._synced = False  # whether the folder, with the file's name in it, is synced
        self._crc = 0
        self._error: OSError | None = None  # why the file ended
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._stop(error, {})

    def wants_fingerprint(self, epoch: int, number: int, step: int) -> bool:
        """Return whether the line of this step gets a fingerprint. `step` counts from the start of training."""
        return self._fingerprints > 0 and step % self._fingerprints == 0

    def step(self, epoch: int, step: Step, rank: int, share: Iterable[Range], common: dict[str, Any]) -> None:
        """Append the line of a committed step. `share` was delivered to this worker."""
        dealt = {"share": tuple(share), "members": step.members, "batch": step.batch}
        self._write({"epoch": epoch, "step": step.number, "rank": rank, **dealt, **common})

    def end(self, cursor: EpochCursor, rank: int, common: dict[str, Any]) -> None:
        """Append the line of a finished epoch."""
        self._write({"epoch": cursor.epoch, "steps": cursor.steps, "rank": rank, "left": cursor.pool, **common})

    def sync(self) -> None:
        """Sync the file to disk before a checkpoint, so that the records survive a crash of the machine."""
        if self._file is None or self._error is not None:
            return
        try:
            os.fsync(self._file.fileno())
            if not self._synced:
                folder = os.open(self._folder, os.O_RDONLY)
                try:
                    os.fsync(folder)  # also sync the file's name
                finally:
                    os.close(folder)
                self._synced = True
        except OSError as error:
            self._stop(error, {})

    def _write(self, values: dict[str, Any]) -> None:
        if self._error is not None:
            if self._errors == "raise":
                raise self._error
            return
        self._job = self._job or job()
        values = {"job": self._job, "time": round(time.time(), 3), "data": self._data, **values}
        try:
            if self._file is None:
                self._file = self._create()
                if self._conditions is not None:
                    self._told = {"conditions": self._conditions()}
                found = None if self._contents is None else self._contents()
                if found is not None:
                    self._told["contents"] = found.words()
                self._append(self._header())
            line, crc = seal(values, self._crc)
            self._append(line + b"\n")
            self._crc = crc
        except OSError as error:
            self._stop(error, values)

    def _create(self) -> Any:
        stem = f"{job()}-{runtime.uid():x}-{self._data}"
        for number in range(1000):  # a worker may be a script that runs several programs, each with its own file
            with suppress(FileExistsError):
                return (self._folder / f"{stem}{f'.{number}' if number else ''}.jsonl").open("xb", buffering=0)
        raise OSError(errno.EEXIST, f"{self._folder} already has 1000 files of the worker {stem}")

    def _header(self, stopped: dict[str, Any] | None = None) -> bytes:
        line, _ = seal(
            {
                "ledger": self._format,
                "written_by": VERSION,
                "job": job(),
                "data": self._data,
                "uid": f"{runtime.uid():x}",
                "time": round(time.time(), 3),
                **self._told,
                "stopped": stopped,
            }
        )
        return line.ljust(_HEADER_BYTES - 1) + b"\n"

    def _append(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:  # if a write was partial, the next call raises the error
            rest = rest[self._file.write(rest) :]
        self._whole += len(content)

    def _stop(self, error: OSError, line: dict[str, Any]) -> None:
        """End the file after its last complete line, and write the reason to the header."""
        reason = error.strerror or str(error)
        goes_on = self._errors == "warn"
        first: dict[str, Any] = {key: line[key] for key in _PLACE if key in line}
        if self._file is not None:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), self._whole)
            if self._whole:
                stopped = {**first, "reason": reason[:_REASON_CHARS], "goes_on": goes_on}
                with suppress(OSError):
                    os.pwrite(self._file.fileno(), self._header(stopped), 0)
        path = self._folder if self._file is None else self._file.name
        text = f"{reason}: the ledger {path} can't be written"
        if goes_on:
            _log.warning(
                "ledger failed: error=\"%s\". Training continues without the ledger, because of ledger_errors='warn'",
                text,
            )
            self._error = error
            return
        remedy = "training ends, because later steps can't be recorded; ledger_errors='warn' would continue training"
        self._error = OSError(error.errno, f"{text}; {remedy}")
        raise self._error from error


@dataclass(frozen=True)
class Shards:
    """How a step is partitioned into shards."""

    unit: int
    """Number of samples per shard; the last shard may have fewer."""
    weights: tuple[int, ...]
    """The weights by which shards are assigned to the members; empty if all members have equal weights."""
    sums: int
    """Number of ShardedSteps that ran on the batch."""


@dataclass(frozen=True)
class Claim:
    """For one step, the values that must be the same in every worker's record."""

    version: int
    size: int
    members: tuple[int, ...]
    participants: tuple[int, ...]
    batch: tuple[Range, ...]
    total: int
    seed: int
    shuffle: bool
    shards: Shards | None = None
    """The shards of the step. If None, the members' shares are blocks of the batch."""
    ranks: int = 0
    """See `sharding.Step.ranks`."""
    first: int | None = None
    """The number of the update's first step; None if the update covers only this step."""

    @property
    def order(self) -> tuple[int, int, bool]:
        """Return the values that map positions to samples."""
        return self.total, self.seed, self.shuffle


@dataclass(frozen=True)
class End:
    """For the end of one epoch, the values that must be the same in every worker's record."""

    left: tuple[Range, ...]
    global_batch: int
    drop_remainder: bool


@dataclass(frozen=True)
class Stop:
    """The record of the reason why a worker could no longer write its ledger."""

    reason: str
    goes_on: bool
    """Whether the worker continued to train, because of `ledger_errors` = "warn"."""


@dataclass(frozen=True)
class Fingerprint:
    """Checksums of a worker's tensors after a step."""

    step: int
    """Number of the step since training began, starting at 1."""
    tensors: Mapping[str, str]
    """The checksum of each tensor's bytes, by the tensor's name."""


@dataclass(frozen=True)
class Record:
    """A line of the ledger."""

    where: str
    job: str
    time: float
    data: int
    epoch: int
    step: int
    """Number of the step in its epoch. In the record of an epoch's end, this is the number of steps in the epoch."""
    rank: int
    share: tuple[Range, ...]
    claim: Claim | End | Stop
    fingerprint: Fingerprint | None = field(default=None, compare=False)
    training: tuple[str, int] | None = None
    """The checkpoint folder, and the job's number in that folder."""
    contents: Mapping[str, Any] | None = field(default=None, compare=False)
    """The hashes of sample contents in the file's header."""

    @property
    def place(self) -> tuple[int, int]:
        """Return (epoch, step)."""
        return self.epoch, self.step


def _ranges(value: Any) -> tuple[Range, ...]:
    ranges = tuple((first, last) for first, last in value)
    if not all(type(first) is int and type(last) is int and 0 <= first < last for first, last in ranges):
        raise ValueError(value)
    return ranges


def _parse(line: dict[str, Any], where: str) -> Record:
    """Return the record that a line contains. Raise ValueError, KeyError or TypeError if it contains none."""
    step = line["steps" if "steps" in line else "step"]
    own = line["data"], line["epoch"], step, line["rank"]
    version, size, total, global_batch = (line[key] for key in ("version", "size", "total", "global_batch"))
    if not all(type(number) is int for number in (*own, version, size, total, global_batch, line["seed"])):
        raise ValueError(line)
    share, batch = _ranges(line.get("share", ())), _ranges(line["left" if "steps" in line else "batch"])
    if size < 1 or max((last for _, last in batch), default=0) > total:
        raise ValueError(line)
    claim: Claim | End
    if "steps" in line:
        claim = End(batch, global_batch, bool(line["drop_remainder"]))
    else:
        members, participants = tuple(line["members"]), tuple(line["participants"])
        if not (batch and own[3] in participants and set(participants) <= set(members)):
            raise ValueError(line)
        if not all(type(rank) is int and 0 <= rank < size for rank in members):
            raise ValueError(line)
        seed, shuffle = line["seed"], bool(line["shuffle"])
        dealt = _shards(line, global_batch, len(members)) if "shards" in line else None
        ranks, first = line.get("ranks", 0), line.get("first", step)
        if type(ranks) is not int or 0 < ranks < len(members) or ranks < 0 or type(first) is not int or first > step:
            raise ValueError(line)
        first = None if first == step else first
        claim = Claim(version, size, members, participants, batch, total, seed, shuffle, dealt, ranks, first)
    found = _fingerprint(line["fingerprint"]) if "fingerprint" in line else None
    training = None
    if "training" in line:
        folder, number = line["training"]
        if type(folder) is not str or type(number) is not int:
            raise ValueError(line)
        training = folder, number
    return Record(where, str(line["job"]), float(line["time"]), *own, share, claim, found, training)


def _fingerprint(entry: Any) -> Fingerprint:
    step, tensors = entry["step"], entry["tensors"]
    if type(step) is not int or step < 1 or not all(type(checksum) is str for checksum in dict(tensors).values()):
        raise ValueError(entry)
    return Fingerprint(step, dict(tensors))


def _shards(line: dict[str, Any], global_batch: int, members: int) -> Shards:
    count, weights, sums = line["shards"], tuple(line["weights"]), line["sums"]
    if not all(type(number) is int for number in (count, sums, *weights)) or min(count, sums) < 1:
        raise ValueError(line)
    if global_batch % count or (weights and (len(weights) != members or min(weights) < 1)):
        raise ValueError(line)
    return Shards(global_batch // count, weights, sums)


def read(folder: Path) -> tuple[dict[str, list[Record]], list[str], list[str]]:
    """Return the records of each ledger file in `folder`, in the order of the lines, and lists of problems and notes.

    Raise KungFuError if a file has a newer format than this version reads.
    """
    files: dict[str, list[Record]] = {}
    problems: list[str] = []
    notes: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        files[path.name] = _read_file(path, problems, notes)
    return files, problems, notes


def headers(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the header of each ledger file that has a header."""
    for path in sorted(folder.glob("*.jsonl")):
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                header = _header_in(path.name, file.readline())
        except OSError:  # `read` reports the error
            continue
        if header is not None:
            yield header


def _read_file(path: Path, problems: list[str], notes: list[str]) -> list[Record]:
    try:
        *lines, torn = read_regular(path).split(b"\n")
    except OSError as error:
        problems.append(f"{path.name}: can't be read: {error.strerror}")
        return []
    if torn:
        notes.append(f"{path.name}, line {len(lines) + 1}: incomplete, not counted (its worker was killed)")
    elif not lines:
        notes.append(f"{path.name}: empty (its worker was killed, or its disk was full, before its first line)")
    records: list[Record] = []
    header = _header_in(path.name, lines[0]) if lines else None
    contents = _contents(header)
    crc = 0
    for number, content in enumerate(lines, 1):
        where = f"{path.name}, line {number}"
        if header is not None and number == 1:
            if not is_sealed(content.rstrip(b" ")):
                problems.append(f"{where}: the header was altered")
            continue
        try:
            line = decode_object(content, _MAX_LINE, raw_bytes=True, own=True)
            if header is None and "crc" in line:
                raise ValueError("the header is missing")
            if header is not None:
                before, crc = crc, int(line["crc"], 16)
                if not is_sealed(content, before):
                    problems.append(f"{where}: doesn't continue the line before it; not counted")
                    continue
            records.append(replace(_parse(line, where), contents=contents))
        except _WRONG:
            lost = " (the file has lines with a crc, but no header)" if b'"crc":' in content and not header else ""
            problems.append(f"{where}: not a record of a step{lost}")
    stopped = None if header is None else header.get("stopped")
    if header is not None and stopped:
        try:
            claim = Stop(str(stopped["reason"]), bool(stopped["goes_on"]))
            step = stopped["steps" if "steps" in stopped else "step"]
            own = header["job"], float(header["time"]), header["data"], stopped["epoch"], step, stopped["rank"]
            records.append(Record(path.name, *own, (), claim))
        except _WRONG:
            problems.append(f"{path.name}, line 1: not a header")
    return records


def _contents(header: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    found = None if header is None else header.get("contents")
    whole = isinstance(found, dict) and type(found.get("samples")) is int and isinstance(found.get("some"), str)
    return found if whole else None


def _header_in(name: str, line: bytes) -> dict[str, Any] | None:
    """Return the header in a file's first line; None if the line contains no header, as in format 1."""
    try:
        header = decode_object(line, _MAX_LINE, raw_bytes=True, own=True)
        number = header["ledger"]
    except (ValueError, KeyError, TypeError):
        return None
    if type(number) is int and number > FORMAT:
        writer = header.get("written_by", "of an unknown version")
        raise KungFuError(
            f"{name} has ledger format {number} and was written by ms_kungfu {writer}, but ms_kungfu {VERSION} reads "
            f"formats 1 to {FORMAT}: audit it with the version that wrote it, or a newer one"
        )
    return dict(header)
