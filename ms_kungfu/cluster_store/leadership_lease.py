"""Store the leadership lease of a job's controller, and the leader snapshot, in a store that outlives the controller.

There are two keys. The *snapshot* key contains the controller's decisions so far, for the next controller. The *holder*
key names the host that has the leadership lease. The holder key is bound to a lease in the store, which deletes the key
if the lease isn't renewed.

1. Each write compares both keys. A write succeeds only if the snapshot key has the revision that the writer has read,
and the holder key hasn't been created or deleted since then. So if two controllers try to acquire the lease, only one
succeeds. If a controller is paused while another controller acquires the lease, the paused controller can no longer
write. (`test_leadership_lease.py`.)
2. When the lease expires, other hosts may try to acquire it. The comparisons alone, without any clock, ensure that at
most one controller makes decisions.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ms_kungfu.errors import ConfigServerError

_MARK = "Mark"  # the snapshot's field with a mark, by which a writer recognises its own write


class LeadershipLostError(ConfigServerError):
    """Another controller has the lease or has written a newer snapshot, so this controller has stepped down."""


class LeadershipGoneError(LeadershipLostError):
    """The snapshot has been deleted from the store, so the decisions in it are lost."""

    def __init__(self) -> None:
        super().__init__("the store has lost the job's keys: a client deleted the keys, or the store lost its data")


@dataclass(frozen=True)
class LeadershipState:
    """The contents of the two keys.

    Args:
        snapshot: the leader snapshot; None if there is none.
        revision: the revision of the snapshot key; 0 if there is no snapshot.
        holder: the host that has the lease; "" if no host has it.
        since: the revision at which that host acquired the lease; 0 if no host has it.
    """

    snapshot: Mapping[str, Any] | None = None
    revision: int = 0
    holder: str = ""
    since: int = 0


class LeadershipKeys(Protocol):
    """Access to the two keys in a store.

    Methods may be called from any thread, and have a time limit. They raise StoreUnreachableError if the store doesn't
    answer; whether a write was applied is then unknown.
    """

    def look(self) -> LeadershipState:
        """Return the contents of both keys, from a single read."""
        ...

    def swap(
        self, seen: LeadershipState, snapshot: Mapping[str, Any], holder: str = "", lease: int = 0
    ) -> tuple[bool, LeadershipState]:
        """Write the snapshot if both keys still have the contents `seen`. If `lease` isn't 0, also write the holder.

        Return whether the keys had the contents `seen`, and the current contents.
        """
        ...

    def grant(self, seconds: float) -> tuple[int, float]:
        """Create a lease in the store. Return the lease's ID and its duration in seconds."""
        ...

    def renew(self, lease: int) -> bool:
        """Renew a lease. Return whether the lease still existed."""
        ...

    def revoke(self, lease: int) -> None:
        """Delete the lease and the keys that are bound to it."""


class LeadershipLease:
    """The controller's interface to the leadership lease.

    Only one method may run at a time. After StoreUnreachableError, the caller may repeat the call.
    """

    def __init__(self, keys: LeadershipKeys, host: str, lease_s: float) -> None:
        self._keys, self._host, self._requested_s = keys, host, lease_s
        self._held = LeadershipState()
        self._lease = 0
        self._tried: dict[str, int] = {}  # mark of a write that may have been applied -> its lease
        self.lease_s = lease_s  # the lease's duration; the store may choose a longer one

    @property
    def since(self) -> int:
        return self._held.since

    def take(self, seen: LeadershipState, snapshot: Mapping[str, Any]) -> None:
        """Acquire the lease.

        Raises:
            LeadershipLostError: another host has the lease, or has acquired it since `seen` was read.
        """
        if self._is_own(seen) and seen.holder == self._host:
            self._holds(seen)  # an earlier call, whose answer was lost, has acquired the lease
        elif seen.holder:
            raise LeadershipLostError(f"{seen.holder} has the lease")
        else:
            lease, self.lease_s = self._keys.grant(self._requested_s)
            self._swap(seen, snapshot, lease)

    def write(self, snapshot: Mapping[str, Any]) -> None:
        """Write a snapshot. When this method returns, the controller may send the snapshot's contents to hosts."""
        try:
            self._swap(self._held, snapshot)
        except LeadershipLostError:
            found = self._keys.look()
            if not self._is_own(found):
                raise
            if found.holder:  # an earlier call has written a snapshot, and may have acquired the lease again
                self._holds(found)
                self._swap(found, snapshot)
            else:
                self.take(found, snapshot)  # the lease had expired

    def renew(self) -> None:
        """Renew the lease. Call this method well before the lease expires."""
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
        """Release the lease, so that the next controller needn't wait until the lease expires."""
        self._keys.revoke(self._lease)

    def _is_own(self, found: LeadershipState) -> bool:
        """Return whether this controller has written the contents `found`."""
        mark = None if found.snapshot is None else found.snapshot.get(_MARK)
        return isinstance(mark, str) and (found.revision == self._held.revision or mark in self._tried)

    def _swap(self, seen: LeadershipState, snapshot: Mapping[str, Any], lease: int = 0) -> None:
        mark = secrets.token_hex(8)
        self._tried[mark] = lease
        done, found = self._keys.swap(seen, {**snapshot, _MARK: mark}, self._host, lease)
        # If the answer to a write was lost, the write may have been applied. In that case, the repeated write fails.
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
