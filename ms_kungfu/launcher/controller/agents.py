"""Where workers run: what the controller asks of a host."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.affinity import Shares
from ms_kungfu.launcher.devices import Devices
from ms_kungfu.launcher.wire.messages import Launch


class AgentHandle(Protocol):
    """A host of the job, as the controller sees it. Used from the event loop."""

    name: str
    devices: Devices
    shares: Shares  # of its cores

    def start(self, launch: Launch) -> None:
        """An event tells what has come of it. OSError: the host is lost."""

    def signal(self, number: int, key: int | None = None) -> None:
        """To the process group of one worker, or of all that this host has."""

    def pin(self, key: int, cores: Sequence[int]) -> None: ...

    def ask_for_stack(self, key: int) -> None:
        """Has it write its Python stacks to its output."""

    def assign(self, key: int, peer: PeerID, incarnation: int, rank: int) -> None:
        """A standby has this slot, and from now on what it prints is shown."""

    def log_paths(self, log_name: str) -> list[Path]: ...


class AbsentAgent:
    """A host whose launcher hasn't come to the new controller of the job, and is lost therefore."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.devices = Devices()
        self.shares = Shares([0], None)

    def start(self, launch: Launch) -> None:
        raise OSError(errno.EHOSTDOWN, os.strerror(errno.EHOSTDOWN))

    def signal(self, number: int, key: int | None = None) -> None:
        pass

    def pin(self, key: int, cores: Sequence[int]) -> None:
        pass

    def ask_for_stack(self, key: int) -> None:
        pass

    def assign(self, key: int, peer: PeerID, incarnation: int, rank: int) -> None:
        pass

    def log_paths(self, log_name: str) -> list[Path]:
        return []
