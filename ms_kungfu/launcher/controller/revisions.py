"""How the launcher writes the cluster to the store after workers fail or leave, and follows changes by other writers.

A revision is a cluster that the launcher writes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import Callable, Protocol, TypeVar

from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import ClusterStore, StaleVersionError, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.controller.startup import JobStart
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.state.coordinator import Coordinator
from ms_kungfu.launcher.state.hosts import HostError

_log = logging.getLogger(__name__)
_LONG_POLL_S = 20.0
_RETRY_S = 0.2
T = TypeVar("T")


class RevisionOwner(Protocol):
    """The object that supplies the revisions and receives the clusters that the store contains."""

    def next_revision(self) -> Cluster | None:
        """Return the next cluster to write, or None if no revision is needed."""
        ...

    def drop_joining(self, reason: str) -> None:
        """Drop the joining workers, because the cluster can't include them."""

    def on_cluster(self, cluster: Cluster) -> None:
        """Process the store's `cluster`, which may be unchanged."""


class Revisions:
    """Write revisions in the background, one at a time. Each revision builds on the result of the previous one.

    If another writer has written a newer cluster first, the next revision builds on that cluster.
    """

    def __init__(self, job: RevisionOwner, coordinator: Coordinator, start: JobStart, machine: Machine) -> None:
        self._job = job
        self._coordinator = coordinator
        self._start = start
        self._machine = machine
        self._task: asyncio.Future[None] | None = None

    def write(self) -> None:
        """Write a revision if one is needed."""
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._write_all())
            self._task.add_done_callback(raise_bugs)

    async def _write_all(self) -> None:
        trouble = ""
        while (revision := self._job.next_revision()) is not None:
            try:
                await self._write(revision)
            except HostError as error:
                self._job.drop_joining(str(error))
            except ConfigServerError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    _log.warning(
                        'store unavailable: error="%s". The workers go on; the store receives the change later', error
                    )
                await asyncio.sleep(_RETRY_S)

    async def _write(self, cluster: Cluster) -> None:
        store = self._start.store
        if self._start.server is not None:
            # `put` also notifies the job.
            self._start.server.put(cluster.to_json(), cluster.writer or self._start.writer)
            return
        assert store is not None
        try:
            written = await self._machine.in_thread(lambda: store.put(cluster))
        except StaleVersionError:
            found = await self._machine.in_thread(store.get)
            if found is None or found.version <= self._coordinator.last_version:
                raise  # the server has restarted without its state; the watcher writes the cluster again
            self._job.on_cluster(found)
        else:
            self._job.on_cluster(written)


def raise_bugs(task: asyncio.Future[None]) -> None:
    """Pass exceptions to the event loop's exception handler."""
    if not task.cancelled():
        task.result()


def in_loop(function: Callable[[T], None]) -> Callable[[T], None]:
    """Return a function that any thread may call, and that calls `function` in the running event loop."""
    loop = asyncio.get_running_loop()

    def call(value: T) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(function, value)

    return call


@dataclass
class StoreWatcher:
    """Call `on_cluster` with each newer cluster, from a separate thread.

    `newest` returns the newest cluster that the job can run. Its version number is the newest known version number.

    If a store restarts without its state (a config server keeps nothing on disk), the watcher writes the newest
    cluster again. The next change then continues from the version of that cluster. If `puts_back` is set, the watcher
    also restores the cluster after a client has deleted it. For etcd, `puts_back` isn't set, because a user may delete
    the cluster to end the job.
    """

    store: ClusterStore
    newest: Callable[[], Cluster]
    on_cluster: Callable[[Cluster], None]
    machine: Machine
    # called with the reason when the store doesn't answer, and with "" when it answers again
    on_outage: Callable[[str], None] = lambda error: None
    puts_back: bool = True
    _stopped = False

    def __post_init__(self) -> None:
        self.machine.start_thread("kungfu-watch", self._run)

    def stop(self) -> None:
        """Stop the watcher and return at once. A request that is still pending ends when the process exits."""
        self._stopped = True

    def look_now(self) -> None:
        """Read the store now, without the long poll, because a worker has requested an unknown cluster version."""
        self.machine.start_thread("kungfu-look", self._look)

    def _look(self) -> None:
        try:
            found = self.store.get()
        except ConfigServerError:
            return  # the loop below logs the error
        if found is not None and found.version > self.newest().version:
            self.on_cluster(found)

    def _run(self) -> None:
        reachable = True
        trouble = ""
        while not self._stopped:
            begin = self.machine.monotonic()
            try:
                known = self.newest()
                if not reachable:
                    self._restore(known)
                    reachable, trouble = True, ""
                    self.on_outage("")
                    _log.info("store available: url=%s", self.store.url)
                found = self.store.watch(known.version, _LONG_POLL_S)
                if found is not None and not self._stopped:
                    self.on_cluster(found)
                elif self.puts_back and not self._stopped and self.store.get() is None:
                    self._put_back(known)
                    _log.warning('cluster restored: url=%s reason="the config server lost it"', self.store.url)
            except ConfigServerError as error:
                is_lost = isinstance(error, StoreUnreachableError)
                if reachable and is_lost and not self._stopped:
                    self.on_outage(str(error))
                reachable = reachable and not is_lost
                if str(error) != trouble and not self._stopped:
                    trouble = str(error)
                    _log.warning('store unavailable: error="%s". The job goes on; changes of the cluster wait', error)
                self.machine.sleep(_RETRY_S)
                continue
            if found is None and self.machine.monotonic() - begin < _RETRY_S:
                self.machine.sleep(_RETRY_S)  # a server without long polling answers at once

    def _put_back(self, known: Cluster) -> None:
        """Write the cluster into a store that has none.

        A store that has lost its state accepts the same version number again, so the workers needn't adopt another
        cluster version. If a client has deleted the cluster, the store rejects version numbers that were used before.
        Then the cluster gets the next number.
        """
        try:
            self.store.put(known)
        except StaleVersionError:
            if self.store.get() is not None:
                raise  # the workers have just written a cluster
            self.store.put(known.following(known.workers))

    def _restore(self, known: Cluster) -> None:
        """Make the store contain the newest cluster that this launcher knows, or a newer one."""
        found = self.store.get()
        if found is None:
            self._put_back(known)
        elif found.version < known.version:
            self.store.delete()  # the store was restarted with an older cluster version
            self.store.put(known)
        elif found.version == known.version and found != known:
            # A client that didn't know the launcher's cluster has written a different cluster with the same version
            # number. The client's cluster must not be lost, so it becomes the next version.
            written = self.store.put(replace(found, version=known.version + 1))
            self.on_cluster(replace(written, writer=found.writer))  # the client wrote it, not the launcher
