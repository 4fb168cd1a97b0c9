"""What the files of a ledger say, record by record, and what is wrong with them. `ledger` has their format."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ms_kungfu._version import VERSION
from ms_kungfu.dataset import ledger
from ms_kungfu.dataset.sharding import Range
from ms_kungfu.errors import KungFuError


@dataclass(frozen=True)
class Claim:
    """What one record says that all records of the step have to say."""

    version: int
    size: int
    members: tuple[int, ...]
    participants: tuple[int, ...]
    batch: tuple[Range, ...]
    total: int
    seed: int
    shuffle: bool

    @property
    def order(self) -> tuple[int, int, bool]:
        """What makes positions into samples."""
        return self.total, self.seed, self.shuffle


@dataclass(frozen=True)
class End:
    """What a worker says of an epoch that is over, and what all workers have to say."""

    left: tuple[Range, ...]
    global_batch: int
    drop_remainder: bool


@dataclass(frozen=True)
class Stop:
    """That a worker could write nothing from here on, and why."""

    reason: str
    goes_on: bool
    """Whether it trained on all the same, because it was told to."""


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

    @property
    def place(self) -> tuple[int, int]:
        """Epoch and step."""
        return self.epoch, self.step


def _ranges(value: Any) -> tuple[Range, ...]:
    ranges = tuple((first, last) for first, last in value)
    if not all(type(first) is int and type(last) is int and 0 <= first < last for first, last in ranges):
        raise ValueError(value)
    return ranges


def _parse(line: dict[str, Any], where: str) -> Record:
    """The record in a line; ValueError, KeyError or TypeError where it isn't one."""
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
        claim = Claim(version, size, members, participants, batch, total, seed, shuffle)
    return Record(where, str(line["job"]), float(line["time"]), *own, share, claim)


def read(folder: Path) -> tuple[dict[str, list[Record]], list[str], list[str]]:
    """The records of each file of the ledger in `folder`, in their order; problems; notes.

    KungFuError where a file has a newer format than this version reads.
    """
    files: dict[str, list[Record]] = {}
    problems: list[str] = []
    notes: list[str] = []
    for path in sorted(folder.glob("*.jsonl")):
        files[path.name] = _read_file(path, problems, notes)
    return files, problems, notes


def _read_file(path: Path, problems: list[str], notes: list[str]) -> list[Record]:
    *lines, torn = path.read_bytes().split(b"\n")
    if torn:
        notes.append(f"{path.name}, line {len(lines) + 1}: torn, not counted (its worker was killed while it wrote)")
    elif not lines:
        notes.append(f"{path.name}: empty (its worker was killed, or its disk was full, before its first line)")
    records: list[Record] = []
    header = _header(path.name, lines[0]) if lines else None
    crc = 0
    for number, content in enumerate(lines, 1):
        where = f"{path.name}, line {number}"
        if header is not None and number == 1:
            if not ledger.is_sealed(content.rstrip(b" ")):
                problems.append(f"{where}: the header was altered")
            continue
        try:
            line = json.loads(content)
            if header is None and "crc" in line:
                raise ValueError("the header is missing")
            if header is not None:
                before, crc = crc, int(line["crc"], 16)
                if not ledger.is_sealed(content, before):
                    problems.append(f"{where}: isn't what was written after the line before it; not counted")
                    continue
            records.append(_parse(line, where))
        except (ValueError, KeyError, TypeError):
            lost = " (nor has the file the header of one that has them)" if b'"crc":' in content and not header else ""
            problems.append(f"{where}: not a record of a step{lost}")
    stopped = None if header is None else header.get("stopped")
    if header is not None and stopped:
        try:
            claim = Stop(str(stopped["reason"]), bool(stopped["goes_on"]))
            step = stopped["steps" if "steps" in stopped else "step"]
            own = header["job"], float(header["time"]), header["data"], stopped["epoch"], step, stopped["rank"]
            records.append(Record(path.name, *own, (), claim))
        except (ValueError, KeyError, TypeError):
            problems.append(f"{path.name}, line 1: not a header")
    return records


def _header(name: str, line: bytes) -> dict[str, Any] | None:
    """What the first line says if it is a header; None in a file of the first format."""
    try:
        header = json.loads(line)
        number = header["ledger"]
    except (ValueError, KeyError, TypeError):
        return None
    if type(number) is int and number > ledger.FORMAT:
        writer = header.get("written_by", "of an unknown version")
        raise KungFuError(
            f"{name} has ledger format {number}, written by ms_kungfu {writer}; ms_kungfu {VERSION} "
            f"reads formats 1 to {ledger.FORMAT}: audit it with the version that wrote it, or a newer one"
        )
    return dict(header)
