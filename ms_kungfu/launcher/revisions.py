"""What the launcher itself writes to the cluster store because workers have gone: again and again until it is there."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import StaleVersionError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.hosts import HostError
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.startup import Start

_log = logging.getLogger(__name__)
_RETRY_S = 0.2


class RevisionOwner(Protocol):
    """Who knows what is to be written, and is told what the store holds then."""

    def next_revision(self) -> Cluster | None:
        """None where nothing is to be written any more."""
        ...

    def drop_newcomers(self, reason: str) -> None:
        """They can't be had."""

    def on_cluster(self, cluster: Cluster) -> None:
        """The store holds `cluster`, which is news or is not."""

    @property
    def last_version(self) -> int: ...


class Revisions:
    """Writes one after the other, in the background: each builds on what has become of the one before. A conflict means
    that there is something newer to build on."""

    def __init__(self, job: RevisionOwner, start: Start, machine: Machine) -> None:
        self._job = job
        self._start = start
        self._machine = machine
        self._task: asyncio.Future[None] | None = None

    def write(self) -> None:
        """There may be something to write."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._write_all())
            self._task.add_done_callback(_raise_bugs)

    async def _write_all(self) -> None:
        trouble = ""
        while (revision := self._job.next_revision()) is not None:
            try:
                await self._write(revision)
            except HostError as error:
                self._job.drop_newcomers(str(error))
            except ConfigServerError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    _log.warning("%s; the workers go on, and it is told of the change later", error)
                await asyncio.sleep(_RETRY_S)

    async def _write(self, cluster: Cluster) -> None:
        store = self._start.store
        if self._start.server is not None:
            self._start.server.put(cluster.to_json(), self._start.writer)  # which tells the job
            return
        assert store is not None
        try:
            written = await self._machine.in_thread(lambda: store.put(cluster))
        except StaleVersionError:
            found = await self._machine.in_thread(store.get)
            if found is None or found.version <= self._job.last_version:
                raise  # it has come back without what it knew, and the watcher is about to tell it
            self._job.on_cluster(found)
        else:
            self._job.on_cluster(written)


def _raise_bugs(task: asyncio.Future[None]) -> None:
    """They reach the loop's exception handler."""
    if not task.cancelled():
        task.result()
