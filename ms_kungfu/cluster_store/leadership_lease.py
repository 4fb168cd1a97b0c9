"""The lease of a job's controller, in a store that outlives it: who decides for the job, and what the next one has to
know.

There are two keys. The *record* is what the controller has decided, as of its last entry. The *holder* names the host
that has the lease, and hangs on a lease: the store takes it away when nobody renews that. Each write compares both:
that the record is the one which the writer knows, and that the holder is who it was, since the revision at which it
came to be. So of two who take the lease one gets it, and a controller that was paused while another one took it can
write nothing more.

The lease only permits others to try. That no two controllers decide rests on the comparisons, and on nobody's clock.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ms_kungfu.errors import ConfigServerError

_MARK = "Mark"  # of a write, by which its writer knows it again


class LeadershipLostError(ConfigServerError):
    """Somebody else has the lease, or has written since: this is the controller no more."""


class LeadershipGoneError(LeadershipLostError):
    """Nobody has it: the record, and with it all that was decided, is gone from the store."""

    def __init__(self) -> None:
        super().__init__("the store has lost the job's keys: they were deleted, or its data was")


@dataclass(frozen=True)
class LeadershipState:
    """What the store tells of the lease. `revision`: the record's, 0: there is none; `holder`: "" where nobody has it;
    `since`: the revision at which he took it, else 0."""

    snapshot: Mapping[str, Any] | None = None
    revision: int = 0
    holder: str = ""
    since: int = 0


class LeadershipKeys(Protocol):
    """The two keys in a store. Calls may come from any thread, and are bounded in time. StoreUnreachableError where
    nobody answers: what became of a write isn't known then."""

    def look(self) -> LeadershipState:
        """Both at once."""
        ...

    def swap(
        self, seen: LeadershipState, snapshot: Mapping[str, Any], holder: str = "", lease: int = 0
    ) -> tuple[bool, LeadershipState]:
        """Writes the record, and with a `lease` the holder, where both keys are as they were `seen`. Whether they were,
        and what there is then."""
        ...

    def grant(self, seconds: float) -> tuple[int, float]:
        """A lease, and how long it lasts."""
        ...

    def renew(self, lease: int) -> bool:
        """Whether there is still such a lease, which begins anew then."""
        ...

    def revoke(self, lease: int) -> None:
        """What hangs on it goes."""


class LeadershipLease:
    """The controller's end. One call at a time; where nobody answers (StoreUnreachableError) it may be made again."""

    def __init__(self, keys: LeadershipKeys, host: str, lease_s: float) -> None:
        self._keys, self._host, self._requested_s = keys, host, lease_s
        self._held = LeadershipState()
        self._lease = 0
        self._tried: dict[str, int] = {}  # marks of writes of which isn't known what became -> lease
        self.lease_s = lease_s  # as the store has it

    @property
    def since(self) -> int:
        return self._held.since

    def take(self, seen: LeadershipState, snapshot: Mapping[str, Any]) -> None:
        """LeadershipLostError where somebody else has it, or has got it since this was `seen`."""
        if self._is_own(seen) and seen.holder == self._host:
            self._holds(seen)  # by the try before
        elif seen.holder:
            raise LeadershipLostError(f"{seen.holder} has the lease")
        else:
            lease, self.lease_s = self._keys.grant(self._requested_s)
            self._swap(seen, snapshot, lease)

    def write(self, snapshot: Mapping[str, Any]) -> None:
        """What is in it may be said when this returns."""
        try:
            self._swap(self._held, snapshot)
        except LeadershipLostError:
            found = self._keys.look()
            if not self._is_own(found):
                raise
            if found.holder:  # what is there is of a try before, which may have taken the lease anew
                self._holds(found)
                self._swap(found, snapshot)
            else:
                self.take(found, snapshot)  # the lease was over

    def renew(self) -> None:
        """Well before the lease is over."""
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
        """Who comes next needn't wait."""
        self._keys.revoke(self._lease)

    def _is_own(self, found: LeadershipState) -> bool:
        """Whether this controller has written what is there."""
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
