"""Where a job's wanted cluster is kept. Whoever wants another one writes it there; the launcher follows it.

Everybody gets a store from :func:`open_store`, which alone knows what kinds there are.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from ms_kungfu.cluster_store.http import HttpClusterStore
from ms_kungfu.cluster_store.store import ClusterStore, StaleVersionError, StoreUnreachableError

__all__ = ["ClusterStore", "StaleVersionError", "StoreUnreachableError", "open_store"]

_KINDS = {"http": HttpClusterStore, "https": HttpClusterStore}


def open_store(url: str, secret: str | None = None, writer: str = "", *, timeout_s: float = 10.0) -> ClusterStore:
    """The store at `url`. Nothing is sent yet. ValueError where the URL names none.

    Args:
        secret: the job's, which writing needs.
        writer: what is kept beside each cluster that is written: ``Cluster.writer`` tells it to whoever reads.
        timeout_s: the limit of each call as a whole; of `watch`, beyond the time that it is to wait.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in _KINDS and bool(parts.hostname) and parts.port != -1
    except ValueError:  # the port is no number, or brackets don't match
        good = False
    if not good:
        raise ValueError(f"{url!r} is not a URL like http://127.0.0.1:9100/config")
    return _KINDS[parts.scheme](url, secret, writer, timeout_s)
