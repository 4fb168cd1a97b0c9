"""Keep the last output lines of each worker, and describe the failure that ends a job.

This module uses no clock and no I/O.
"""

from __future__ import annotations

import collections
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct

from ms_kungfu._words import counted, printable
from ms_kungfu.launcher.state.policy import how_it_ended

MOST_LINES = 30
_MOST_BYTES = 1000  # longer lines are cut
_TRACEBACK = b"Traceback (most recent call last)"


@dataclass(eq=False)
class LastLines:
    """The last lines that a worker has printed to stdout and stderr, in the order of their arrival.

    `error`: the exception of the worker's last traceback, e.g. ``ValueError: no such file``.
    """

    error: str = ""
    _lines: collections.deque[tuple[bytes, bytes]] = field(  # (text, line end)
        default_factory=lambda: collections.deque(maxlen=MOST_LINES)
    )
    _in_traceback: set[str] = field(default_factory=set)  # the streams whose last traceback is still incomplete

    def add(self, stream: str, lines: Sequence[bytes]) -> None:
        """Add lines, which may continue an unfinished line or replace a progress bar."""
        for line in lines:
            text = line.rstrip(b"\r\n")
            end = line[len(text) :]
            before, last_end = self._lines[-1] if self._lines else (b"", b"\n")
            if not last_end.endswith(b"\n"):
                self._lines.pop()
                # The text after a carriage return replaces the progress bar. If the text is empty, the bar's line ends.
                text = before + text if not last_end else text or before
            self._lines.append((text[:_MOST_BYTES], end))
            if end.endswith(b"\n"):
                self._look(stream, text)

    def _look(self, stream: str, line: bytes) -> None:
        if _TRACEBACK in line:
            self._in_traceback.add(stream)
        elif stream in self._in_traceback and line and not line[:1].isspace():
            self._in_traceback.discard(stream)
            self.error = _text(line[:_MOST_BYTES])

    def text(self) -> list[str]:
        """Return the last lines of the worker, without control characters."""
        return [_text(line) for line, _ in self._lines]


class Ended(Struct, frozen=True):
    """A worker that has exited.

    `code`: the exit code, or -n if signal n ended the worker. `reason`: why the launcher killed the worker or couldn't
    start it.
    """

    name: str
    code: int
    reason: str
    last: LastLines

    @property
    def told(self) -> str:
        """Return how the worker ended, and its exception.

        If there is an exception, the result omits a SIGTERM, because the SIGTERM is only the launcher's reaction to
        another failure.
        """
        how = "" if self.code == -signal.SIGTERM and self.last.error else f" {self.how}"
        return f"{how}: {self.last.error}" if self.last.error else how

    @property
    def how(self) -> str:
        return self.reason or how_it_ended(self.code)


def failure_block(first: Ended, others: Sequence[Ended]) -> str:
    """Return the last lines of the worker that failed first, and one line for every other worker that failed."""
    lines = first.last.text()
    shown = f"; its last {counted(len(lines), 'line')}:" if lines else "; it has printed nothing"
    block = [f"---- {first.name} failed first: it {first.how}{shown}", *(f"| {line}".rstrip() for line in lines)]
    failed = [each for each in others if each.last.error or each.code > 0]
    if failed:
        block.append("---- the others that failed:")
        block += [f"| {each.name}{each.told}" for each in failed]
    return "\n".join([*block, "----"])


def _text(line: bytes) -> str:
    return printable(line.decode("utf-8", "replace").expandtabs())
