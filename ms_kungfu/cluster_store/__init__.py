"""Where a job's desired cluster is kept. Whoever wants another one writes it there; the launcher follows it.

Everybody gets a store from :func:`open_store`, which alone knows what kinds there are.
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
    """The store at `url`. Nothing is sent yet. ValueError where the URL names none.

    Args:
        secret: the job's, which writing may need (`ClusterStore.needs_secret`).
        writer: what is kept beside each cluster that is written: ``Cluster.writer`` tells it to whoever reads.
        timeout_s: the limit of each call as a whole; of `watch`, beyond the time that it is to wait.
    """
    # Clients of HTTP take as long to import as all that a worker without a store needs but NumPy.
    if has_leadership(url):
        from ms_kungfu.cluster_store.etcd import EtcdClusterStore

        return EtcdClusterStore(url, secret, writer, timeout_s)
    from ms_kungfu.cluster_store.http import HttpClusterStore

    return HttpClusterStore(url, secret, writer, timeout_s)  # it reports any other URL as not like its own


def has_leadership(url: str) -> bool:
    """Whether the store at `url` keeps the lease of a job's controller: it lives on when a host dies."""
    return url.partition(":")[0] in ("etcd", "etcds")


def open_leadership(url: str, *, timeout_s: float = 10.0) -> LeadershipKeys:
    """The keys of that lease."""
    from ms_kungfu.cluster_store.etcd_leadership import EtcdLeadershipKeys

    return EtcdLeadershipKeys(url, timeout_s)
