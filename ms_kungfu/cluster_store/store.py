"""The interface of a cluster store, of any kind, its errors, and what a store accepts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Callable, Protocol

from ms_kungfu.cluster import Cluster
from ms_kungfu.errors import ConfigServerError


class StoreUnreachableError(ConfigServerError):
    """There is no answer, or not in time. Whether a write was done isn't known; a later retry is reasonable."""

    @property
    def question(self) -> str:
        """Return the message for a user that has just named the store, and may be wrong."""
        return f"{self}; is it running?"


class StoreFullError(ConfigServerError):
    """The store accepts no write before an operator has made space. Its contents can be read."""


class StaleVersionError(ConfigServerError):
    """The compare-and-swap failed: another client has written since. Read again, then decide."""


class ClusterStore(Protocol):
    """The desired cluster under a version that only grows. Calls may come from any thread, and are bounded in time.

    All raise StoreUnreachableError, and ConfigServerError if they are rejected.
    """

    @property
    def url(self) -> str: ...

    @property
    def servers(self) -> tuple[str, ...]:
        """Return the hosts that keep it, by their names in the URL."""
        ...

    @property
    def needs_secret(self) -> bool:
        """Return whether writing needs the job's secret; else the store itself decides on permissions."""
        ...

    def get(self) -> Cluster | None:
        """Return the desired cluster, None without one."""
        ...

    def put(self, cluster: Cluster) -> Cluster:
        """Write `cluster`, whose version must be the next one, and return it as it is kept.

        StaleVersionError if another client was faster. It is signed as `cluster` is, else as the store was opened for.
        """
        ...

    def watch(self, version: int, timeout_s: float) -> Cluster | None:
        """Return a cluster of a newer version than `version`, as soon as there is one; None after `timeout_s`."""
        ...

    def status(self) -> Any:
        """Return the job's status, as JSON, if its launcher keeps this store; None elsewhere."""
        ...

    def delete(self) -> None:
        """Delete the cluster, not its version."""
        ...


def next_cluster(document: object, writer: str, held: Cluster | None, last_version: int) -> Cluster:
    """Return what a store that has `held`, with versions up to `last_version`, keeps after a write of `document`.

    A document that names ``Version`` is a compare-and-swap: it must name the present version plus one (in an empty
    store, any that was not used before). So of two writers that read the same version one wins and the other gets
    StaleVersionError. A document without ``Version`` always becomes the next one. ValueError for an invalid document.
    """
    wanted = Cluster.from_json(document, writer=writer)
    assert isinstance(document, dict)
    if "Version" not in document:
        wanted = replace(wanted, version=last_version + 1)
    elif held is None and wanted.version <= last_version:
        raise StaleVersionError(f"Version {wanted.version} is over; the next one is {last_version + 1}")
    elif held is not None and wanted.version != last_version + 1:
        raise StaleVersionError(
            f"Version {wanted.version} is not the next one: the present version is {last_version}, so name "
            f"{last_version + 1} after reading it, or leave Version out to overwrite whatever is there"
        )
    if "Runners" not in document and held is not None:
        wanted = replace(wanted, runners=held.runners)
    if "Slots" not in document and held is not None:
        wanted = replace(wanted, slots=held.slots, placement=held.placement)
    return wanted


class ConfigStore:
    """What a config server keeps: one cluster or none, and the last version. The caller serialises.

    `check` may reject a cluster by a ValueError.
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
