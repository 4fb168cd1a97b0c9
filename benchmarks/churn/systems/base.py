"""The interface of a measured system."""

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
    """A system doesn't support a scenario. The message is the reason."""


@dataclass(frozen=True)
class Command:
    """A command of a run.

    `again`: restart the command until it exits with 0, as a scheduler does. Such a command never runs on a host that
    is killed, because this host is down for a while. `host`: the index of the command's host. `serves`: the run can
    end while this command is still running.
    """

    name: str
    argv: Sequence[str]
    env: dict[str, str] = field(default_factory=dict)
    again: bool = False
    host: int = 0
    serves: bool = False


class System(ABC):
    """A system, configured as its documentation recommends for failures."""

    checkpoints = False
    """Whether the system uses checkpoints, so that `search` must find the best interval."""
    shards = False
    """Whether each step is partitioned into as many shards as there are workers."""
    packages: tuple[str, ...] = ()
    """Python packages whose versions are recorded. They are installed for `Plan.python`, or next to ms_kungfu."""
    is_peer = True
    """Whether it runs in the virtual environment of the other systems."""

    @abstractmethod
    def commands(self, plan: Plan, folder: Path) -> list[Command]:
        """Return commands that start a job. Raise NotApplicable if the system can't run over the plan's hosts."""

    def host_commands(self, plan: Plan, folder: Path, host: int) -> list[Command]:
        """Return commands that restart a killed host."""
        return [each for each in self.commands(plan, folder) if each.host == host]

    def resize(self, plan: Plan, folder: Path, size: int) -> tuple[list[Command], list[tuple[str, int]]]:
        """Return the commands to start and the signals (name, number) to send in order to change the size."""
        raise NotApplicable("it can't change the number of workers of a running job on one host")


def port() -> int:
    """Return a free port."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        number: int = server.getsockname()[1]
        return number


def own_module(name: str) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.churn.programs.{name}"]
