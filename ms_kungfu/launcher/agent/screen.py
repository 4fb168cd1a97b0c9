"""Write to one output stream of the launcher, which shows the launcher's own lines and its workers' output.

If the stream is a terminal, it also has a status line, and these rules apply:

1. A worker's progress bar (text that ends with a carriage return) stays until another writer needs its row. The bar's
   text isn't lost: it is shown again when the worker ends the bar's line with a newline.
   (`test_bar_that_another_worker_displaced_returns`.)

2. The status line is below the output. Each write first erases the status line, and draws it again after the new
   output. The cursor stays in an unfinished line of output, or at the beginning of the status line. So if the user
   changes the size of the terminal, no old text remains. (`test_status_line_is_below_what_workers_print`.)
"""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Sequence

_LEAST_SHOWN = 30  # a part is truncated only if at least this many of its characters fit
_COLUMNS = 80  # the width to assume if the terminal reports none
_ERASE_LINE, _ERASE_BELOW = b"\033[K", b"\033[J"
# Make sure that there is a row below the cursor, save the position, and go to that row.
_BELOW = b"\033D\033[A\0337\r\n" + _ERASE_LINE
_BACK = b"\0338"


class Screen:
    """One output stream of the launcher. Used from one thread.

    If a writer has written an unfinished line, it can continue that line. If another writer writes in between, the
    unfinished line is ended first.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._open: object = None  # the writer whose line hasn't ended
        self._has_bar = False  # whether the cursor is at the beginning of a row with text
        self._bars: dict[object, bytes] = {}  # writer -> the text of its progress bar
        self._displaced: set[object] = set()  # writers whose bar was erased before its carriage return
        self._status: Sequence[str] = ()
        self._is_drawn = False
        self.is_terminal = os.isatty(fd)
        self.broken = False

    def shares_terminal_with(self, other: Screen) -> bool:
        """Return whether both streams go to the same terminal."""
        if not (self.is_terminal and other.is_terminal):
            return False
        ours, theirs = os.fstat(self._fd), os.fstat(other._fd)
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)

    def write(self, writer: object, prefix: bytes, lines: Sequence[bytes]) -> None:
        out = self._without_status()
        for line in lines:
            if self.is_terminal:
                self._add_to_terminal(out, writer, prefix, line)
            else:
                if self._open is not writer:
                    out += (b"\n" if self._open is not None else b"") + prefix
                out += line
                self._open = None if line.endswith((b"\n", b"\r")) else writer
        self._draw(out)
        self._write_all(bytes(out))

    def forget(self, writer: object) -> None:
        """Remove what is stored about a writer that won't write any more."""
        self._bars.pop(writer, None)
        self._displaced.discard(writer)

    def set_status(self, parts: Sequence[str]) -> None:
        """Show as many of the `parts` in the status line as fit. If `parts` is empty, remove the status line.

        The stream must be a terminal.
        """
        self._status = parts
        out = self._without_status() if self._is_fresh or not parts else bytearray()
        self._draw(out)
        self._write_all(bytes(out))

    @property
    def _is_fresh(self) -> bool:
        """Return whether the cursor is in a row without output. The status line may be in this row."""
        return self._open is None and not self._has_bar

    def _add_to_terminal(self, out: bytearray, writer: object, prefix: bytes, line: bytes) -> None:
        text = line.rstrip(b"\r\n")
        end = line[len(text) :]
        bar = self._bars.get(writer)
        if self._open is writer:
            out += line
            row = (bar or b"") + text
        elif not text and end == b"\r":  # the writer's next text replaces the progress bar
            self._bars[writer] = bar or b""
            self._displaced.discard(writer)
            return
        else:
            row = (bar or b"") + text if writer in self._displaced else text or bar or b""
            if self._open in self._bars:
                self._displaced.add(self._open)
                out += b"\r" + _ERASE_LINE
            elif self._open is not None:
                out += b"\n"
            elif self._has_bar:
                out += _ERASE_LINE
            out += prefix + row + end
        self._displaced.discard(writer)
        if end.endswith(b"\n"):
            self._bars.pop(writer, None)
        elif end or bar is not None:
            self._bars[writer] = row
        self._has_bar = end == b"\r"
        self._open = None if end else writer

    def _without_status(self) -> bytearray:
        """Return the control characters that erase the status line; empty if the line isn't drawn."""
        is_drawn, self._is_drawn = self._is_drawn, False
        return bytearray((b"\r" if self._is_fresh else b"") + _ERASE_BELOW if is_drawn else b"")

    def _draw(self, out: bytearray) -> None:
        if not self._status or not self.is_terminal:
            return
        text = fitted(self._status, self._columns() - 1).encode("ascii", "replace")
        out += text + b"\r" if self._is_fresh else _BELOW + text + _BACK
        self._is_drawn = True

    def _columns(self) -> int:
        with contextlib.suppress(OSError):
            return os.get_terminal_size(self._fd).columns or _COLUMNS
        return _COLUMNS

    def write_if_it_is_read(self, text: str) -> None:
        """Write a line if the stream accepts output now.

        Another thread calls this while this stream's own thread is blocked in a write to another stream.
        """
        with contextlib.suppress(OSError, ValueError):
            if select.select([], [self._fd], [], 0)[1]:
                os.write(self._fd, text.encode("utf-8", "backslashreplace") + b"\n")

    def _write_all(self, data: bytes) -> None:
        while data and not self.broken:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process has made the shared terminal non-blocking
                select.select([], [self._fd], [], 1.0)
            except OSError:
                self.broken = True  # e.g. `kungfu-run ... | head`: training continues, with output to the log files


def fitted(parts: Sequence[str], width: int) -> str:
    """Return the first parts that fit into `width` characters, and perhaps the beginning of the next part."""
    text = ""
    for part in parts:
        longer = f"{text} | {part}" if text else part
        if len(longer) > width:
            is_useful = not text or width - len(text) >= _LEAST_SHOWN
            return f"{longer[: max(0, width - 3)]}..."[: max(0, width)] if is_useful else text
        text = longer
    return text
