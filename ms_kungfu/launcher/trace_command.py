"""Merge the traces of a job's workers into one file, and print a summary (``kungfu-run trace DIR``)."""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from ms_kungfu._files import open_regular
from ms_kungfu._flags import FlagParser, UsageError, failed
from ms_kungfu._processes import printing
from ms_kungfu._words import counted, printable
from ms_kungfu.launcher.state.timeline import Offset, TraceEvent, WorkerTrace, offsets_of, summary_of
from ms_kungfu.launcher.wire.codec import DECODING_ERRORS

_PROGRAM = "kungfu-run trace"
_TRACES = "trace-*.json"
_EVENT = msgspec.json.Decoder(TraceEvent)


def trace(arguments: Sequence[str]) -> int:
    """Merge traces and print a summary of them.

    Exit status: 0 if the file is written, 1 if there is no readable trace or the file can't be written, 2 for a wrong
    command line.
    """
    parser = FlagParser(
        _PROGRAM,
        f"{_PROGRAM} DIR... [-o FILE]",
        "Merges the traces that the workers of a job have written (KUNGFU_TRACE=DIR) into one file for "
        "https://ui.perfetto.dev, in which all times are by one clock. Prints how the job spent its time. If each host "
        "has a folder of its own, copy the files into one folder, or give all folders.",
    )
    parser.flag("o", "the file to write, gzip if it ends in .gz (default: DIR/trace.json)", metavar="FILE")
    try:
        flags, folders = parser.parse_among(arguments)
        if not folders:
            raise UsageError(f"give the folder that KUNGFU_TRACE names, e.g. {_PROGRAM} traces")
        output = Path(flags.o or Path(folders[0], "trace.json"))
        if any(_is_trace_in(folder, output) for folder in folders):
            raise UsageError(f"-o {output} has the name of a worker's trace; give another name than {_TRACES}")
        workers = _newest_job(_read_all(folders))
        offsets = offsets_of([worker for worker, _ in workers])
        _write(output, workers, offsets)
    except UsageError as error:
        return failed(_PROGRAM, error, 2)
    except OSError as error:
        return failed(_PROGRAM, f"{error.filename or output}: {error.strerror}", 1)
    except ValueError as error:
        return failed(_PROGRAM, error, 1)
    with printing(_PROGRAM):
        print("\n".join(_summary(workers, offsets, output)), flush=True)
    return 0


def events_in(path: Path) -> Iterator[TraceEvent]:
    """Read a worker's trace line by line, and leave out incomplete lines, as in the trace of a killed worker.

    Raises:
        OSError: the file can't be read.
        ValueError: a line is nested too deeply.
    """
    return (event for _, event in _numbered(path))


def _numbered(path: Path) -> Iterator[tuple[int, TraceEvent]]:
    """Read a trace as `events_in` does, but yield each event with the number of its line."""
    with os.fdopen(open_regular(path), "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                event = _EVENT.decode(line.rstrip().rstrip(b","))
            except RecursionError:
                raise ValueError(f"{path}, line {number}: the event is nested too deeply") from None
            except DECODING_ERRORS:
                continue
            yield number, event


def _is_trace_in(folder: str, path: Path) -> bool:
    return path.match(_TRACES) and path.parent.resolve() == Path(folder).resolve()


def _read_all(folders: Sequence[str]) -> list[tuple[WorkerTrace, Path]]:
    workers = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        for path in sorted(folder.glob(_TRACES)):
            worker = WorkerTrace()
            for number, event in _numbered(path):
                try:
                    worker.add(event)
                except KeyError as error:
                    raise ValueError(f"{path}, line {number}: {error} is missing in args of {event.name!r}") from None
                except (TypeError, ValueError) as error:
                    raise ValueError(f"{path}, line {number}: invalid args of {event.name!r}: {error}") from None
            if worker.is_known:
                workers.append((worker, path))
    if not workers:
        raise ValueError(
            f"{', '.join(folders)}: no trace-*.json of a worker; run the job with KUNGFU_TRACE={folders[0]}"
        )
    return workers


def _newest_job(workers: list[tuple[WorkerTrace, Path]]) -> list[tuple[WorkerTrace, Path]]:
    """Return the traces of the job that began last, in rank order."""
    newest = max(workers, key=lambda each: each[0].unix_us)[0].job
    found = [each for each in workers if each[0].job == newest]
    if others := len(workers) - len(found):
        print(f"{_PROGRAM}: {counted(others, 'trace')} of earlier jobs left out", file=sys.stderr)
    return sorted(found, key=lambda each: (not each[0].ranks, each[0].ranks[:1], each[0].host, each[0].pid))


def _write(output: Path, workers: Sequence[tuple[WorkerTrace, Path]], offsets: dict[str, Offset]) -> None:
    metadata = {
        "job": workers[0][0].job,
        "clock": f"CLOCK_MONOTONIC of {workers[0][0].host}",
        "clock_offsets": [
            {
                "host": worker.host,
                "pid": worker.pid,
                "offset_us": round(offset.at(worker.first_us), 3),
                "error_us": round(offset.error_us, 3) if math.isfinite(offset.error_us) else None,
            }
            for worker, _ in workers
            for offset in [offsets[worker.clock]]
        ],
    }
    fd = open_regular(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with contextlib.ExitStack() as stack:
        file: BinaryIO | gzip.GzipFile = stack.enter_context(os.fdopen(fd, "wb"))
        if output.suffix == ".gz":
            file = stack.enter_context(gzip.open(file, "wb"))
        file.write(b'{"displayTimeUnit":"ms","metadata":' + json.dumps(metadata).encode() + b',"traceEvents":[\n')
        separator = b""
        for number, (worker, path) in enumerate(workers, 1):
            for event in _on_one_clock(worker, path, number, offsets[worker.clock]):
                file.write(separator + msgspec.json.encode(event))
                separator = b",\n"
        file.write(b"\n]}\n")


def _on_one_clock(worker: WorkerTrace, path: Path, number: int, offset: Offset) -> Iterator[TraceEvent]:
    """Yield a worker's events for the merged file, with corrected times.

    Replace the process ID by `number`, because workers on different hosts may have the same process ID.
    """
    label = f"{worker.name} ({worker.host}, pid {worker.pid})"
    yield TraceEvent("M", "process_name", number, 0, args={"name": label})
    yield TraceEvent("M", "process_sort_index", number, 0, args={"sort_index": number})
    for event in events_in(path):
        if event.name in ("process_name", "kungfu_end"):
            continue
        event.pid = number
        if event.ph != "M":
            end = event.ts + event.dur  # correct the end, too, so that an event stays inside the event that contains it
            event.ts -= offset.at(event.ts)
            if event.ph == "X":
                event.dur = max(0.001, round(end - offset.at(end) - event.ts, 3))  # the encoder omits a duration of 0
            event.ts = round(event.ts, 3)
        yield event


def _summary(workers: Sequence[tuple[WorkerTrace, Path]], offsets: dict[str, Offset], output: Path) -> list[str]:
    lines = [f"{counted(len(workers), 'worker')} -> {output}; open it at https://ui.perfetto.dev"]
    for worker, _ in workers:
        lines += summary_of(worker)
    first = workers[0][0]
    shown = {first.clock}
    for worker, _ in workers:
        if worker.clock in shown:
            continue
        shown.add(worker.clock)
        offset = offsets[worker.clock]
        error = f"within {offset.error_us:.0f} us" if math.isfinite(offset.error_us) else "by the hosts' time of day"
        lines.append(f"clock of {worker.host}: {offset.at(worker.first_us) / 1e6:+.6f} s from {first.host}, {error}")
    return [printable(line) for line in lines]
