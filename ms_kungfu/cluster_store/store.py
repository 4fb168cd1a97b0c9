"""The interface of all cluster stores, their errors, and what a store accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Protocol

from ms_kungfu.cluster import Cluster
from ms_kungfu.errors import ConfigServerError


class StoreUnreachableError(ConfigServerError):
    """There was no answer in time. Whether a write was applied is unknown; retry later."""

    @property
    def question(self) -> str:
        """Return the message for a store's URL that a user has just entered and that may be wrong."""
        return f"{self}; is it running?"


class StoreFullError(ConfigServerError):
    """The store accepts no write until an operator frees space. Its contents can be read."""


class StaleVersionError(ConfigServerError):
    """The compare-and-swap failed: another client has written since the read. Read again, then decide."""


class ClusterStore(Protocol):
    """The desired cluster, with a version number that only grows. Methods may be called from any thread.

    All methods have a time limit. They raise StoreUnreachableError without an answer, and ConfigServerError if the
    request is rejected.
    """

    @property
    def url(self) -> str: ...

    @property
    def servers(self) -> tuple[str, ...]:
        """Return the hosts of the store, as named in the URL."""
        ...

    @property
    def needs_secret(self) -> bool:
        """Return whether writes need the job's secret. Otherwise the store itself decides on permissions."""
        ...

    def get(self) -> Cluster | None:
        """Return the desired cluster; None if the store has no cluster."""
        ...

    def put(self, cluster: Cluster) -> Cluster:
        """Write `cluster`, whose version must be the next one, and return the stored cluster.

        Raise StaleVersionError if another client was faster. The writer's name is `cluster.writer`, or else the name
        with which the store was opened.
        """
        ...

    def watch(self, version: int, timeout_s: float) -> Cluster | None:
        """Return a cluster with a newer version than `version` as soon as there is one; None after `timeout_s`."""
        ...

    def status(self) -> Any:
        """Return the job's status as JSON if the job's launcher runs this store; else None."""
        ...

    def delete(self) -> None:
        """Delete the cluster, but keep its version number."""
        ...


def next_cluster(document: object, writer: str, held: Cluster | None, last_version: int) -> Cluster:
    """Return the cluster that a store has after a write of `document`; before the write, it has `held`.

    `last_version` is the highest version used so far. A document with ``Version`` is a compare-and-swap: it must have
    the present version plus one. In an empty store it may have any version that was not used before. So if two writers
    have read the same version, one succeeds and the other gets StaleVersionError. A document without ``Version``
    always becomes the next version. Raise ValueError for an invalid document.
    """
    wanted = Cluster.from_json(document, writer=writer)
    assert isinstance(document, dict)
    if "Version" not in document:
        wanted = replace(wanted, version=last_version + 1)
    elif held is None and wanted.version <= last_version:
        raise StaleVersionError(f"Version {wanted.version} has been superseded; the next version is {last_version + 1}")
    elif held is not None and wanted.version != last_version + 1:
        raise StaleVersionError(
            f"Version {wanted.version} is not the next version: the present version is {last_version}; "
            f"read it and send version {last_version + 1}, or leave Version out to overwrite any version"
        )
    if "Runners" not in document and held is not None:
        wanted = replace(wanted, runners=held.runners)
    if "Slots" not in document and held is not None:
        wanted = replace(wanted, slots=held.slots, placement=held.placement)
    return wanted


class ConfigStore:
    """What a config server keeps: at most one cluster, and the last version. The caller makes one call at a time.

    `check` may reject a cluster by a ValueError.
    """

    def __init__(self, cluster: Cluster | None = None, check: Callable[[Cluster], None] | None = None) -> None:
        self.cluster = cluster
        # The last used version; it stays when the cluster is deleted.
        self.version = -1 if cluster is None else cluster.version
        self._check = check

    def put(self, document: object, writer: str = "") -> Cluster:
        """Store the document and return it as stored. ValueError (bad input) and StaleVersionError change nothing."""
        wanted = next_cluster(document, writer, self.cluster, self.version)
        if self._check is not None:
            self._check(wanted)
        self.cluster, self.version = wanted, wanted.version
        return wanted

    def clear(self) -> None:
        """Delete the cluster, but keep its version."""
        self.cluster = None
