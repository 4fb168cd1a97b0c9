"""Define the interface that a host's launcher uses to call a controller in the same process."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Callable, Protocol

from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.channel import AnyChannel
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.leader_snapshot import Term
from ms_kungfu.launcher.wire import messages as m


class LocalController(Protocol):
    """The controller of the job (`controller.Controller`), as the launcher in the same process sees it.

    Like all other launchers, that launcher also exchanges messages with the controller.
    """

    last_words: str | None
    failed: int | None

    @property
    def has_left(self) -> bool:
        """Return whether the controller's host leaves the job. Another host controls the job afterwards."""
        ...

    @property
    def moves(self) -> bool: ...

    @property
    def is_over(self) -> bool: ...

    @property
    def has_stepped_down(self) -> bool: ...

    @property
    def store_error(self) -> ConfigServerError | None:
        """Return why the store rejected the last call for the lease.

        Return None if the store accepted the call, or if the lease is lost.
        """
        ...

    async def run(self) -> int: ...
    async def leave(self) -> None: ...
    async def serve(self, channel: AnyChannel, message: m.FirstWords) -> bool: ...
    def then(self) -> str: ...
    def status(self) -> dict[str, Any]: ...
    def interrupted(self, number: int, where: str = "") -> None: ...
    def hurry(self) -> None: ...
    def host_leaves(self, name: str) -> None: ...
    def on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None: ...


class MakeController(Protocol):
    def __call__(
        self, options: Options, machine: Machine, registration: m.Registration,
        remove_at_end: Callable[[Path, int], None], stop: Callable[[], None], term: Term | None = None,
    ) -> LocalController: ...  # fmt: skip
