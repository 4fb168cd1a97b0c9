"""Define the interface and errors of all cluster stores, and the clusters that a store accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Protocol

from ms_kungfu.cluster import Cluster
from ms_kungfu.errors import ConfigServerError


class StoreUnreachableError(ConfigServerError):
    """The store hasn't answered in time. It is unknown whether a write was applied. The caller may try again later."""

    @property
    def question(self) -> str:
        """Return the message to show if the user has just entered the store's URL, which may be wrong."""
        return f"{self}; is it running?"


class StoreFullError(ConfigServerError):
    """The store accepts no writes until an operator frees space. Its contents can still be read."""


class StaleVersionError(ConfigServerError):
    """A compare-and-swap has failed, because another client has written first. The caller must read again."""


class ClusterStore(Protocol):
    """A store of the desired cluster. Each write increases the cluster's version number.

    Methods may be called from any thread, and have a time limit. They raise StoreUnreachableError if the store doesn't
    answer, and ConfigServerError if it rejects the request.
    """

    @property
    def url(self) -> str: ...

    @property
    def servers(self) -> tuple[str, ...]:
        """Return the hosts of the store, as the URL names them."""
        ...

    @property
    def needs_secret(self) -> bool:
        """Return whether writing requires the job's secret. If not, the store checks permissions itself."""
        ...

    def get(self) -> Cluster | None:
        """Return the desired cluster; None if the store contains no cluster."""
        ...

    def put(self, cluster: Cluster) -> Cluster:
        """Write `cluster`, and return the stored cluster.

        The version of `cluster` must be the current version plus one. The writer's name is `cluster.writer` or, if that
        is "", the name that was passed to `open_store`.

        Raises:
            StaleVersionError: another client has written this version first.
        """
        ...

    def watch(self, version: int, timeout_s: float) -> Cluster | None:
        """Wait for a cluster version newer than `version`, and return it. Return None after `timeout_s` seconds."""
        ...

    def status(self) -> Any:
        """Return the job's status document if the job's launcher runs this store; otherwise return None."""
        ...

    def delete(self) -> None:
        """Delete the cluster, but keep its version number."""
        ...


def next_cluster(document: object, writer: str, held: Cluster | None, last_version: int) -> Cluster:
    """Return the cluster that a store contains after `document` has been written to it.

    A document with ``Version`` is a compare-and-swap: its version must be the current version plus one or, if the store
    is empty, any version that wasn't used before. So if two writers have read the same version, one write succeeds, and
    the other raises StaleVersionError. A document without ``Version`` always becomes the next version.

    Args:
        document: the cluster to write, as JSON.
        writer: the name of the writer.
        held: the cluster in the store before the write; None if the store is empty.
        last_version: the highest version that was used so far.

    Raises:
        ValueError: the document is invalid.
        StaleVersionError: the version of the document isn't the next version.
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
            f"read the present cluster and send the new one with Version {last_version + 1}, or omit Version to "
            "overwrite any version"
        )
    if "Runners" not in document and held is not None:
        wanted = replace(wanted, runners=held.runners)
    if "Slots" not in document and held is not None:
        wanted = replace(wanted, slots=held.slots, placement=held.placement)
    return wanted


class ConfigStore:
    """The contents of a config server: at most one cluster, and the last version number.

    Only one method may run at a time. `check` raises ValueError to reject a cluster.
    """

    def __init__(self, cluster: Cluster | None = None, check: Callable[[Cluster], None] | None = None) -> None:
        self.cluster = cluster
        # The last version number that was used. It doesn't change when the cluster is deleted.
        self.version = -1 if cluster is None else cluster.version
        self._check = check

    def put(self, document: object, writer: str = "") -> Cluster:
        """Store a cluster, and return the stored cluster. If the method raises an error, it changes nothing.

        Raises:
            ValueError: the document is invalid, or `check` has rejected it.
            StaleVersionError: the version of the document isn't the next version.
        """
        wanted = next_cluster(document, writer, self.cluster, self.version)
        if self._check is not None:
            self._check(wanted)
        self.cluster, self.version = wanted, wanted.version
        return wanted

    def clear(self) -> None:
        """Delete the cluster, but keep its version number."""
        self.cluster = None
