"""The desired cluster under a version that only grows. Pure: no clock, no lock, no I/O; the caller serialises."""

from __future__ import annotations

from typing import Callable

from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store.store import next_cluster


class ConfigStore:
    """One cluster or none, and the number of its version.

    `next_cluster` decides what may be written. `check` may reject a cluster by a ValueError.
    """

    def __init__(self, cluster: Cluster | None = None, check: Callable[[Cluster], None] | None = None) -> None:
        self.cluster = cluster
        self.version = -1 if cluster is None else cluster.version  # the last in use; stays when the cluster is deleted
        self._check = check

    def put(self, document: object, writer: str = "") -> Cluster:
        """Store the document and return it as stored. ValueError (bad input) and StaleVersionError change nothing."""
        wanted = next_cluster(document, writer, self.cluster, self.version)
        if self._check is not None:
            self._check(wanted)
        self.cluster, self.version = wanted, wanted.version
        return wanted

    def clear(self) -> None:
        """Delete the cluster, not its version."""
        self.cluster = None
