"""The config server: the real store, which may go away, and the way to it, which takes time."""

from __future__ import annotations

import json
from dataclasses import replace

from ms_kungfu.cluster_store import LeadershipLostError, LeadershipState, StoreFullError, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError
from tests.fault.simulator.clock import Condition


class LeadershipLog:
    """The lease's two keys, as etcd keeps them: one revision for all, and a lease without a renewal takes the holder
    away."""

    def __init__(self, world):
        self._world = world
        self.now = LeadershipState()
        self.history = []  # records
        self._revision = 100
        self._leases = {}  # -> (length, until)
        self._hangs_on = 0

    def look(self):
        if self.now.holder and self._leases[self._hangs_on][1] <= self._world.loop.now:
            self.now = replace(self.now, holder="", since=0)
        return self.now

    def swap(self, seen, snapshot, holder, lease):
        now = self.look()
        self._has_room()
        if (now.revision, now.since) != (seen.revision, seen.since) or (lease and not self.renew(lease)):
            return False, now
        self._revision += 1
        self.now = replace(now, snapshot=json.loads(json.dumps(snapshot)), revision=self._revision)
        self.history.append(self.now.snapshot)
        if lease:
            self.now, self._hangs_on = replace(self.now, holder=holder, since=self._revision), lease
        return True, self.now

    def grant(self, seconds):
        self._has_room()
        lease = len(self._leases) + 1
        self._leases[lease] = seconds, self._world.loop.now + seconds
        return lease, seconds

    def renew(self, lease):
        seconds, until = self._leases[lease]
        if until <= self._world.loop.now:
            return False
        self._leases[lease] = seconds, self._world.loop.now + seconds
        return True

    def revoke(self, lease):
        self._leases[lease] = 0.0, 0.0

    def _has_room(self):
        """As etcd has it, whose leases need room, too."""
        if self._world.server.full:
            raise StoreFullError("its database is full")


class LeadershipKeys:
    """`LeadershipKeys`, which takes time; an answer may be lost."""

    def __init__(self, world):
        self._store = Store(world)

    def look(self):
        return self._ask(lambda log: log.look())

    def swap(self, seen, snapshot, holder="", lease=0):
        return self._ask(lambda log: log.swap(seen, snapshot, holder, lease))

    def grant(self, seconds):
        return self._ask(lambda log: log.grant(seconds))

    def renew(self, lease):
        return self._ask(lambda log: log.renew(lease))

    def revoke(self, lease):
        return self._ask(lambda log: log.revoke(lease))

    def _ask(self, act):
        return self._store.request(lambda server: act(server.leadership))


class Server:
    """The real store, in the launcher or in a process of its own that may go away."""

    def __init__(self, world):
        self._world = world
        self.store = None
        self.leadership = LeadershipLog(world)
        self.first = None  # what was written first
        self.away = 0
        self.full = 0
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

    def delete(self):
        """As a DELETE does."""
        self.store.clear()
        self.changed.notify_all()
        if self._on_change is not None:
            self._on_change(None)

    def go_away(self, comes_back_with=None):
        """`comes_back_with`: the store that it has then, if not the one it had."""
        self.away += 1
        self.store = comes_back_with or self.store
        self.changed.notify_all()

    def come_back(self):
        self.away -= 1

    def fill(self, seconds):
        self.full += 1
        self._world.loop.at(seconds, self._make_room)

    def _make_room(self):
        self.full -= 1


class Store:
    """A `ClusterStore`: a request takes time on its way there and back, and the answer may be lost."""

    needs_secret = True
    servers = ("server",)

    def __init__(self, world, writer=""):
        self._world, self._writer = world, writer
        self.led_since = None
        self.url = "http://server/config"

    def request(self, act):
        world, server = self._world, self._world.server
        world.place("asks the config server", takes_time=True)
        self._reach()
        try:
            result = act(server)
        except ConfigServerError as error:
            result = error
        except ValueError as error:
            result = ConfigServerError(str(error))
        world.place("is answered by the config server")
        self._reach()
        if isinstance(result, Exception):
            raise result
        return result

    def _reach(self):
        if not self._world.reaches_server(self._world.current.process):
            raise StoreUnreachableError("config server http://server/config: Connection refused")

    def get(self):
        return self.request(lambda server: server.store.cluster)

    def put(self, cluster):
        return self.request(lambda server: self._put(server, cluster))

    def _put(self, server, cluster):
        if server.full:
            raise StoreFullError("its database is full")
        if self.led_since is not None and self.led_since() != server.leadership.look().since:
            raise LeadershipLostError("another host decides for the job")
        return server.put(cluster.to_json(), cluster.writer or self._writer)

    def delete(self):
        self.request(lambda server: server.delete())

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
