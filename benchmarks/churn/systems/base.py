"""What the benchmark asks of a system."""

from __future__ import annotations

import socket
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.churn.worker import Plan

ROOT = Path(__file__).resolve().parents[3]
"""The checkout."""


class NotApplicable(Exception):
    """A scenario that a system has no means for; the message is the reason."""


@dataclass(frozen=True)
class Command:
    """A command of a run.

    `again`: it is started again until it exits with 0, as a scheduler does. No such command runs on a host that is
    killed: the host is away for a while. `host`: on which of the hosts it runs.
    `serves`: the run is over without it.
    """

    name: str
    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    again: bool = False
    host: int = 0
    serves: bool = False


class System(ABC):
    """A system, as its documentation recommends it for failures."""

    checkpoints = False
    """Whether it needs the best interval between checkpoints, which `search` finds."""
    packages: tuple[str, ...] = ()
    """The Python packages whose versions count. They are installed for `Plan.python`, or beside ms_kungfu."""
    is_peer = True
    """Whether it runs in the virtual environment of the other systems."""

    @abstractmethod
    def commands(self, plan: Plan, folder: Path) -> list[Command]:
        """Return what starts a job. NotApplicable if it can't run over several hosts."""

    def host_commands(self, plan: Plan, folder: Path, host: int) -> list[Command]:
        """Return what starts a host again that was killed."""
        return [each for each in self.commands(plan, folder) if each.host == host]

    def resize(self, plan: Plan, folder: Path, size: int) -> tuple[list[Command], list[tuple[str, int]]]:
        """Return what changes the number of workers: commands to start, and signals (name, number) to send."""
        raise NotApplicable("it can't change the number of workers of a running job on one host")


def port() -> int:
    """Return a free port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        number: int = server.getsockname()[1]
        return number


def own_module(name: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.churn.programs.{name}"]
