"""The leadership lease of a job's controller, in a store that outlives it, and the snapshot for the next controller.

There are two keys. The *snapshot* is what the controller has decided, as of its last entry. The *holder* names the host
that has the lease, and is bound to a lease of the store, which deletes it if no renewal comes.

1. Each write compares both keys. The snapshot has to be the one that the writer knows, and the holder the same since
   the revision at which it was written. So of two controllers that take the lease one gets it. A controller that was
   paused while another one took it can write nothing more. (`test_leadership_lease.py`.)
2. The lease only permits others to try. That no two controllers decide depends on the comparisons, and on no clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ms_kungfu.errors import ConfigServerError

_MARK = "Mark"  # of a write, by which its writer recognises it


class LeadershipLostError(ConfigServerError):
    """Another controller has the lease, or has written since: this one has stepped down."""


class LeadershipGoneError(LeadershipLostError):
    """No controller has it: the snapshot, and with it all that was decided, has been deleted from the store."""

    def __init__(self) -> None:
        super().__init__("the store has lost the job's keys: they were deleted, or its data was")


@dataclass(frozen=True)
class LeadershipState:
    """The store's keys.

    `revision`: the snapshot's, 0 without one; `holder`: "" without one; `since`: the revision at which it took the
    lease, else 0.
    """

    snapshot: Mapping[str, Any] | None = None
    revision: int = 0
    holder: str = ""
    since: int = 0


class LeadershipKeys(Protocol):
    """The two keys in a store.

    Calls may come from any thread, and are bounded in time. StoreUnreachableError without an answer: then the result of
    a write isn't known.
    """

    def look(self) -> LeadershipState:
        """Return both at once."""
        ...

    def swap(
        self, seen: LeadershipState, snapshot: Mapping[str, Any], holder: str = "", lease: int = 0
    ) -> tuple[bool, LeadershipState]:
        """Write the snapshot, and with a `lease` the holder, if both keys are as they were `seen`.

        Return whether they were, and what there is then.
        """
        ...

    def grant(self, seconds: float) -> tuple[int, float]:
        """Return a lease, and how long it lasts."""
        ...

    def renew(self, lease: int) -> bool:
        """Renew a lease; return whether it still existed."""
        ...

    def revoke(self, lease: int) -> None:
        """Delete the lease and what is bound to it."""


class LeadershipLease:
    """The controller's end. One call at a time; after StoreUnreachableError a call may be repeated."""

    def __init__(self, keys: LeadershipKeys, host: str, lease_s: float) -> None:
        self._keys, self._host, self._requested_s = keys, host, lease_s
        self._held = LeadershipState()
        self._lease = 0
        self._tried: dict[str, int] = {}  # marks of writes without a known result -> lease
        self.lease_s = lease_s  # as the store has it

    @property
    def since(self) -> int:
        return self._held.since

    def take(self, seen: LeadershipState, snapshot: Mapping[str, Any]) -> None:
        """Take the lease. LeadershipLostError if another host has it, or has got it since this was `seen`."""
        if self._is_own(seen) and seen.holder == self._host:
            self._holds(seen)  # by the try before
        elif seen.holder:
            raise LeadershipLostError(f"{seen.holder} has the lease")
        else:
            lease, self.lease_s = self._keys.grant(self._requested_s)
            self._swap(seen, snapshot, lease)

    def write(self, snapshot: Mapping[str, Any]) -> None:
        """Write a snapshot. The controller may send its contents when this returns."""
        try:
            self._swap(self._held, snapshot)
        except LeadershipLostError:
            found = self._keys.look()
            if not self._is_own(found):
                raise
            if found.holder:  # that is of a try before, which may have taken the lease again
                self._holds(found)
                self._swap(found, snapshot)
            else:
                self.take(found, snapshot)  # the lease had expired

    def renew(self) -> None:
        """Renew the lease, well before it expires."""
        if self._keys.renew(self._lease):
            return
        found = self._keys.look()
        if found.snapshot is None:
            raise LeadershipGoneError
        if not self._is_own(found):
            raise LeadershipLostError(f"{found.holder or 'another host'} has taken the lease")
        assert found.snapshot is not None
        self.take(found, found.snapshot)

    def leave(self) -> None:
        """Give up the lease, so that the next controller needn't wait."""
        self._keys.revoke(self._lease)

    def _is_own(self, found: LeadershipState) -> bool:
        """Return whether this controller has written what is there."""
        mark = None if found.snapshot is None else found.snapshot.get(_MARK)
        return isinstance(mark, str) and (found.revision == self._held.revision or mark in self._tried)

    def _swap(self, seen: LeadershipState, snapshot: Mapping[str, Any], lease: int = 0) -> None:
        mark = secrets.token_hex(8)
        self._tried[mark] = lease
        done, found = self._keys.swap(seen, {**snapshot, _MARK: mark}, self._host, lease)
        # The first try may have been written, and its answer lost.
        if not done and not (found.snapshot is not None and found.snapshot.get(_MARK) == mark):
            raise (
                LeadershipGoneError
                if found.snapshot is None
                else LeadershipLostError(f"{found.holder or 'another host'} has the lease")
            )
        self._holds(found)

    def _holds(self, found: LeadershipState) -> None:
        assert found.snapshot is not None
        self._lease = self._tried.get(found.snapshot[_MARK], 0) or self._lease
        self._held = found
        self._tried.clear()
