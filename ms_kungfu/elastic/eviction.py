"""Evict workers for a policy. All workers record the eviction, in case the worker that requests it fails."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Callable

import numpy as np

from ms_kungfu import env, membership, runtime
from ms_kungfu.agreement import gather_living

_log = logging.getLogger(__name__)

Evict = Callable[[Sequence[int]], None]


@dataclass(frozen=True)
class _Eviction:
    """The uids (worker IDs) of the workers to evict, and of the worker that requests it; equal on all workers."""

    job: str | None
    version: int  # the cluster version in which the eviction was requested
    sender: int
    leaving: list[int]


class Evictions:
    """The last eviction that a policy has decided on, until the eviction is complete."""

    def __init__(self, evict: Evict | None) -> None:
        self._evict = evict
        self._held: _Eviction | None = None

    def state(self) -> Any:
        return None if self._held is None else list(astuple(self._held))

    def restore(self, held: Any) -> None:
        # Ignore an eviction of another job. A checkpoint of an older version of ms_kungfu has no eviction, or an
        # eviction with host and port instead of uids.
        self._held = _Eviction(*held) if held is not None and held[0] == env.JOB.get() else None

    def order(self, ranks: Sequence[int], decider: int) -> None:
        """Evict these ranks at the request of `decider` (collective)."""
        uids = _uids()
        leaving = [uids[rank] for rank in ranks if rank in uids]
        self._held = _Eviction(env.JOB.get(), membership.cluster_version(), uids.get(decider, 0), leaving)
        if runtime.current_rank() == decider:
            self._send_away(ranks)

    def renew(self) -> None:
        """Request the eviction again if the worker that requested it has failed (collective).

        Called before a policy runs. The call has an effect only after the cluster has changed.
        """
        held = self._held
        if held is None or held.version == membership.cluster_version():
            return
        uids = _uids()
        ranks = [rank for rank, uid in uids.items() if uid in held.leaving]
        asks_again = bool(ranks) and held.sender not in uids.values()
        sender = uids[min(uids)] if asks_again else held.sender
        leaving = [uids[rank] for rank in ranks]
        self._held = _Eviction(held.job, membership.cluster_version(), sender, leaving) if ranks else None
        if asks_again and runtime.current_rank() == min(uids):
            self._send_away(ranks)

    def _send_away(self, ranks: Sequence[int]) -> None:
        try:
            if self._evict is not None:
                self._evict(ranks)
            else:
                for rank in ranks:
                    membership.evict(rank)
        except Exception as error:  # don't raise: the other workers would wait for this worker
            _log.error(
                'eviction failed: ranks=%s error="%s: %s"', ",".join(map(str, ranks)), type(error).__name__, error
            )


def _uids() -> dict[int, int]:
    """Return the uid of each living rank (collective).

    An address wouldn't identify a process, because later processes may reuse the address.
    """
    # A uid contains a version number and may need more than 63 bits, so it is sent as two numbers.
    row = np.array(divmod(membership.uid(), 1 << 48))
    return {
        rank: (int(each[0]) << 48) + int(each[1]) for rank, each in gather_living(row, "kungfu/policy/uids").items()
    }
