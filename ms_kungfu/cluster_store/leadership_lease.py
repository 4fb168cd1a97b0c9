"""The leadership lease of a job's controller, and the snapshot for the next controller, in a store that outlives it.

There are two keys. The *snapshot* contains what the controller has decided so far. The *holder* is the host that has
the leadership lease. This key is bound to a lease of the store: the store deletes the key if the lease isn't renewed.

1. Each write compares both keys. The snapshot must be the one that the writer has read, and the holder key must be
unchanged since the writer's revision of it. So if two controllers try to take the lease, only one gets it. If a
controller is paused while another takes the lease, the paused controller can't write any more.
(`test_leadership_lease.py`.)
2. The expiry of the lease only permits other hosts to try. The comparisons alone ensure that at most one controller
decides; no clock is involved.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ms_kungfu.errors import ConfigServerError

_MARK = "Mark"  # the key of the mark with which a writer recognises its own write


class LeadershipLostError(ConfigServerError):
    """Another controller has the lease or has written a newer snapshot, so this controller has stepped down."""


class LeadershipGoneError(LeadershipLostError):
    """The snapshot has been deleted from the store, and all decisions with it."""

    def __init__(self) -> None:
        super().__init__("the store has lost the job's keys: a client deleted the keys, or the store lost its data")


@dataclass(frozen=True)
class LeadershipState:
    """The keys in the store.

    `revision`: the revision of the snapshot, or 0 without a snapshot. `holder`: "" if no host has the lease. `since`:
    the revision at which the holder took the lease, or 0.
    """

    snapshot: Mapping[str, Any] | None = None
    revision: int = 0
    holder: str = ""
    since: int = 0


class LeadershipKeys(Protocol):
    """Access to the two keys in a store.

    Methods may be called from any thread and have a time limit. They raise StoreUnreachableError if there is no
    answer; the result of a write is then unknown.
    """

    def look(self) -> LeadershipState:
        """Return both keys, read at once."""
        ...

    def swap(
        self, seen: LeadershipState, snapshot: Mapping[str, Any], holder: str = "", lease: int = 0
    ) -> tuple[bool, LeadershipState]:
        """Write the snapshot (and, if `lease` is given, the holder) if both keys are unchanged since they were `seen`.

        Return whether they were unchanged, and the present keys.
        """
        ...

    def grant(self, seconds: float) -> tuple[int, float]:
        """Create a lease. Return the lease and its duration."""
        ...

    def renew(self, lease: int) -> bool:
        """Renew a lease; return whether it still existed."""
        ...

    def revoke(self, lease: int) -> None:
        """Delete the lease and the keys that are bound to it."""


class LeadershipLease:
    """The controller's side of the lease.

    Make one call at a time. After StoreUnreachableError a call may be repeated.
    """

    def __init__(self, keys: LeadershipKeys, host: str, lease_s: float) -> None:
        self._keys, self._host, self._requested_s = keys, host, lease_s
        self._held = LeadershipState()
        self._lease = 0
        self._tried: dict[str, int] = {}  # mark of a write with unknown result -> lease
        self.lease_s = lease_s  # the duration in the store

    @property
    def since(self) -> int:
        return self._held.since

    def take(self, seen: LeadershipState, snapshot: Mapping[str, Any]) -> None:
        """Take the lease. Raise LeadershipLostError if another host has it, or has taken it since `seen` was read."""
        if self._is_own(seen) and seen.holder == self._host:
            self._holds(seen)  # an earlier attempt took the lease
        elif seen.holder:
            raise LeadershipLostError(f"{seen.holder} has the lease")
        else:
            lease, self.lease_s = self._keys.grant(self._requested_s)
            self._swap(seen, snapshot, lease)

    def write(self, snapshot: Mapping[str, Any]) -> None:
        """Write a snapshot. When this returns, the controller may send the snapshot's contents."""
        try:
            self._swap(self._held, snapshot)
        except LeadershipLostError:
            found = self._keys.look()
            if not self._is_own(found):
                raise
            if found.holder:  # an earlier attempt wrote it, and may have taken the lease again
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
        """Release the lease, so that the next controller needn't wait for its expiry."""
        self._keys.revoke(self._lease)

    def _is_own(self, found: LeadershipState) -> bool:
        """Return whether this controller has written the present contents."""
        mark = None if found.snapshot is None else found.snapshot.get(_MARK)
        return isinstance(mark, str) and (found.revision == self._held.revision or mark in self._tried)

    def _swap(self, seen: LeadershipState, snapshot: Mapping[str, Any], lease: int = 0) -> None:
        mark = secrets.token_hex(8)
        self._tried[mark] = lease
        done, found = self._keys.swap(seen, {**snapshot, _MARK: mark}, self._host, lease)
        # The first attempt may have been applied although its answer was lost.
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
