"""What was trained, on file: a line of JSON for each committed step and worker, for `ms_kungfu.dataset.audit`.

Each worker appends to a file of its own, one ``write`` a line: a worker that is killed leaves at most one torn line,
its last. What is written survives the process but not the machine: nothing is synced to the disk.

The line of a step has, besides ``rank`` and ``share`` (the positions that this worker trained), what all workers know
of it: the epoch and the step's number in it; cluster version and size; ``members``, the ranks to whom ``batch`` was
dealt, in this order; ``participants``, the ranks whose share the step's update contains; and ``total``, ``seed`` and
``shuffle``, which make positions into samples. A worker's share so follows from anybody's line, also where the worker
died before it wrote its own. At the end of an epoch each worker writes a line with ``steps``, how many it had, and
``left``, what ``drop_remainder`` leaves out of it. In both, ``data`` counts the ElasticDatasets of the program, ``job``
is the same for all workers of a job, and ``time`` is in seconds since 1970.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from pathlib import Path
from typing import Any

from ms_kungfu import env, runtime
from ms_kungfu.dataset.dealing import Step, Walk

_process = secrets.token_hex(6)


def job() -> str:
    """A word that all workers of a job have in common, and no other job."""
    broker = env.BROKER.get()
    return _process if broker is None else hashlib.sha256(broker.encode()).hexdigest()[:12]


class Ledger:
    """This worker's file in `folder`, which is made where it is missing; the file is made at the first line."""

    def __init__(self, folder: Path, data: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._data = data
        self._file: Any = None

    def step(self, epoch: int, step: Step, rank: int, common: dict[str, Any]) -> None:
        """Appends the line of a committed step. OSError where it can't be written whole."""
        dealt = {"share": step.share(rank), "members": step.members, "batch": step.batch}
        self._write({"epoch": epoch, "step": step.number, "rank": rank, **dealt, **common})

    def end(self, walk: Walk, rank: int, common: dict[str, Any]) -> None:
        """Appends the line of an epoch that is over."""
        self._write({"epoch": walk.epoch, "steps": walk.steps, "rank": rank, "left": walk.pool, **common})

    def _write(self, values: dict[str, Any]) -> None:
        if self._file is None:
            # Only now, since a process that was started in advance learns its number late.
            path = self._folder / f"{job()}-{runtime.uid():x}-{self._data}.jsonl"
            self._file = path.open("ab", buffering=0)
        line = {"job": job(), "time": round(time.time(), 3), "data": self._data, **values}
        content = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        written = self._file.write(content)
        if written != len(content):
            raise OSError(f"{self._file.name}: {written} of {len(content)} bytes of a ledger line were written")
