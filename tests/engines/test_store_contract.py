"""One contract for every cluster store: seeded schedules of writers, readers and watchers, while connections are cut,
members are restarted and history is compacted."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import StaleVersionError, StoreUnreachableError, open_store
from ms_kungfu.cluster_store.store import ConfigStore
from ms_kungfu.config_server.server import ConfigServer
from tests.engines.relay import Relay
from tests.ports import free_ports

pytestmark = pytest.mark.timeout(300 if "KUNGFU_STORE_SCHEDULES" not in os.environ else 0)
SECRET = "5ec7e7"
SCHEDULES = int(os.environ.get("KUNGFU_STORE_SCHEDULES", 4))  # more: python -m tests.campaigns stores
SEED = int(os.environ.get("KUNGFU_STORE_SEED", 1))
_LIMIT_S = 60.0


class OverHttp:
    """A config server in this process. One that is restarted has its store: what a job does with one that has
    forgotten is the launcher's affair."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._port = free_ports(1)[0]
        self._relay = Relay(self._port)

    def begin(self, job):
        self._store = ConfigStore()
        self._start()
        return f"http://127.0.0.1:{self._relay.port}/config"

    def end(self):
        self._stop()

    def _start(self):
        self._server = ConfigServer(self._store, SECRET, port=self._port)
        asyncio.run_coroutine_threadsafe(self._server.start(), self._loop).result(10)

    def _stop(self):
        asyncio.run_coroutine_threadsafe(self._server.stop(), self._loop).result(10)

    def cut(self, rng):
        self._relay.cut()

    def restart(self, rng):
        self._stop()
        time.sleep(rng.uniform(0, 0.1))
        self._start()

    def compact(self, rng):
        """It keeps no history."""

    def check_history(self, job, known):
        pass

    def close(self):
        self._relay.close()
        self._loop.call_soon_threadsafe(self._loop.stop)


class OverEtcd:
    """Three members, each behind a relay."""

    def __init__(self, etcd) -> None:
        self._etcd = etcd
        self._relays = [Relay(port) for port in etcd.ports]
        self._compacted = False

    def begin(self, job):
        self._compacted = False
        return f"etcd://{','.join(f'127.0.0.1:{relay.port}' for relay in self._relays)}/{job}"

    def end(self):
        pass

    def cut(self, rng):
        rng.choice(self._relays).cut()

    def restart(self, rng):
        member = rng.randrange(3)
        if rng.random() < 0.5:  # it is slow, rather
            self._etcd.signal(member, signal.SIGSTOP)
            time.sleep(rng.uniform(0.2, 1.5))
            self._etcd.signal(member, signal.SIGCONT)
            return
        self._etcd.kill(member)
        time.sleep(rng.uniform(0, 0.3))
        self._etcd.start(member)
        self._etcd.wait_until_ready()

    def compact(self, rng):
        self._compacted = True
        self._etcd.compact()

    def check_history(self, job, known):
        """etcd's own revisions are one history of versions, without a gap or a fork, and every watcher got it."""
        history = self._etcd.history(job)
        first = history[0]["nth"]
        assert [each["nth"] for each in history] == list(range(first, first + len(history)))
        assert first == 1 or self._compacted
        version = -1 if first == 1 else history[0]["Version"] - (history[0]["Cluster"] is not None)
        for each in history:
            version += each["Cluster"] is not None
            assert each["Version"] == version
            if each["Cluster"] is not None and version in known:
                assert known[version] == (each["Writer"], each["Cluster"]["Workers"])
        assert version == max(known)

    def close(self):
        for relay in self._relays:
            relay.close()


@pytest.fixture(scope="module")
def over_http():
    keeper = OverHttp()
    yield keeper
    keeper.close()


@pytest.fixture(scope="module")
def over_etcd(etcd):
    keeper = OverEtcd(etcd)
    yield keeper
    keeper.close()


def cluster(version):
    return Cluster((PeerID("127.0.0.1", 10000),), (), version)


class Trial:
    """What all writers, readers and watchers of one schedule have seen, and whether that can be."""

    def __init__(self, url: str, rng: random.Random) -> None:
        self.url, self.rng = url, rng
        self.lock = threading.Lock()
        self.known: dict[int, tuple[str, list[str]]] = {}  # version -> what it means, by a client that has seen it
        self.acknowledged: list[int] = []
        self.stale: list[tuple[int, tuple[str, list[str]]]] = []  # writes that were refused, and what they meant
        self.newest = -1  # that any client has been notified of
        self.deletes = 0  # that were begun
        self.trouble: list[BaseException] = []
        self.over = threading.Event()  # the writers have written all, and no disturbance comes any more
        self.last: int | None = None  # the version that is the last one

    def seen(self, cluster: Cluster, at_least: int) -> None:
        """Some call that began when `at_least` was the newest has told of `cluster`."""
        meaning = (cluster.writer, [str(worker) for worker in cluster.workers])
        with self.lock:
            assert cluster.version >= at_least, f"version {cluster.version} after {at_least}"
            assert self.known.setdefault(cluster.version, meaning) == meaning
            self.newest = max(self.newest, cluster.version)

    def start(self, role, *arguments) -> threading.Thread:
        def run() -> None:
            try:
                role(*arguments)
            except BaseException as error:
                self.trouble.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def write(self, name: str, seed: int, count: int) -> None:
        """Adds `count` versions, and now and then forgets the cluster."""
        rng = random.Random(seed)
        store = open_store(self.url, SECRET, name, timeout_s=6.0)
        done = 0
        last = -1
        while done < count and not self.over.is_set():
            with self.lock:
                at_least, deletes = self.newest, self.deletes
            try:
                held = store.get()
                if held is not None:
                    self.seen(held, at_least)
                    last = max(last, held.version)
                elif self.deletes == deletes == 0:
                    assert at_least == -1, "the cluster is gone, and nobody has deleted it"
                # Where it was forgotten the version counts on, and no answer says from where.
                version = (held.version if held is not None else max(last, self.newest)) + 1
                workers = (PeerID(name, 1 + rng.randrange(60000)),)
                wanted = Cluster(workers, (), version)
                if version > 0 and rng.random() < 0.1:
                    with pytest.raises(StaleVersionError):
                        store.put(Cluster(workers, (), version - 1))
                written = store.put(wanted)
                assert (written.version, written.workers, written.writer) == (version, workers, name)
                with self.lock:
                    assert version not in self.acknowledged
                    self.acknowledged.append(version)
                self.seen(written, -1)
                done += 1
                if rng.random() < 0.05:
                    with self.lock:
                        self.deletes += 1
                    store.delete()
            except StaleVersionError:
                last = max(last, version) if held is None else last
                with self.lock:
                    self.stale.append((version, (name, [str(worker) for worker in workers])))
            except StoreUnreachableError:
                time.sleep(0.02)

    def watch(self, seed: int) -> None:
        rng = random.Random(seed)
        store = open_store(self.url, timeout_s=6.0)
        version = -1
        while self.last is None or version < self.last:
            try:
                found = store.watch(version, rng.choice((0.05, 0.5, 2.0)))
            except StoreUnreachableError:
                time.sleep(0.02)
                continue
            if found is not None:
                assert found.version > version
                self.seen(found, version)
                version = found.version

    def disturb(self, keeper, rng: random.Random) -> None:
        while not self.over.wait(rng.uniform(0.01, 0.15)):
            draw = rng.random()
            if draw < 0.75:
                keeper.cut(rng)
            elif draw < 0.97:
                keeper.compact(rng)
            else:
                keeper.restart(rng)


def play(keeper, job: str, seed: int) -> None:
    rng = random.Random(seed)
    trial = Trial(keeper.begin(job), rng)
    try:
        watchers = [trial.start(trial.watch, rng.random()) for _ in range(rng.randint(1, 2))]
        writers = [
            trial.start(trial.write, f"w{number}", rng.random(), rng.randint(2, 8))
            for number in range(rng.randint(2, 4))
        ]
        faults = trial.start(trial.disturb, keeper, random.Random(rng.random()))
        deadline = time.monotonic() + _LIMIT_S
        for thread in writers:
            thread.join(max(0.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in writers), "nothing moves"
        trial.over.set()
        faults.join(_LIMIT_S)
        # The last writer leaves a cluster, so that each watcher comes to an end.
        store = open_store(trial.url, SECRET, "last", timeout_s=20.0)
        while True:
            with contextlib.suppress(StaleVersionError, StoreUnreachableError):
                held = store.get()
                version = (trial.newest if held is None else held.version) + 1
                trial.seen(store.put(Cluster((PeerID("last", 1),), (), version)), -1)
                trial.last = version
                break
            assert time.monotonic() < deadline, "the last version can't be written"
        for thread in watchers:
            thread.join(max(1.0, deadline - time.monotonic()))
        assert not any(thread.is_alive() for thread in watchers), "a watcher has missed the last version"
        if trial.trouble:
            raise trial.trouble[0]
        # A write whose answer was lost may count; those that are known of have no gap between them.
        assert sorted(trial.acknowledged) == sorted(set(trial.acknowledged))
        assert not any(trial.known.get(version) == meaning for version, meaning in trial.stale), "refused, and written"
        keeper.check_history(job, trial.known)
    finally:
        trial.over.set()
        trial.last = -1 if trial.last is None else trial.last
        keeper.end()


@pytest.fixture(params=["http", "etcd"])
def keeper(request):
    return request.getfixturevalue(f"over_{request.param}")


@pytest.mark.parametrize("is_cut", [False, True])
def test_a_watch_tells_at_once_also_where_its_connection_was_lost(keeper, is_cut):
    url = keeper.begin(f"watched{is_cut}")
    try:
        store = open_store(url, SECRET)
        store.put(cluster(0))
        found = []
        trial = Trial(url, random.Random(0))
        waiting = trial.start(lambda: found.append((open_store(url).watch(0, 30.0), time.monotonic())))
        time.sleep(0.5)
        for _ in range(20 if is_cut else 0):
            keeper.cut(random)
        time.sleep(0.5)
        begun = time.monotonic()
        open_store(url, SECRET).put(cluster(1))
        waiting.join(20)
        if is_cut and url.startswith("http"):  # there it is the caller's to begin again
            assert isinstance(trial.trouble[0], StoreUnreachableError)
        else:
            assert found[0][0].version == 1
            assert found[0][1] - begun < 10.0  # of the 30 s of the watch
    finally:
        keeper.end()


def test_schedules_of_a_few_writers(keeper):
    for seed in range(SEED, SEED + SCHEDULES):
        print(f"seed {seed}")  # shown if it fails
        play(keeper, f"schedule{seed}", seed)
