"""Watches a cluster store that lives elsewhere, also over its death and return."""

from __future__ import annotations

import logging
from typing import Callable

from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import ClusterStore, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.machine import Machine

_log = logging.getLogger(__name__)
_LONG_POLL_S = 20.0
_RETRY_S = 0.2


class StoreWatcher:
    """Calls `on_cluster` from a thread of its own with each newer cluster. `newest` gives the newest one that is known.

    A store that comes back without what it knew (a config server keeps nothing on disk) is given the newest cluster
    again, so that the next change counts on from there.
    """

    def __init__(
        self,
        store: ClusterStore,
        newest: Callable[[], Cluster],
        on_cluster: Callable[[Cluster], None],
        machine: Machine,
    ) -> None:
        self._store = store
        self._newest = newest
        self._on_cluster = on_cluster
        self._machine = machine
        self._stopped = False
        machine.start_thread("kungfu-watch", self._run)

    def stop(self) -> None:
        """Returns at once; a request that is under way ends with the process."""
        self._stopped = True

    def look_now(self) -> None:
        """Somebody knows of a version that has not arrived here: asks without waiting for the long poll."""
        self._machine.start_thread("kungfu-look", self._look)

    def _look(self) -> None:
        try:
            found = self._store.get()
        except ConfigServerError:
            return  # the loop below says so
        if found is not None and found.version > self._newest().version:
            self._on_cluster(found)

    def _run(self) -> None:
        reachable = True
        trouble = ""
        while not self._stopped:
            begin = self._machine.monotonic()
            try:
                known = self._newest()
                if not reachable:
                    self._restore(known)
                    reachable, trouble = True, ""
                    _log.info("the config server %s is back", self._store.url)
                found = self._store.watch(known.version, _LONG_POLL_S)
                if found is not None and not self._stopped:
                    self._on_cluster(found)
            except ConfigServerError as error:
                reachable = reachable and not isinstance(error, StoreUnreachableError)
                if str(error) != trouble and not self._stopped:
                    trouble = str(error)
                    _log.warning("%s; the job goes on, changes of the cluster have to wait", error)
                self._machine.sleep(_RETRY_S)
                continue
            if found is None and self._machine.monotonic() - begin < _RETRY_S:
                self._machine.sleep(_RETRY_S)  # a server that knows no long poll

    def _restore(self, known: Cluster) -> None:
        found = self._store.get()
        if found is not None and found.version >= known.version:
            return
        if found is not None:
            self._store.delete()  # started again with an older cluster
        self._store.put(known)
