"""Read and write the two keys of the leadership lease in etcd; see `leadership_lease`.

Each transaction involves both keys.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

from ms_kungfu._decoding import decode_object
from ms_kungfu.cluster_store.etcd_members import EtcdMembers, encoded, number
from ms_kungfu.cluster_store.exchange import MAX_ANSWER_BYTES
from ms_kungfu.cluster_store.leadership_lease import LeadershipState
from ms_kungfu.errors import ConfigServerError

HOLDER = "holder"  # the last part of the holder key's name


class EtcdLeadershipKeys(EtcdMembers):
    """The keys of the leadership lease in etcd; see :class:`LeadershipKeys`."""

    def __init__(self, url: str, timeout_s: float = 10.0) -> None:
        super().__init__(url, timeout_s)
        self._snapshot, self._holder = encoded(self._folder + "head"), encoded(self._folder + HOLDER)

    def look(self) -> LeadershipState:
        return self._state(self._ask("/v3/kv/txn", {"success": self._ranges()}))

    def swap(
        self, seen: LeadershipState, snapshot: Mapping[str, Any], holder: str = "", lease: int = 0
    ) -> tuple[bool, LeadershipState]:
        puts: list[dict[str, Any]] = [
            {"request_put": {"key": self._snapshot, "value": encoded(json.dumps(dict(snapshot)))}}
        ]
        if lease:
            puts.append({"request_put": {"key": self._holder, "value": encoded(holder), "lease": str(lease)}})
        answer = self._ask("/v3/kv/txn", {
            "compare": [
                {"key": self._snapshot, "target": "MOD", "result": "EQUAL", "mod_revision": str(seen.revision)},
                {"key": self._holder, "target": "CREATE", "result": "EQUAL", "create_revision": str(seen.since)},
            ],
            "success": [*puts, *self._ranges()],
            "failure": self._ranges(),
        })  # fmt: skip
        return bool(answer.get("succeeded")), self._state(answer)

    def grant(self, seconds: float) -> tuple[int, float]:
        answer = self._ask("/v3/lease/grant", {"TTL": str(math.ceil(seconds))})
        return number(answer, "ID"), float(number(answer, "TTL"))

    def renew(self, lease: int) -> bool:
        return number(self._ask("/v3/lease/keepalive", {"ID": str(lease)}).get("result"), "TTL") > 0

    def revoke(self, lease: int) -> None:
        self._ask("/v3/lease/revoke", {"ID": str(lease)})

    def _ranges(self) -> list[dict[str, Any]]:
        return [{"request_range": {"key": key}} for key in (self._snapshot, self._holder)]

    def _state(self, answer: Mapping[str, Any]) -> LeadershipState:
        try:
            found = [each["response_range"].get("kvs") for each in answer["responses"] if "response_range" in each]
            snapshot, holder = (None if not kvs else kvs[0] for kvs in found)
            return LeadershipState(
                None if snapshot is None else _snapshot_in(base64.b64decode(snapshot["value"])),
                number(snapshot, "mod_revision"),
                "" if holder is None else base64.b64decode(holder["value"]).decode(),
                number(holder, "create_revision"),
            )
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ConfigServerError(
                f"{self.url}: the keys below {self._folder} contain no leadership lease of ms_kungfu "
                f"({error}); use another job name in the URL, or delete the keys"
            ) from None


def _snapshot_in(text: bytes) -> dict[str, Any]:
    """Return the leader snapshot in `text`. Paths in the snapshot may contain bytes that aren't UTF-8."""
    return decode_object(text, MAX_ANSWER_BYTES, raw_bytes=True)
