"""The wanted cluster under a version that only grows. Pure: no clock, no lock, no I/O; the caller serialises."""

from __future__ import annotations

from dataclasses import replace
from typing import Callable

from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import StaleVersionError


class ConfigStore:
    """One cluster or none, and the number of its version.

    A document that names ``Version`` is a compare-and-swap: it must name the present version plus one (where the store
    is empty, any that was not used before), so of two writers that read the same version one wins and the other learns
    it. A document without ``Version`` always becomes the next one. `check` may refuse a cluster by a ValueError.
    """

    def __init__(self, cluster: Cluster | None = None, check: Callable[[Cluster], None] | None = None) -> None:
        self.cluster = cluster
        self.version = -1 if cluster is None else cluster.version  # the last in use; stays when the cluster is deleted
        self._check = check

    def put(self, document: object, writer: str = "") -> Cluster:
        """Stores the document and returns it as stored. ValueError (bad input) and StaleVersionError change nothing."""
        wanted = Cluster.from_json(document, writer=writer)
        assert isinstance(document, dict)
        if "Version" not in document:
            wanted = replace(wanted, version=self.version + 1)
        elif self.cluster is None and wanted.version <= self.version:
            raise StaleVersionError(f"Version {wanted.version} is over; the next one is {self.version + 1}")
        elif self.cluster is not None and wanted.version != self.version + 1:
            raise StaleVersionError(
                f"Version {wanted.version} is not the next one: the present version is {self.version}, so name "
                f"{self.version + 1} after reading it, or leave Version out to overwrite whatever is there"
            )
        if "Runners" not in document and self.cluster is not None:
            wanted = replace(wanted, runners=self.cluster.runners)
        if "Slots" not in document and self.cluster is not None:
            wanted = replace(wanted, slots=self.cluster.slots, placement=self.cluster.placement)
        if self._check is not None:
            self._check(wanted)
        self.cluster, self.version = wanted, wanted.version
        return wanted

    def clear(self) -> None:
        """Forgets the cluster, not its version."""
        self.cluster = None
