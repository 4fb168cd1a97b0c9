"""Define how a controller checks that it controls the job.

With `NoElection`, the first host's controller always controls the job. With `EtcdLease`, the controller that has the
lease controls the job.
"""

from __future__ import annotations

from collections.abc import Awaitable, Collection
from typing import TYPE_CHECKING, Any, Callable, Protocol

if TYPE_CHECKING:
    from ms_kungfu.cluster_store import LeadershipLease
    from ms_kungfu.errors import ConfigServerError
    from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot


class Leadership(Protocol):
    """The leadership check that a controller makes before it sends anything that the next controller has to know.

    Call the methods from the job's event loop, unless a docstring says otherwise.
    """

    @property
    def moves(self) -> bool:
        """Return whether another host continues the job if this one fails."""
        ...

    @property
    def lease(self) -> LeadershipLease | None:
        """Return the lease in the store, or None if there is no lease."""
        ...

    @property
    def resumes(self) -> LeaderSnapshot | None:
        """Return the snapshot of the previous controller, or None if the job begins with this controller."""
        ...

    @property
    def has_stepped_down(self) -> bool:
        """Return whether another host now controls the job."""
        ...

    @property
    def is_gone(self) -> bool:
        """Return whether no host controls the job any more, because the job's keys have been deleted."""
        ...

    @property
    def has_held(self) -> bool:
        """Return whether this controller has had the lease, even if it has stepped down since."""
        ...

    @property
    def awaits_store(self) -> bool:
        """Return whether a decision waits for the store."""
        ...

    @property
    def store_error(self) -> ConfigServerError | None:
        """Return why the store rejected the last call that concerned the lease.

        Return None if the store accepted the call, or if the lease is lost.
        """
        ...

    @property
    def has_stood_still(self) -> bool:
        """Return whether this host was paused a moment ago."""
        ...

    async def await_turn(self) -> None:
        """Wait until the previous job with this name is over. Raise StartError if that job continues."""

    async def acquire(self, snapshot: Callable[[], LeaderSnapshot]) -> None:
        """Acquire the lease before the job begins. Raise StartError if another job has the name."""

    def keep(self, store: Any) -> Callable[[], object]:
        """Renew the lease regularly. Return a function that stops the renewals."""
        ...

    async def has_it_again(self) -> bool:
        """Return whether to retry a write that the store has rejected."""
        ...

    async def time_to_ask(self) -> float:
        """Return how long the hosts have been able to find this controller, in seconds."""
        ...

    async def act(self, act: Callable[[], Awaitable[object]]) -> None:
        """Run `act` after all earlier actions have ended.

        If another host now controls the job, don't run `act`.
        """

    async def write(self, snapshot: Callable[[], LeaderSnapshot]) -> bool:
        """Write `snapshot` as an entry. Call this only within `act`. Return whether the store contains the entry."""
        ...

    def may_say(self, version: int) -> bool:
        """Return whether the members may be notified of this cluster version."""
        ...

    async def until_it_may_be_said(self, version: int, is_over: Callable[[], bool]) -> bool:
        """Wait until the members may be notified of this cluster version.

        Return False if another call already waits for this cluster version or a newer one, or if the notification no
        longer matters.
        """
        ...

    async def step_down(self, registered: Collection[str]) -> None:
        """Step down because this host was paused and other hosts have left its controller.

        `registered`: the hosts that are registered with this controller. The snapshot records that these hosts are
        alive.
        """

    async def leave(self) -> None:
        """Step down because this host leaves the job."""

    async def release(self) -> None:
        """Release the lease because the job is over."""


class NoElection:
    """The first host controls the whole job, and the job ends with that host. So no snapshot is needed."""

    moves = False
    lease = None
    resumes = None
    has_stepped_down = False
    is_gone = False
    has_held = False
    awaits_store = False
    store_error = None
    has_stood_still = False

    async def await_turn(self) -> None: ...

    async def acquire(self, snapshot: Callable[[], LeaderSnapshot]) -> None: ...

    def keep(self, store: Any) -> Callable[[], object]:
        return lambda: None

    async def has_it_again(self) -> bool:
        return False

    async def time_to_ask(self) -> float:
        return 0.0

    async def act(self, act: Callable[[], Awaitable[object]]) -> None:
        await act()

    async def write(self, snapshot: Callable[[], LeaderSnapshot]) -> bool:
        return True

    def may_say(self, version: int) -> bool:
        return True

    async def until_it_may_be_said(self, version: int, is_over: Callable[[], bool]) -> bool:
        return True

    async def step_down(self, registered: Collection[str]) -> None: ...

    async def leave(self) -> None: ...

    async def release(self) -> None: ...
