"""The store of a job's desired cluster version. Clients write a new version there, and the launcher follows it.

:func:`open_store` returns a store. It is the only function that depends on the kinds of stores.
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
    """Return the store at `url`. Nothing is sent yet. Raise ValueError if the URL is invalid.

    Args:
        secret: the job's secret. Some stores require it for writes (`ClusterStore.needs_secret`).
        writer: the name that is stored with each cluster that is written. Readers get it in ``Cluster.writer``.
        timeout_s: the time limit of each call. For `watch`, it is added to the requested waiting time.
    """
    # Import HTTP clients only here: they take as long as all other imports (except NumPy) of a worker without a store.
    if has_leadership(url):
        from ms_kungfu.cluster_store.etcd import EtcdClusterStore

        return EtcdClusterStore(url, secret, writer, timeout_s)
    from ms_kungfu.cluster_store.http import HttpClusterStore

    return HttpClusterStore(url, secret, writer, timeout_s)  # HttpClusterStore rejects any other URL


def has_leadership(url: str) -> bool:
    """Return whether the store at `url` can hold the controller's leadership lease.

    Such a store survives host failures.
    """
    return url.partition(":")[0] in ("etcd", "etcds")


def open_leadership(url: str, *, timeout_s: float = 10.0) -> LeadershipKeys:
    """Return the keys of the leadership lease in the store."""
    from ms_kungfu.cluster_store.etcd_leadership import EtcdLeadershipKeys

    return EtcdLeadershipKeys(url, timeout_s)
