"""The store of a job's desired cluster. A client writes another cluster there, and the launcher follows it.

:func:`open_store` returns a store; only it knows the kinds of stores.
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
    """Return the store at `url`. Nothing is sent yet. ValueError if the URL names none.

    Args:
        secret: the job's, which writing may need (`ClusterStore.needs_secret`).
        writer: the name that is kept with each
        cluster that is written, and that readers get in ``Cluster.writer``.
        timeout_s: the limit of each call as a whole; of `watch`, beyond the time that it is to wait.
    """
    # HTTP clients take as long to import as all that a worker without a store needs, except NumPy.
    if has_leadership(url):
        from ms_kungfu.cluster_store.etcd import EtcdClusterStore

        return EtcdClusterStore(url, secret, writer, timeout_s)
    from ms_kungfu.cluster_store.http import HttpClusterStore

    return HttpClusterStore(url, secret, writer, timeout_s)  # it reports any other URL as invalid


def has_leadership(url: str) -> bool:
    """Return whether the store at `url` keeps the lease of a job's controller: it survives a host's failure."""
    return url.partition(":")[0] in ("etcd", "etcds")


def open_leadership(url: str, *, timeout_s: float = 10.0) -> LeadershipKeys:
    """Return the keys of that lease."""
    from ms_kungfu.cluster_store.etcd_leadership import EtcdLeadershipKeys

    return EtcdLeadershipKeys(url, timeout_s)
