"""The config server: the real store, which may go away, and the way to it, which takes time."""

from __future__ import annotations

from ms_kungfu.cluster_store import StaleVersionError, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from tests.fault.simulator.clock import Condition


class Server:
    """The real store, in the launcher or in a process of its own that may go away."""

    def __init__(self, world):
        self._world = world
        self.store = None
        self.first = None  # what was written first
        self.away = 0
        self.changed = Condition(world)
        self._on_change = None
        self.url = "http://server/config"

    def embed(self, store, on_change):
        self.store, self._on_change = store, on_change
        return self

    async def start(self):
        pass

    async def stop(self):
        self.away += 1

    def put(self, document, writer=""):
        cluster = self.store.put(document, writer)
        self.first = self.first or cluster
        self.changed.notify_all()
        if self._on_change is not None:
            self._on_change(cluster)
        return cluster

    def go_away(self, comes_back_with=None):
        """`comes_back_with`: the store that it has then, if not the one it had."""
        self.away += 1
        self.store = comes_back_with or self.store
        self.changed.notify_all()

    def come_back(self):
        self.away -= 1


class Store:
    """A `ClusterStore`: a request takes time on its way there and back, and the answer may be lost."""

    needs_secret = True
    servers = ("server",)

    def __init__(self, world, writer=""):
        self._world, self._writer = world, writer
        self.url = "http://server/config"

    def _request(self, act):
        world, server = self._world, self._world.server
        world.place("asks the config server", takes_time=True)
        self._reach()
        try:
            result = act(server)
        except StaleVersionError as error:
            result = error
        except ValueError as error:
            result = ConfigServerError(str(error))
        world.place("is answered by the config server")
        self._reach()
        if isinstance(result, Exception):
            raise result
        return result

    def _reach(self):
        if self._world.server.away:
            raise StoreUnreachableError("config server http://server/config: Connection refused")

    def get(self):
        return self._request(lambda server: server.store.cluster)

    def put(self, cluster):
        return self._request(lambda server: server.put(cluster.to_json(), cluster.writer or self._writer))

    def delete(self):
        self._request(lambda server: server.store.clear())

    def watch(self, version, timeout_s):
        world, server = self._world, self._world.server
        deadline = world.loop.now + timeout_s
        world.place("polls", takes_time=True)
        while True:
            self._reach()
            found = server.store.cluster
            if found is not None and found.version > version:
                world.place("is answered by the config server")
                self._reach()
                return found
            if world.loop.now >= deadline:
                return None
            server.changed.wait(deadline - world.loop.now)
