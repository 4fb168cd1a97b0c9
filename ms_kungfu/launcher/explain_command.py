"""Explain in sentences what happened to a job, according to its event log (``kungfu-run explain LOGDIR``)."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import asdict

from ms_kungfu import job_events as e
from ms_kungfu._files import read_regular
from ms_kungfu._flags import FlagParser, UsageError, failed, switch
from ms_kungfu._processes import printing
from ms_kungfu._words import counted, printable
from ms_kungfu.launcher.state.story import Chapter, story_of
from ms_kungfu.launcher.wire.codec import DECODING_ERRORS

_PROGRAM = "kungfu-run explain"


def explain(arguments: Sequence[str]) -> int:
    """Print what happened to a job.

    Exit status: 0 if the explanation is printed, 1 if an event log can't be read, 2 for a wrong command
    line.
    """
    parser = FlagParser(
        _PROGRAM,
        f"{_PROGRAM} LOGDIR... [flags]",
        "Explains what happened to a job, from the event log in its -logdir: each failure, change and stall with its "
        "cause, the decision, its cost in time, and the ranks that waited. If several hosts controlled the job, give "
        "the folder of each.",
    )
    parser.flag("json", "print JSON: a list of objects", type=switch, default=False)
    try:
        flags, folders = folders_in(parser, arguments)
        events = sorted((x for each in folders for x in _read(log_in(each))), key=lambda event: event.time or 0.0)
    except UsageError as error:
        return failed(_PROGRAM, error, 2)
    except OSError as error:
        return failed(_PROGRAM, f"{error.filename}: {error.strerror}", 1)
    except ValueError as error:
        return failed(_PROGRAM, error, 1)
    story = story_of(events)
    with printing(_PROGRAM):
        if flags.json:
            print(json.dumps([asdict(chapter) for chapter in story], indent=2), flush=True)
        else:
            print("\n".join(map(_line, story)), flush=True)
    return 0


def _line(chapter: Chapter) -> str:
    return f"{chapter.at_s:10.3f} s  {printable(chapter.text)}"


def folders_in(parser: FlagParser, arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Return the flags and the log folders on a command line. Raises UsageError if the command line is wrong."""
    flags, folders = parser.parse_among(arguments)
    if not folders:
        raise UsageError(f"give the -logdir of a job, e.g. {parser.prog} logs")
    return flags, folders


def log_in(folder: str) -> Path:
    """Return the path of the event log in a log folder. `folder` may also be the path of an event log."""
    path = Path(folder)
    return path / e.FILE_NAME if path.is_dir() else path


def _read(path: Path) -> list[e.Event]:
    events, unread = events_in(read_regular(path).splitlines())
    if not events:
        raise ValueError(f"{path} contains no event")
    if unread:
        print(f"{_PROGRAM}: {path}: {counted(unread, 'line')} could not be read", file=sys.stderr)
    _order_by_line(events)
    return events


def _order_by_line(events: Sequence[e.Event]) -> None:
    """Correct the times of events if the host's clock was set back during the job.

    Afterwards, no event has an earlier time than the event on the previous line.
    """
    last, ahead_s = 0.0, 0.0
    for event in events:
        if event.time is not None:
            ahead_s = max(ahead_s, last - event.time)
            last = event.time = event.time + ahead_s


def events_in(lines: Iterable[bytes]) -> tuple[list[e.Event], int]:
    """Return the events of a log, and the number of lines that can't be read.

    A line can't be read if it is truncated, or if a newer ms_kungfu has written it.

    Raises:
        ValueError: the log has another format version.
    """
    found = list(each_event(lines))
    events = [event for event in found if event is not None]
    return events, len(found) - len(events)


def each_event(lines: Iterable[bytes]) -> Iterator[e.Event | None]:
    """Yield the event on each line, or None if the line can't be read. Raises the same errors as `events_in`."""
    decoder: msgspec.json.Decoder[e.Event] = msgspec.json.Decoder(e.AnyEvent)
    for line in lines:
        if not line.strip():
            continue
        try:
            event = decoder.decode(line)
        except DECODING_ERRORS:
            yield None
            continue
        if isinstance(event, e.LogBegan) and event.version != e.VERSION:
            raise ValueError(
                f"the log has format version {event.version}, but this ms_kungfu reads version {e.VERSION}; use the "
                "ms_kungfu that wrote the log"
            )
        yield event
