"""Sends workers away: the next cluster is the present one without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ms_kungfu import env, runtime
from ms_kungfu.config_server.client import ConfigClient, StaleConfigError
from ms_kungfu.elastic.cluster import Cluster
from ms_kungfu.errors import ResizeError


def without(cluster: Cluster, ranks: Sequence[int]) -> Cluster:
    """The next version, without the workers of these ranks. ValueError where nobody would be left."""
    unknown = [rank for rank in ranks if not 0 <= rank < cluster.size]
    if unknown:
        raise ValueError(f"no rank {unknown[0]} in a cluster of {cluster.size} workers")
    kept = tuple(worker for rank, worker in enumerate(cluster.workers) if rank not in ranks)
    if not kept:
        raise ValueError("a cluster has at least 1 worker; all were to be evicted")
    return replace(cluster, workers=kept, version=cluster.version + 1)


def evict(ranks: Sequence[int]) -> None:
    """Ask for a cluster without these ranks of the present one. Called by one worker; all follow at a later step.

    Raises ResizeError where the cluster can't change, or is changing already.
    """
    url, secret = env.CONFIG_SERVER.get(), env.JOB_SECRET.get()
    if url is None or not env.WATCH.get():
        raise ResizeError("evicting needs a launcher that follows a config server: start the job with kungfu-run -w")
    client = ConfigClient(url, secret)
    cluster = client.get()
    if cluster is None or cluster.version != runtime.cluster_version():
        raise ResizeError("the cluster is changing already, so ranks are about to be others")
    try:
        client.put(without(cluster, ranks))
    except StaleConfigError:
        raise ResizeError("the cluster is changing already, so ranks are about to be others") from None
