"""What the launcher writes to the cluster store because workers have gone, and what it sees there of others' writes."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass, replace
from typing import Callable, Protocol

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


class RevisionOwner(Protocol):
    """Who knows what is to be written, and is told what the store holds then."""

    def next_revision(self) -> Cluster | None:
        """None where nothing is to be written any more."""
        ...

    def drop_joining(self, reason: str) -> None:
        """They can't be had."""

    def on_cluster(self, cluster: Cluster) -> None:
        """The store holds `cluster`, which is news or is not."""


class Revisions:
    """Writes one after the other, in the background: each builds on what has become of the one before. A conflict means
    that there is something newer to build on."""

    def __init__(self, job: RevisionOwner, coordinator: Coordinator, start: JobStart, machine: Machine) -> None:
        self._job = job
        self._coordinator = coordinator
        self._start = start
        self._machine = machine
        self._task: asyncio.Future[None] | None = None

    def write(self) -> None:
        """There may be something to write."""
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
            self._start.server.put(cluster.to_json(), cluster.writer or self._start.writer)  # which tells the job
            return
        assert store is not None
        try:
            written = await self._machine.in_thread(lambda: store.put(cluster))
        except StaleVersionError:
            found = await self._machine.in_thread(store.get)
            if found is None or found.version <= self._coordinator.last_version:
                raise  # it has come back without what it knew, and the watcher is about to tell it
            self._job.on_cluster(found)
        else:
            self._job.on_cluster(written)


def raise_bugs(task: asyncio.Future[None]) -> None:
    """They reach the loop's exception handler."""
    if not task.cancelled():
        task.result()


def in_loop(function: Callable[[Cluster], None]) -> Callable[[Cluster], None]:
    """Returns what has `function` called in the running event loop, from any thread."""
    loop = asyncio.get_running_loop()

    def call(cluster: Cluster) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            loop.call_soon_threadsafe(function, cluster)

    return call


@dataclass
class StoreWatcher:
    """Calls `on_cluster` from a thread of its own with each newer cluster. `newest` gives the newest one that can be
    run, under the newest version that is known.

    A store that comes back without what it knew (a config server keeps nothing on disk) is given the newest cluster
    again, so that the next change counts on from there. So is one from which somebody has deleted it, with `puts_back`:
    in etcd that may be how somebody ends the job.
    """

    store: ClusterStore
    newest: Callable[[], Cluster]
    on_cluster: Callable[[Cluster], None]
    machine: Machine
    puts_back: bool = True
    _stopped = False

    def __post_init__(self) -> None:
        self.machine.start_thread("kungfu-watch", self._run)

    def stop(self) -> None:
        """Returns at once; a request that is under way ends with the process."""
        self._stopped = True

    def look_now(self) -> None:
        """Somebody knows of a version that has not arrived here: asks without waiting for the long poll."""
        self.machine.start_thread("kungfu-look", self._look)

    def _look(self) -> None:
        try:
            found = self.store.get()
        except ConfigServerError:
            return  # the loop below says so
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
                    _log.info("store available: url=%s", self.store.url)
                found = self.store.watch(known.version, _LONG_POLL_S)
                if found is not None and not self._stopped:
                    self.on_cluster(found)
                elif self.puts_back and not self._stopped and self.store.get() is None:
                    self._put_back(known)
                    _log.warning('cluster restored: url=%s reason="the config server lost it"', self.store.url)
            except ConfigServerError as error:
                reachable = reachable and not isinstance(error, StoreUnreachableError)
                if str(error) != trouble and not self._stopped:
                    trouble = str(error)
                    _log.warning('store unavailable: error="%s". The job goes on; changes of the cluster wait', error)
                self.machine.sleep(_RETRY_S)
                continue
            if found is None and self.machine.monotonic() - begin < _RETRY_S:
                self.machine.sleep(_RETRY_S)  # a server that knows no long poll

    def _put_back(self, known: Cluster) -> None:
        """Into a store that has no cluster. One from which it was deleted takes no version a second time; one that has
        lost all it knew does, and the workers needn't go over to another one."""
        try:
            self.store.put(known)
        except StaleVersionError:
            if self.store.get() is not None:
                raise  # the workers have written one meanwhile
            self.store.put(known.following(known.workers))

    def _restore(self, known: Cluster) -> None:
        """The store has the newest cluster again, or a newer one."""
        found = self.store.get()
        if found is None:
            self._put_back(known)
        elif found.version < known.version:
            self.store.delete()  # started again with an older cluster
            self.store.put(known)
        elif found.version == known.version and found != known:
            # Somebody who knew less than the launcher was here first, and has another meaning of this version: that is
            # what he wants, and comes next.
            written = self.store.put(replace(found, version=known.version + 1))
            self.on_cluster(replace(written, writer=found.writer))  # it is his, not the launcher's
