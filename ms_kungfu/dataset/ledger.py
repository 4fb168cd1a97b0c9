"""The ledger of what was trained, and how `ms_kungfu.dataset.audit` reads it.

Each worker appends to a file of its own, one line of JSON for each committed step, one ``write`` a line. So a killed
worker leaves at most one torn line, its last. Lines survive the process but not the machine: they aren't synced to the
disk.

A file begins with a header:
- ``ledger``: the format of the file; ``written_by``: the ms_kungfu that wrote it.
- ``job``: the same for all workers of a job; ``data``: counts the ElasticDatasets of the program; ``uid``; ``time``: in
  seconds since 1970.
- ``stopped``: why the file ends before its training does, else null.

With shards it also has ``conditions``, the numeric environment of the bits (`ms_kungfu.dataset.conditions`). If the
workers have compared what is behind the numbers, it has ``contents`` (`ms_kungfu.dataset.contents`). These are
``samples``, their number, and the hashes ``some`` and ``all``, which are equal in all files if the contents are.

The line of a step has ``rank`` and ``share``, the positions that were delivered to this worker. It also has what all
workers know of the step:
- the epoch and the step's number in it, cluster version and size
- ``members``: the ranks to which ``batch`` was assigned, in this order
- ``participants``: the ranks whose share the step's update contains
- ``total``, ``seed`` and ``shuffle``, which make positions into samples

So a worker's share follows from any worker's line, even if the worker failed before it wrote its own. At the end of an
epoch each worker writes a line with ``steps``, how many it had, and ``left``, what ``drop_remainder`` leaves out of it.
Both have ``job``, ``data`` and ``time`` too.

Under ``kungfu-run --msrun`` it may have ``ranks``, those of the virtual world: a worker's share is then the blocks of
the ranks that it plays (`ms_kungfu.dataset.sharding`).

A step that is partitioned into shards has ``shards``, into how many a ``global_batch`` is cut. ``weights`` of the
members say how they are assigned (none: evenly). ``sums`` is how many ShardedSteps were made with its batch. All of its
``batch`` is in its update, whichever workers failed in it: ``participants`` are those that haven't. A ``share`` has the
shards that were delivered to a worker, one after the other: its own first, then those of workers that failed in the
step. A worker without a shard has the last one, for nothing.

Every so many steps its line has a ``fingerprint`` of this worker's state after the step: ``step``, the number of the
steps done since training began, and ``tensors``, a CRC-32 of each tensor's bits by the name that it has in a
checkpoint. All workers have the same; `ms_kungfu.replay` compares them with those of another run.

The last entry of a line is ``crc``: of the line's text, continued from the ``crc`` of the line before. So a file shows
that a line is missing, doubled or altered, except for whole lines missing at its end, which only the other workers'
files show. The header's stands alone, since only the header is written again.

*Formats.* 1 is from before files had a header: no ``crc``, and ``share`` computed instead of observed. 2 has no shards;
a file without them still has that number, since nothing in it is new. 3 has shards, and their partition
(`ops_src/shards/partition.h`), which the audit computes: another partition is another format. An entry that a reader
may ignore is added to a header or a line without a new number. Another kind of line, or another meaning, takes the next
number, which an older reader rejects.
"""

from __future__ import annotations

import errno
import json
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

from ms_kungfu import env, runtime
from ms_kungfu._decoding import decode_object
from ms_kungfu._files import open_regular, read_regular
from ms_kungfu._version import VERSION
from ms_kungfu.dataset.contents import Contents
from ms_kungfu.dataset.sharding import EpochCursor, Range, Step
from ms_kungfu.errors import KungFuError

FORMAT = 3  # the newest that is read, and the one of ledgers with shards
_WITHOUT_SHARDS = 2
ERRORS = ("raise", "warn")
_HEADER_BYTES = 1024  # a fixed length: a full disk has no space for a longer one
_REASON_CHARS = 80
_MAX_LINE = 64 * 1024 * 1024
_WRONG = (ValueError, LookupError, TypeError, AttributeError, OverflowError)  # errors of a line that is no record
_PLACE = ("epoch", "step", "steps", "rank", "version")
_log = logging.getLogger(__name__)
_process = secrets.token_hex(6)


def job() -> str:
    """Return a word that all workers of a job have in common, and no other job."""
    return env.JOB.get() or _process


def worker_of(file: str) -> str:
    """Return the worker of a ledger's file, by its name: a worker has one per ElasticDataset, more after a restart."""
    return file.rpartition("-")[0] or file


def seal(values: dict[str, Any], before: int = 0) -> tuple[bytes, int]:
    """Return (the line of `values` without its end, its crc), where `before` is the crc of the line before it."""
    text = json.dumps(values, separators=(",", ":")).encode()[:-1]
    crc = zlib.crc32(text, before)
    return text + b',"crc":"%08x"}' % crc, crc


def is_sealed(line: bytes, before: int = 0) -> bool:
    """Return whether the line was written directly after the one that has the crc `before`."""
    text, _, rest = line.rpartition(b',"crc":"')
    return rest == b'%08x"}' % zlib.crc32(text, before)


class Ledger:
    """This worker's file in `folder`, which is made if it is missing; the file is made at the first line.

    With `errors` "raise" a line that can't be written is an OSError, and so is each one after it. With "warn" the file
    ends there, which is a warning, and training continues without a record. Both leave the reason in the header.

    `sharded`: its steps are partitioned into shards. `conditions`: the header's numeric environment; `fingerprints`:
    after how many steps there is one, 0 for never. `contents`: hashes of the source's samples, for the header; None:
    unknown.
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
            raise ValueError(f"ledger_errors is {' or '.join(map(repr, ERRORS))}, got {errors!r}")
        self._folder = folder
        self._data = data
        self._errors = errors
        self._format = FORMAT if sharded else _WITHOUT_SHARDS
        self._conditions, self._contents = conditions, contents
        self._told: dict[str, Any] = {}  # entries of the header
        self._fingerprints = fingerprints
        self._file: Any = None
        self._whole = 0  # bytes of it that are whole lines
        self._synced = False  # its name is on the disk
        self._crc = 0
        self._error: OSError | None = None  # why it has ended
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self._stop(error, {})

    def wants_fingerprint(self, epoch: int, number: int, step: int) -> bool:
        """Return whether the line of this step, the `step`-th since training began, shall have one."""
        return self._fingerprints > 0 and step % self._fingerprints == 0

    def step(self, epoch: int, step: Step, rank: int, share: Iterable[Range], common: dict[str, Any]) -> None:
        """Append the line of a committed step, of which `share` was delivered to this worker."""
        dealt = {"share": tuple(share), "members": step.members, "batch": step.batch}
        self._write({"epoch": epoch, "step": step.number, "rank": rank, **dealt, **common})

    def end(self, cursor: EpochCursor, rank: int, common: dict[str, Any]) -> None:
        """Append the line of an epoch that is over."""
        self._write({"epoch": cursor.epoch, "steps": cursor.steps, "rank": rank, "left": cursor.pool, **common})

    def sync(self) -> None:
        """Sync the file, before a checkpoint from which a training may continue after a crash of the machine."""
        if self._file is None or self._error is not None:
            return
        try:
            os.fsync(self._file.fileno())
            if not self._synced:
                folder = os.open(self._folder, os.O_RDONLY)
                try:
                    os.fsync(folder)  # the file's name
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
        # The job and the time are also those of a process that was started in advance: it learns its number late.
        values = {"job": job(), "time": round(time.time(), 3), "data": self._data, **values}
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
        for number in range(1000):  # a worker may be a shell script of several programs
            with suppress(FileExistsError):
                return (self._folder / f"{stem}{f'.{number}' if number else ''}.jsonl").open("xb", buffering=0)
        raise OSError(errno.EEXIST, f"{self._folder} has a thousand files of the worker {stem}")

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
        while rest:  # after a partial write the next call raises the reason
            rest = rest[self._file.write(rest) :]
        self._whole += len(content)

    def _stop(self, error: OSError, line: dict[str, Any]) -> None:
        """End the file after its last whole line, and write the reason to its header."""
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
            _log.warning("ledger failed: error=\"%s\". Training goes on without it, as ledger_errors='warn' asks", text)
            self._error = error
            return
        remedy = "training ends here, since it would not be on record (ledger_errors='warn' goes on)"
        self._error = OSError(error.errno, f"{text}; {remedy}")
        raise self._error from error


@dataclass(frozen=True)
class Shards:
    """The partition of a step's shards."""

    unit: int
    """Samples of each but the last."""
    weights: tuple[int, ...]
    """Of the members; none: all alike."""
    sums: int
    """ShardedSteps that were made with the batch."""


@dataclass(frozen=True)
class Claim:
    """One record's claims, which all records of the step have to share."""

    version: int
    size: int
    members: tuple[int, ...]
    participants: tuple[int, ...]
    batch: tuple[Range, ...]
    total: int
    seed: int
    shuffle: bool
    shards: Shards | None = None
    """None: the members' shares are blocks of the batch."""
    ranks: int = 0
    """As of a `sharding.Step`."""

    @property
    def order(self) -> tuple[int, int, bool]:
        """Return what makes positions into samples."""
        return self.total, self.seed, self.shuffle


@dataclass(frozen=True)
class End:
    """A worker's record of an epoch that is over, and the claims that all workers have to share."""

    left: tuple[Range, ...]
    global_batch: int
    drop_remainder: bool


@dataclass(frozen=True)
class Stop:
    """A record that a worker could write nothing from here on, and why."""

    reason: str
    goes_on: bool
    """Whether it trained on nevertheless, by its option."""


@dataclass(frozen=True)
class Fingerprint:
    """A worker's checksums after a step."""

    step: int
    """Since training began, from 1."""
    tensors: Mapping[str, str]
    """Checksums of their bits."""


@dataclass(frozen=True)
class Record:
    """A line of the ledger."""

    where: str
    job: str
    time: float
    data: int
    epoch: int
    step: int
    """At the end of an epoch: the number of its steps."""
    rank: int
    share: tuple[Range, ...]
    claim: Claim | End | Stop
    fingerprint: Fingerprint | None = field(default=None, compare=False)
    training: tuple[str, int] | None = None
    """Which folder has the checkpoints, and the job's number there."""
    contents: Mapping[str, Any] | None = field(default=None, compare=False)
    """What its file's header says of the samples' contents."""

    @property
    def place(self) -> tuple[int, int]:
        """Return epoch and step."""
        return self.epoch, self.step


def _ranges(value: Any) -> tuple[Range, ...]:
    ranges = tuple((first, last) for first, last in value)
    if not all(type(first) is int and type(last) is int and 0 <= first < last for first, last in ranges):
        raise ValueError(value)
    return ranges


def _parse(line: dict[str, Any], where: str) -> Record:
    """Return the record in a line; ValueError, KeyError or TypeError if it isn't one."""
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
        ranks = line.get("ranks", 0)
        if type(ranks) is not int or 0 < ranks < len(members) or ranks < 0:
            raise ValueError(line)
        claim = Claim(version, size, members, participants, batch, total, seed, shuffle, dealt, ranks)
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
    """Return the records of each file of the ledger in `folder`, in their order; problems; notes.

    KungFuError if a file has a newer format than this version reads.
    """
    files: dict[str, list[Record]] = {}
    problems: list[str] = []
    notes: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        files[path.name] = _read_file(path, problems, notes)
    return files, problems, notes


def headers(folder: Path) -> Iterator[dict[str, Any]]:
    """Return the headers of the ledger's files that have one."""
    for path in sorted(folder.glob("*.jsonl")):
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                header = _header_in(path.name, file.readline())
        except OSError:  # `read` reports it
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
        notes.append(f"{path.name}, line {len(lines) + 1}: torn, not counted (its worker was killed while it wrote)")
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
                    problems.append(f"{where}: isn't what was written after the line before it; not counted")
                    continue
            records.append(replace(_parse(line, where), contents=contents))
        except _WRONG:
            lost = " (nor has the file the header of one that has them)" if b'"crc":' in content and not header else ""
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
    """Return the header in the first line, if it is one; None in a file of the first format."""
    try:
        header = decode_object(line, _MAX_LINE, raw_bytes=True, own=True)
        number = header["ledger"]
    except (ValueError, KeyError, TypeError):
        return None
    if type(number) is int and number > FORMAT:
        writer = header.get("written_by", "of an unknown version")
        raise KungFuError(
            f"{name} has ledger format {number}, written by ms_kungfu {writer}; ms_kungfu {VERSION} "
            f"reads formats 1 to {FORMAT}: audit it with the version that wrote it, or a newer one"
        )
    return dict(header)
