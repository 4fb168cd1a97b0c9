"""What a cluster store does, whatever keeps it, and how it fails."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

from ms_kungfu.cluster import Cluster
from ms_kungfu.errors import ConfigServerError


class StoreUnreachableError(ConfigServerError):
    """Nobody answers, or not in time. Whether a write was done isn't known; trying again later is reasonable."""

    @property
    def question(self) -> str:
        """The sentence for who has just named the store, and may be wrong."""
        return f"{self}; is it running?"


class StoreFullError(ConfigServerError):
    """The store takes no write before an operator has made room. What is in it can be read."""


class StaleVersionError(ConfigServerError):
    """The compare-and-swap failed: somebody else has written since. Read again, then decide."""


class ClusterStore(Protocol):
    """The desired cluster under a version that only grows. Calls may come from any thread, and are bounded in time.

    All raise StoreUnreachableError, and ConfigServerError where they are refused.
    """

    @property
    def url(self) -> str: ...

    @property
    def servers(self) -> tuple[str, ...]:
        """The hosts that keep it, by the names that the URL has for them."""
        ...

    @property
    def needs_secret(self) -> bool:
        """Whether writing needs the job's secret; else who may write is the store's own affair."""
        ...

    def get(self) -> Cluster | None:
        """The desired cluster, None where there is none."""
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


def next_cluster(document: object, writer: str, held: Cluster | None, last_version: int) -> Cluster:
    """What a store that has `held`, and has had versions up to `last_version`, keeps once `document` is written.

    A document that names ``Version`` is a compare-and-swap: it must name the present version plus one (where the store
    is empty, any that was not used before), so of two writers that read the same version one wins and the other learns
    it (StaleVersionError). A document without ``Version`` always becomes the next one. ValueError for what is none.
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
