"""What a host's supervisor reports of its workers' processes."""

from __future__ import annotations

from dataclasses import dataclass

CANT_RUN = 126  # the code of a process that never ran, as in a shell


@dataclass(frozen=True)
class Started:
    """The worker `key` runs as process `pid`, the leader of a process group of its own."""

    key: int
    pid: int


@dataclass(frozen=True)
class Exited:
    """The worker `key` has exited, and so has its process group.

    `code` is negative for a signal. `error`: it never ran.
    """

    key: int
    code: int
    error: str = ""
