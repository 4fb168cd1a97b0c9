"""Write the report of a job: the job's live page with all its events, in one file that opens without a server."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import heapq
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from ms_kungfu import job_events as e
from ms_kungfu._files import open_regular
from ms_kungfu._flags import FlagParser, UsageError, failed
from ms_kungfu._processes import printing
from ms_kungfu.launcher.dashboard.history import History
from ms_kungfu.launcher.explain_command import each_event, folders_in, log_in
from ms_kungfu.launcher.wire.codec import encode

FILE_NAME = "report.html"
_PROGRAM = "kungfu-run report"
_FILES = Path(__file__).parent
_LINK = '<link rel="stylesheet" href="page.css">\n'
_SCRIPTS = ("model.js", "page.js")


def report(arguments: Sequence[str]) -> int:
    """Write the report of a job from its event logs (``kungfu-run report``).

    Exit status: 0 if the report is written, 1 if a log can't be read or the report can't be written, 2 for a wrong
    command line.
    """
    parser = FlagParser(
        _PROGRAM,
        f"{_PROGRAM} LOGDIR... [flags]",
        f"Writes {FILE_NAME} from the event log of a job. A job writes this file itself when it ends, unless its "
        "launcher is killed. If several hosts controlled the job, give the folder of each.",
    )
    parser.flag("o", f"the file to write (default: {FILE_NAME} in the first LOGDIR)", metavar="FILE")
    try:
        flags, folders = folders_in(parser, arguments)
        first = Path(folders[0])
        path = Path(flags.o) if flags.o else (first if first.is_dir() else first.parent) / FILE_NAME
        logs = [log_in(folder) for folder in folders]
        if path.resolve() in [log.resolve() for log in logs]:
            raise UsageError(f"-o {path} is the event log; give another file")
        write_report(logs, path)
    except UsageError as error:
        return failed(_PROGRAM, error, 2)
    except OSError as error:
        return failed(_PROGRAM, f"{error.filename}: {error.strerror}", 1)
    except ValueError as error:
        return failed(_PROGRAM, error, 1)
    with printing(_PROGRAM):
        print(path, flush=True)
    return 0


def write_report(logs: Sequence[Path], path: Path) -> None:
    """Write the report of one job, whose event logs are `logs`, to `path`.

    This function reads the logs line by line and merges the statistics of a long job, so that its memory is bounded.

    Raises:
        OSError: a log can't be read, or the report can't be written.
        ValueError: the logs contain no event, or a log has another format version.
    """
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(os.fdopen(open_regular(log), "rb")) for log in logs]
        events = (filter(None, each_event(file)) for file in files)
        text = _page(heapq.merge(*events, key=lambda event: event.time or 0.0))
    new = path.with_name(f".{path.name}.new")
    try:
        with os.fdopen(open_regular(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
            file.write(text)
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def _page(events: Iterable[e.Event]) -> bytes:
    history = History()
    for event in events:
        history.add(event)
    if not history.items:
        raise ValueError("the log contains no event")
    # In JSON, "<" occurs only in strings. Replace it, so that no text of an event can end the <script> element.
    data = b",\n".join(encode(item.event) for item in history.items).replace(b"<", b"\\u003c").decode()
    style, *scripts = ((_FILES / name).read_text(encoding="utf-8") for name in ("page.css", *_SCRIPTS))
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_digest, scripts))}; style-src {_digest(style)}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = (_FILES / "page.html").read_text(encoding="utf-8")
    for place, replacement in (
        (_LINK, f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'),
        (
            _tag(_SCRIPTS[0]),
            f'<script type="application/json" id="data">[{data}]</script>\n<script>{scripts[0]}</script>',
        ),
        (_tag(_SCRIPTS[1]), f"<script>{scripts[1]}</script>"),
    ):
        before, found, after = page.partition(place)
        assert found, place
        page = before + replacement + after
    return page.encode()


def _tag(name: str) -> str:
    return f'<script src="{name}"></script>'


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
