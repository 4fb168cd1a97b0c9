"""What a cluster store does, whatever keeps it, and how it fails."""

from __future__ import annotations

from typing import Any, Protocol

from ms_kungfu.cluster import Cluster
from ms_kungfu.errors import ConfigServerError


class StoreUnreachableError(ConfigServerError):
    """Nobody answers, or not in time. Whether a write was done isn't known; trying again later is reasonable."""


class StaleVersionError(ConfigServerError):
    """The compare-and-swap failed: somebody else has written since. Read again, then decide."""


class ClusterStore(Protocol):
    """The wanted cluster under a version that only grows. Calls may come from any thread, and are bounded in time.

    All raise StoreUnreachableError, and ConfigServerError where they are refused.
    """

    @property
    def url(self) -> str: ...

    def get(self) -> Cluster | None:
        """The wanted cluster, None where there is none."""
        ...

    def put(self, cluster: Cluster) -> Cluster:
        """Writes `cluster`, whose version must be the next one, and returns it as it is kept. StaleVersionError where
        somebody else was faster. It is signed as `cluster` is, else as the store was opened for."""
        ...

    def watch(self, version: int, timeout_s: float) -> Cluster | None:
        """As soon as there is a cluster of a newer version than `version`: that one; None after `timeout_s`."""
        ...

    def status(self) -> Any:
        """What the job tells of itself, by JSON, where its launcher keeps this store; None elsewhere."""
        ...

    def delete(self) -> None:
        """Makes the store forget the cluster, not its version."""
        ...
