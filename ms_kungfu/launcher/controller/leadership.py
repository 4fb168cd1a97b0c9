"""Who decides for a job: one host for ever (`NoElection`), or who holds the lease in etcd (`etcd_lease.EtcdLease`)."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, Callable, Protocol

if TYPE_CHECKING:
    from ms_kungfu.cluster_store import LeadershipLease
    from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot


class Leadership(Protocol):
    """What a job asks before it says anything that the next controller has to know. Used from the job's event loop,
    except where a method says otherwise."""

    @property
    def moves(self) -> bool:
        """Whether another host goes on with the job where this one fails."""
        ...

    @property
    def lease(self) -> LeadershipLease | None:
        """What is held in the store; `None`: nothing."""
        ...

    @property
    def resumes(self) -> LeaderSnapshot | None:
        """What the controller before has left. This controller continues its job. `None`: the job begins here."""
        ...

    @property
    def has_stepped_down(self) -> bool:
        """Another host decides from now on."""
        ...

    @property
    def is_gone(self) -> bool:
        """Nobody decides any more: the job's keys have been deleted."""
        ...

    @property
    def has_held(self) -> bool:
        """It has had the lease, even if it has stepped down by now."""
        ...

    @property
    def awaits_store(self) -> bool:
        """A decision waits for the store."""
        ...

    @property
    def has_stood_still(self) -> bool:
        """This host did not run for a while, a moment ago."""
        ...

    async def await_turn(self) -> None:
        """Until the last job of this name is over. StartError where it goes on."""

    async def acquire(self, snapshot: Callable[[], LeaderSnapshot]) -> None:
        """Before the job begins. StartError where another job has the name."""

    def keep(self, store: Any) -> Callable[[], object]:
        """From now on. Returns what ends it."""
        ...

    async def has_it_again(self) -> bool:
        """The store has refused a write: whether to try again."""
        ...

    async def time_to_ask(self) -> float:
        """For how long the hosts could have found out who leads."""
        ...

    async def act(self, act: Callable[[], Awaitable[object]]) -> None:
        """One action after the other, and none once another host decides."""

    async def write(self, snapshot: Callable[[], LeaderSnapshot]) -> bool:
        """Within `act`. Whether the record is there now."""
        ...

    def may_say(self, version: int) -> bool:
        """Whether the members may hear of this version."""
        ...

    async def until_it_may_be_said(self, version: int, is_over: Callable[[], bool]) -> bool:
        """False where that is asked already, for this version or a newer one, or doesn't matter any more."""
        ...

    async def step_down(self) -> None:
        """This host stood still, and others have left it."""

    async def leave(self) -> None:
        """Its host leaves the job."""

    async def release(self) -> None:
        """The job is over."""


class NoElection:
    """The first host decides for ever, and the job ends with it: nothing has to be on record."""

    moves = False
    lease = None
    resumes = None
    has_stepped_down = False
    is_gone = False
    has_held = False
    awaits_store = False
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

    async def step_down(self) -> None: ...

    async def leave(self) -> None: ...

    async def release(self) -> None: ...
