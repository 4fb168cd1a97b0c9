"""Access the store of a job's desired cluster. To resize a job, clients write a new cluster version to its store.

Callers of :func:`open_store` needn't know whether a store is etcd or a config server.
"""

from __future__ import annotations

from ms_kungfu.cluster_store.leadership_lease import (
    LeadershipGoneError,
    LeadershipKeys,
    LeadershipLease,
    LeadershipLostError,
    LeadershipState,
)
from ms_kungfu.cluster_store.store import ClusterStore, StaleVersionError, StoreFullError, StoreUnreachableError

__all__ = [
    "ClusterStore", "LeadershipGoneError", "LeadershipKeys", "LeadershipLease", "LeadershipLostError",
    "LeadershipState", "StaleVersionError", "StoreFullError", "StoreUnreachableError", "has_leadership",
    "open_leadership", "open_store",
]  # fmt: skip


def open_store(url: str, secret: str | None = None, writer: str = "", *, timeout_s: float = 10.0) -> ClusterStore:
    """Return an object for the store at `url`, without connecting to the store yet.

    Args:
        url: the store's URL.
        secret: the job's secret. Some stores require it for writes (`ClusterStore.needs_secret`).
        writer: a name that is stored with each cluster that this object writes. Readers find the name in
            ``Cluster.writer``.
        timeout_s: the time limit of each call, in seconds. `watch` adds its own `timeout_s` to this limit.

    Raises:
        ValueError: the URL is invalid.
    """
    # Import HTTP clients only here, because the import is slow and workers without a store don't need them.
    if has_leadership(url):
        from ms_kungfu.cluster_store.etcd import EtcdClusterStore

        return EtcdClusterStore(url, secret, writer, timeout_s)
    from ms_kungfu.cluster_store.http import HttpClusterStore

    return HttpClusterStore(url, secret, writer, timeout_s)  # HttpClusterStore rejects any other URL


def has_leadership(url: str) -> bool:
    """Return whether the store at `url` can hold the controller's leadership lease.

    A store that can hold the lease survives the failure of any host of the job.
    """
    return url.partition(":")[0] in ("etcd", "etcds")


def open_leadership(url: str, *, timeout_s: float = 10.0) -> LeadershipKeys:
    """Return an object for the keys of the leadership lease in the store at `url`."""
    from ms_kungfu.cluster_store.etcd_leadership import EtcdLeadershipKeys

    return EtcdLeadershipKeys(url, timeout_s)
