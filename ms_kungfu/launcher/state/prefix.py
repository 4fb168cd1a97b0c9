"""Build the prefix of each line of a worker's output (`-prefix`). This module reads the clock, but does no I/O."""

from __future__ import annotations

import argparse
import time

from msgspec import Struct

_WORDS = ("none", "rank", "host:rank", "time", "files")


class Prefix(Struct, frozen=True):
    """What a prefix contains. With all parts, a line looks like ``12:01:03 [10.0.0.2:3] line``.

    Args:
        rank: whether the prefix contains the worker's rank.
        host: whether the host's name precedes the rank.
        time: whether the prefix contains the time at which the launcher read the line.
        files: whether the lines in the files of -logdir have the prefix, too.
    """

    rank: bool = False
    host: bool = False
    time: bool = False
    files: bool = False

    def before(self, host: str, rank: int | None, last_rank: int | None, colour: int | None = None) -> bytes:
        """Return the prefix of a line that is read now; b"" if there is none.

        Args:
            host: the host's name.
            rank: the worker's rank; None if the worker isn't in the cluster.
            last_rank: the last rank that the worker had; None if it never had a rank.
            colour: the colour of the rank on a terminal; None for no colour.
        """
        parts = []
        if self.time:
            parts.append(time.strftime("%H:%M:%S"))
        if self.rank:
            place = str(rank) if rank is not None else "-" if last_rank is None else f"was {last_rank}"
            name = f"[{host}:{place}]" if self.host else f"[{place}]"
            parts.append(name if colour is None else f"\033[{colour}m{name}\033[0m")
        return "".join(f"{part} " for part in parts).encode()


def prefix_of(text: str) -> Prefix:
    """Return the prefix that the value of `-prefix` describes.

    Raises:
        ArgumentTypeError: the value contains an unknown word, or words that can't be combined.
    """
    words = text.split(",")
    unknown = [word for word in words if word not in _WORDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(_WORDS)}")
    if "none" in words and len(words) > 1:
        raise argparse.ArgumentTypeError("'none' can't be combined with other words")
    if "files" in words and len(words) == 1:
        raise argparse.ArgumentTypeError("'files' needs a prefix for the files; write time,files or rank,files")
    if "rank" in words and "host:rank" in words:
        raise argparse.ArgumentTypeError("'rank' and 'host:rank' can't be combined; give only one of them")
    has_host = "host:rank" in words
    return Prefix("rank" in words or has_host, has_host, "time" in words, "files" in words)
