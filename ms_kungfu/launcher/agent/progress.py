"""Show the job's progress (`-progress`): in a terminal's status line, or as log lines if there is no terminal."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Any, Callable

from ms_kungfu.launcher.agent.output import Output
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.state.progress import as_log_line, progress_of

_log = logging.getLogger(__name__)
_LINE_S = 1.0
_LOG_S = 10.0


def has_line(options: Options, output: Output) -> bool:
    """Return whether the terminal has a status line."""
    wanted = not options.quiet if options.progress is None else options.progress
    return wanted and output.is_terminal


async def keep_showing(options: Options, output: Output, ask: Callable[[], Awaitable[dict[str, Any]]]) -> None:
    """Show the progress until the caller cancels. `ask` returns the job's status document, or {"error": ...}."""
    is_line, shown = has_line(options, output), ""
    try:
        while is_line or options.progress:
            await asyncio.sleep(_LINE_S if is_line else _LOG_S)
            document = await ask()
            if "error" in document:
                continue
            if is_line:
                output.show_status(progress_of(document))
            elif (line := as_log_line(document)) not in ("", shown):
                shown = line
                output.say(f"[{PROGRAM}] {time.strftime('%H:%M:%S')} {line}")
    except Exception as error:  # the error only ends the display; the job continues
        _log.error('internal error: where=progress error="%r"', error, exc_info=error)
