"""The controller's interface to a host on which workers run."""

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
    """A host of the job. Only the controller's event loop calls these methods."""

    name: str
    devices: Devices
    shares: Shares  # how the host's cores are divided among its workers

    def start(self, launch: Launch) -> None:
        """Start a worker. The host reports the result as an event. Raise OSError if the host is lost."""

    def signal(self, number: int, key: int | None = None) -> None:
        """Send a signal to the process group of worker `key`, or of every worker on this host if `key` is None."""

    def pin(self, key: int, cores: Sequence[int]) -> None: ...

    def ask_for_stack(self, key: int) -> None:
        """Make the worker write its Python stacks to its output."""

    def assign(self, key: int, peer: PeerID, incarnation: int, rank: int) -> None:
        """Assign the slot of `peer` to the standby `key`, and show the standby's output."""

    def log_paths(self, log_name: str) -> list[Path]: ...


class AbsentAgent:
    """A host that counts as lost because it hasn't registered with the job's new controller."""

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
