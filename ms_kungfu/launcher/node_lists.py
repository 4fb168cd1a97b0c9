"""Parse Slurm's shorthand for lists of hosts (``gpu[01-03,7],login``) and of numbers (``2(x3),1``)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

_NODES = "expected a list like gpu[01-03],login"
_NUMBERS = "expected numbers with optional repeat counts, such as 2(x3),1"
_MOST = 65536  # Slurm's own limit on a list
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def nodes_of(text: str) -> list[str]:
    """Return the node names in order. Raises ValueError, whose message contains the part that can't be parsed."""
    found: list[str] = []
    for part in _parts(text):
        found += itertools.islice(_expanded(part, text), _MOST + 1)
        if len(found) > _MOST:
            raise ValueError(f"{_shown(text)} has more than {_MOST} nodes")
    twice = next((name for name, places in itertools.groupby(sorted(found)) if len(list(places)) > 1), None)
    if twice is not None:
        raise ValueError(f"{_shown(text)} lists {twice} twice")
    return found


def counts_of(text: str) -> list[int]:
    """Return the number for each node, in order."""
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(f"{_shown(text)} is not a list of numbers: {_shown(part)} isn't a number; {_NUMBERS}")
        times = int(match[2] or 1)
        if not times or len(found) + times > _MOST:
            raise ValueError(f"{_shown(text)} is not a list of numbers: {_shown(part)} isn't a number; {_NUMBERS}")
        found += [int(match[1])] * times
    return found


def _parts(text: str) -> list[str]:
    """Split the text at the commas that are outside brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter == "[") - (letter == "]")
        if depth not in (0, 1):
            raise ValueError(f"{_shown(text)} is not a list of nodes: its brackets don't match; {_NODES}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    if depth:
        raise ValueError(f"{_shown(text)} is not a list of nodes: its brackets don't match; {_NODES}")
    return parts


def _expanded(part: str, text: str) -> Iterator[str]:
    # Names and ranges alternate. The name before or after a range may be empty.
    pieces = re.split(r"\[([^]]*)\]", part)
    if not part or not all(_NAME.fullmatch(name) for name in pieces[::2] if name):
        raise ValueError(f"{_shown(text)} is not a list of nodes: {_shown(part)} contains no node; {_NODES}")
    choices = [list(_numbers(piece, text)) if number % 2 else [piece] for number, piece in enumerate(pieces)]
    return ("".join(each) for each in itertools.product(*choices))


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """Yield the numbers in a list of ranges. Pad each one to as many digits as the first number of its range."""
    for piece in ranges.split(","):
        match = _RANGE.fullmatch(piece)
        low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(high) < int(low):
            raise ValueError(f"{_shown(text)} is not a list of nodes: {_shown(piece)} is not a range; {_NODES}")
        if int(high) - int(low) >= _MOST:
            raise ValueError(f"{_shown(text)} has more than {_MOST} nodes")
        for number in range(int(low), int(high) + 1):
            yield f"{number:0{len(low)}d}"


def _shown(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}...")
