"""Access a cluster store in etcd (3.4 or newer), through the JSON gateway of etcd's v3 API.

In this module "member" means an etcd member, and "version" means a cluster version.

1. One key contains everything: the last version number, this version's writer, and this version's cluster, which is
null after a delete. So etcd's history of this key is the history of versions, and all members apply it in the same
order. Each write is a transaction that compares the key's revision with the revision that the client has read. So a
client never overwrites a version that it hasn't read. If two clients have read the same version, only one of their
writes succeeds.

2. If the answer to a write is lost, the client repeats the write at the next member, with the same comparison. At most
one of the two attempts is applied; the other fails. Each write contains a *mark*, a random string that identifies the
write. If the second attempt fails, the mark shows whether the first attempt was applied. (`test_etcd_store.py`.)

3. Reads are linearizable, which is etcd's default: a slow or partitioned member never returns data that is older than
an earlier answer, because the member asks the leader. If there is no leader, the member reports an error, and the
client asks the next member.

4. A watch begins after the revision that the client has read, so no change is missed between the read and the watch. A
watch only notifies the client that the key has changed. So if a watch is lost, the client only needs to read again. A
watch is lost if its member ends or loses the leader, or if etcd has compacted the revision at which the watch begins.
If the client isn't notified of the loss, the watch ends at the caller's time limit.
"""

from __future__ import annotations

import base64
import json
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Callable

from ms_kungfu._decoding import decode_object
from ms_kungfu._run_time import run_time
from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store.etcd_leadership import HOLDER
from ms_kungfu.cluster_store.etcd_members import EtcdMembers, encoded, number
from ms_kungfu.cluster_store.exchange import FAILURES, MAX_ANSWER_BYTES, begin
from ms_kungfu.cluster_store.leadership_lease import LeadershipLostError
from ms_kungfu.cluster_store.store import StaleVersionError, StoreUnreachableError, next_cluster
from ms_kungfu.errors import ConfigServerError

_PAUSE_S = 0.2


@dataclass(frozen=True)
class _Held:
    """The key's contents.

    Args:
        revision: the key's revision; 0 if the key doesn't exist.
        seen: etcd's global revision when the key was read.
        version: the last version number; -1 if the key doesn't exist.
        cluster: the cluster; None if there is none.
        mark: a random string that identifies the write.
    """

    revision: int
    seen: int
    version: int = -1
    cluster: Cluster | None = None
    mark: str = ""


class EtcdClusterStore(EtcdMembers):
    """A cluster store in etcd; see :class:`ClusterStore`.

    `led_since`: for a controller's store, a function that returns the revision at which the controller acquired the
    leadership lease. Each write then compares the lease's revision in etcd with that revision.
    """

    needs_secret = False

    def __init__(self, url: str, secret: str | None, writer: str, timeout_s: float) -> None:
        """Raise ValueError if the URL, or an environment variable of etcdctl, is invalid. `secret` isn't used."""
        super().__init__(url, timeout_s)
        self._key = self._folder + "cluster"
        self._writer = writer
        self.led_since: Callable[[], int] | None = None

    # ---- the store's interface ----

    def get(self) -> Cluster | None:
        return self._read().cluster

    def watch(self, version: int, timeout_s: float) -> Cluster | None:
        deadline = run_time() + timeout_s
        while True:
            held = self._read()
            if held.cluster is not None and held.version > version:
                return held.cluster
            begun = run_time()
            if begun >= deadline:
                return None
            if not self._waits_for_news(held.seen + 1, deadline - begun):
                time.sleep(max(0.0, min(_PAUSE_S, deadline - run_time())))

    def put(self, cluster: Cluster) -> Cluster:
        writer = cluster.writer or self._writer
        held = self._read()
        cluster = next_cluster(cluster.to_json(), writer, held.cluster, held.version)
        kept = self._replace(held, cluster.version, cluster, writer)
        if kept is not None:
            raise StaleVersionError(
                f"{self.url}: another writer has written version {kept.version} before version {cluster.version}"
            )
        return cluster

    def status(self) -> Any:
        return None

    def delete(self) -> None:
        held = self._read()
        while held.cluster is not None:
            kept = self._replace(held, held.version, None, self._writer)
            if kept is None:
                return
            held = kept

    # ---- the key ----

    def _read(self) -> _Held:
        answer = self._ask("/v3/kv/range", {"key": encoded(self._key)})
        return self._held(answer, number(answer.get("header"), "revision"))

    def _held(self, answer: Mapping[str, Any], seen: int) -> _Held:
        """Return the key's contents, which are in the `answer` to a range request."""
        try:
            if not answer.get("kvs"):
                return _Held(0, seen)
            found = answer["kvs"][0]
            document = decode_object(base64.b64decode(found.get("value", "")), MAX_ANSWER_BYTES)
            if missing := [key for key in ("Version", "Writer", "Mark", "Cluster") if key not in document]:
                raise ValueError(f"it has no {missing[0]}")
            version, writer, mark = document["Version"], document["Writer"], document["Mark"]
            cluster = document["Cluster"]
            if not isinstance(writer, str) or not isinstance(mark, str):
                raise ValueError("Writer and Mark must be strings")
            if cluster is not None:
                cluster = Cluster.from_json(cluster, writer=writer)
            if type(version) is not int or (cluster is not None and cluster.version != version):
                raise ValueError(f"its version {version!r} is not a number, or differs from its cluster's version")
            return _Held(number(found, "mod_revision"), seen, version, cluster, mark)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            why = error if isinstance(error, ValueError) else repr(error)
            raise ConfigServerError(
                f"{self.url}: the key {self._key} contains no cluster of ms_kungfu ({why}); use another "
                "job name in the URL, or delete the key"
            ) from None

    def _replace(self, held: _Held, version: int, cluster: Cluster | None, writer: str) -> _Held | None:
        """Replace the key's contents `held`, and return None.

        If another client has changed the key first, replace nothing, and return the key's current contents.
        """
        key, mark, turn = encoded(self._key), secrets.token_hex(8), self._turn
        document = {
            "Version": version,
            "Writer": writer,
            "Mark": mark,
            "Cluster": None if cluster is None else cluster.to_json(),
        }
        compare = [{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(held.revision)}]
        if self.led_since is not None:
            since, holder = str(self.led_since()), encoded(self._folder + HOLDER)
            compare.append({"key": holder, "target": "CREATE", "result": "EQUAL", "create_revision": since})
        answer = self._ask(
            "/v3/kv/txn",
            {
                "compare": compare,
                "success": [{"request_put": {"key": key, "value": encoded(json.dumps(document))}}],
                "failure": [{"request_range": {"key": key}}],
            },
        )
        if answer.get("succeeded"):
            return None
        try:
            instead = answer["responses"][0]["response_range"]
        except (LookupError, TypeError):
            raise ConfigServerError(
                f"{self.url} sent an answer that doesn't follow etcd's v3 API: {answer!r:.200}"
            ) from None
        kept = self._held(instead, number(answer.get("header"), "revision"))
        if kept.mark == mark:
            return None
        if kept.revision == held.revision:
            raise LeadershipLostError(f"{self.url}: another host decides for the job")
        # If the client has tried a second member, the first member may have applied the write, and another client may
        # already have overwritten this version.
        if self._turn != turn:
            raise StoreUnreachableError(f"config server {self.url}: it is unknown whether a write was applied")
        return kept

    # ---- watching ----

    def _waits_for_news(self, revision: int, timeout_s: float) -> bool:
        """Wait until the key has changed at or after `revision`, or until the time limit.

        Return False if the watch is lost.
        """
        turn = self._turn
        connection, _ = self._connection(turn)
        wanted = {"create_request": {"key": encoded(self._key), "start_revision": str(revision)}}
        deadline = run_time() + timeout_s
        try:
            _, pieces = begin(connection, "POST", "/v3/watch", json.dumps(wanted).encode(), self._headers(), timeout_s)
            for news in _lines(pieces):
                result = news.get("result")
                if not isinstance(result, dict) or result.get("canceled"):
                    break
                if result.get("events"):
                    return True
        except (*FAILURES, ValueError):
            if run_time() >= deadline:
                return True
        finally:
            connection.close()
        self._turn = turn + 1
        return False


def _lines(pieces: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the messages in a stream, which contains one JSON object per line."""
    left = b""
    for piece in pieces:
        *whole, left = (left + piece).split(b"\n")
        for line in whole:
            message = decode_object(line, MAX_ANSWER_BYTES) if line.strip() else {}
            if message:
                yield message
        if len(left) > MAX_ANSWER_BYTES:
            raise ValueError(f"a line has over {MAX_ANSWER_BYTES} bytes")
