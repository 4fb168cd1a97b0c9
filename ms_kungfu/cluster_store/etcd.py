"""The cluster store in etcd (3.4 or newer), by the JSON gateway of its v3 API.

One key holds all: the last version, who has written it, and its cluster, which is null where it was forgotten. So the
history that etcd keeps of this key is the history of versions, in the one order in which all members apply it. Each
write is a transaction that compares the key's revision with the one that was read: nobody writes over what he hasn't
seen, and of two who have read the same one wins.

A write whose answer is lost is done again at the next member, by the same comparison. At most one of the two is
applied, whichever comes first, and the other fails. Each carries a word of its own, by which a writer whose second try
has failed sees that it was his first one which is kept.

Reads are linearizable (etcd's default): what a member answers that is slow, or cut off from the others, is never older
than what anybody was told before; it asks the leader, or says that there is none and the next member is asked.

A watch begins behind the revision of a read, so nothing comes between the two. It only tells that there is something to
read: where it is lost (its member ends or has no leader any more, or history was compacted behind which it was to
begin) the read is what counts, too. One that is lost without a word ends with the time that its caller gives it.

Whoever may write is etcd's affair (its users and roles, its certificates), as etcdctl is told of them.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import secrets
import ssl
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ms_kungfu import env
from ms_kungfu.cluster import Cluster, parse_json
from ms_kungfu.cluster_store.exchange import FAILURES, TooLongError, begin, exchange
from ms_kungfu.cluster_store.store import StaleVersionError, StoreUnreachableError, next_cluster
from ms_kungfu.errors import ConfigServerError

_PORT = 2379
_PAUSE_S = 0.2
_AWAY = (4, 8, 10, 14)  # gRPC's codes for what may be well at another member, or later
_OK, _DENIED, _NOT_SO, _STRANGER = 0, 7, 9, 16
_FULL = "database space exceeded"
_EXAMPLE = "etcd://10.0.0.1:2379,10.0.0.2:2379/job"


class _AwayError(Exception):
    """This member can't say; another one may."""


@dataclass(frozen=True)
class _Held:
    """What the key has: `revision` is the key's, 0 where there is none; `seen` the revision of all of etcd."""

    revision: int
    seen: int
    version: int = -1
    cluster: Cluster | None = None
    mark: str = ""  # of the write


class EtcdClusterStore:
    """See :class:`ClusterStore`. Each call opens its own connection, to the member that has answered last."""

    needs_secret = False

    def __init__(self, url: str, secret: str | None, writer: str, timeout_s: float) -> None:
        """`secret` isn't needed. ValueError where the URL, or what etcdctl is told, makes no sense."""
        self.url = url
        self._members, job = _parsed(url)
        self._key = f"/ms_kungfu/{job}/cluster"
        self._writer = writer
        self._timeout_s = timeout_s
        self._tls = _tls_of(os.environ) if url.startswith("etcds:") else None
        self._user, self._password = _user_of(os.environ)
        self._token = ""
        self._turn = 0  # of the members

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(host for host, _ in self._members)

    # ---- what a store does ----

    def get(self) -> Cluster | None:
        return self._read().cluster

    def watch(self, version: int, timeout_s: float) -> Cluster | None:
        deadline = time.monotonic() + timeout_s
        while True:
            held = self._read()
            if held.cluster is not None and held.version > version:
                return held.cluster
            begun = time.monotonic()
            if begun >= deadline:
                return None
            if not self._waits_for_news(held.seen + 1, deadline - begun):
                time.sleep(max(0.0, min(_PAUSE_S, deadline - time.monotonic())))

    def put(self, cluster: Cluster) -> Cluster:
        writer = cluster.writer or self._writer
        held = self._read()
        cluster = next_cluster(cluster.to_json(), writer, held.cluster, held.version)
        kept = self._replace(held, cluster.version, cluster, writer)
        if kept is not None:
            raise StaleVersionError(f"{self.url}: version {kept.version} was written before version {cluster.version}")
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
        answer = self._ask("/v3/kv/range", {"key": _encoded(self._key)})
        return self._held(answer, _number(answer.get("header"), "revision"))

    def _held(self, answer: Mapping[str, Any], seen: int) -> _Held:
        """Of what a range tells."""
        if not answer.get("kvs"):
            return _Held(0, seen)
        try:
            found = answer["kvs"][0]
            document: Any = parse_json(base64.b64decode(found["value"]))
            version, writer, mark = document["Version"], document["Writer"], document["Mark"]
            cluster = document["Cluster"]
            if cluster is not None:
                cluster = Cluster.from_json(cluster, writer=writer)
            if type(version) is not int or (cluster is not None and cluster.version != version):
                raise ValueError(f"it has no version, but {version!r}")
            return _Held(_number(found, "mod_revision"), seen, version, cluster, mark)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigServerError(
                f"{self.url}: the key {self._key} holds no cluster of ms_kungfu's ({error!r}); give another name than "
                "the job's, or delete the key"
            ) from None

    def _replace(self, held: _Held, version: int, cluster: Cluster | None, writer: str) -> _Held | None:
        """Writes in the place of what is `held`. Where somebody else was faster: what there is instead."""
        key, mark, turn = _encoded(self._key), secrets.token_hex(8), self._turn
        document = {
            "Version": version,
            "Writer": writer,
            "Mark": mark,
            "Cluster": None if cluster is None else cluster.to_json(),
        }
        answer = self._ask(
            "/v3/kv/txn",
            {
                "compare": [{"key": key, "target": "MOD", "result": "EQUAL", "mod_revision": str(held.revision)}],
                "success": [{"request_put": {"key": key, "value": _encoded(json.dumps(document))}}],
                "failure": [{"request_range": {"key": key}}],
            },
        )
        if answer.get("succeeded"):
            return None
        try:
            instead = answer["responses"][0]["response_range"]
        except (KeyError, IndexError, TypeError):
            raise ConfigServerError(f"{self.url} doesn't answer as etcd's v3 API does: {answer!r:.200}") from None
        kept = self._held(instead, _number(answer.get("header"), "revision"))
        if kept.mark == mark:
            return None
        if self._turn != turn:  # the member before may have written it, and somebody else over it
            raise StoreUnreachableError(f"config server {self.url}: what became of a write isn't known")
        return kept

    # ---- the members ----

    def _ask(self, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """What the first member says that can."""
        deadline = time.monotonic() + self._timeout_s
        trouble = ""
        for left in range(len(self._members), 0, -1):
            turn = self._turn
            try:
                # Who is asked first leaves the others some of the time.
                return self._ask_member(turn, path, message, (deadline - time.monotonic()) / left)
            except _AwayError as error:
                trouble = str(error)
                self._turn = turn + 1
        raise StoreUnreachableError(f"config server {self.url}: {trouble}")

    def _ask_member(self, turn: int, path: str, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        if self._user and not self._token:
            self._log_in(turn, timeout_s)
        code, answer = self._say(turn, path, message, deadline - time.monotonic())
        # A token lasts for some minutes, and not over a restart.
        if code == _STRANGER and self._user:
            self._log_in(turn, deadline - time.monotonic())
            code, answer = self._say(turn, path, message, deadline - time.monotonic())
        if code != _OK:
            raise ConfigServerError(f"config server {self.url}: {self._refusal(code, str(answer.get('error')))}")
        return answer

    def _log_in(self, turn: int, timeout_s: float) -> None:
        self._token = ""
        message = {"name": self._user, "password": self._password}
        code, answer = self._say(turn, "/v3/auth/authenticate", message, timeout_s)
        text = str(answer.get("error"))
        if code == _NOT_SO and "not enabled" in text:  # then everybody may do all
            return
        if code != _OK:
            raise ConfigServerError(f"config server {self.url}: {self._refusal(code, text)}")
        self._token = str(answer.get("token", ""))

    def _refusal(self, code: int, text: str) -> str:
        """etcd's own words, with a remedy."""
        if "authentication failed" in text:
            return f"it doesn't know user {self._user!r} with this password; correct ETCDCTL_USER=NAME:PASSWORD"
        if "user name is empty" in text or (code == _STRANGER and not self._user):
            return "it wants a user and his password; set ETCDCTL_USER=NAME:PASSWORD, as etcdctl has it"
        if code == _DENIED:
            return (
                f"user {self._user!r} may not read and write {self._key}; grant it to a role of his: etcdctl role "
                f"grant-permission ROLE readwrite {self._key}"
            )
        if _FULL in text:
            return "its database is full; make room by etcdctl compact and defrag, then etcdctl alarm disarm"
        return text

    def _say(self, turn: int, path: str, message: Mapping[str, Any], timeout_s: float) -> tuple[int, dict[str, Any]]:
        """gRPC's code and what the member answers. _AwayError where that is nothing to build on."""
        connection, name = self._connection(turn)
        try:
            response, body = exchange(
                connection, "POST", path, json.dumps(message).encode(), self._headers(), max(0.01, timeout_s)
            )
        except FAILURES as error:
            raise _AwayError(f"{name}: {_reason(error)}") from None
        except TooLongError as error:
            raise ConfigServerError(f"{self.url}: {name} {error}") from None
        return _outcome(name, response.status, body)

    def _connection(self, turn: int) -> tuple[http.client.HTTPConnection, str]:
        host, port = self._members[turn % len(self._members)]
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self._tls is None:
            return http.client.HTTPConnection(host, port), name
        return http.client.HTTPSConnection(host, port, context=self._tls), name

    def _headers(self) -> dict[str, str]:
        # A member that is cut off from the others says so then, instead of waiting with us.
        headers = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
        return {**headers, "Authorization": self._token} if self._token else headers

    # ---- watching ----

    def _waits_for_news(self, revision: int, timeout_s: float) -> bool:
        """Until the key has changed since before `revision`, or the time is over. False where that can't be told: the
        watch is lost."""
        turn = self._turn
        connection, _ = self._connection(turn)
        wanted = {"create_request": {"key": _encoded(self._key), "start_revision": str(revision)}}
        deadline = time.monotonic() + timeout_s
        try:
            _, pieces = begin(connection, "POST", "/v3/watch", json.dumps(wanted).encode(), self._headers(), timeout_s)
            for news in _lines(pieces):
                result = news.get("result")
                if not isinstance(result, dict) or result.get("canceled"):
                    break
                if result.get("events"):
                    return True
        except (*FAILURES, ValueError):
            if time.monotonic() >= deadline:
                return True
        finally:
            connection.close()
        self._turn = turn + 1
        return False


def _parsed(url: str) -> tuple[tuple[tuple[str, int], ...], str]:
    """The members' hosts and ports, and the job's name."""
    parts = urlsplit(url)
    job = parts.path.strip("/")
    if "@" in parts.netloc:
        raise ValueError("a config server's URL is seen by everybody; give etcd's user by ETCDCTL_USER=NAME:PASSWORD")
    if re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", job) is None or parts.query or parts.fragment:
        raise ValueError(f"{url!r} names no job; write it like {_EXAMPLE}")
    members = []
    for member in parts.netloc.split(","):
        found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?", member)
        port = int(found[3] or _PORT) if found else 0
        if found is None or not 0 < port < 65536:
            raise ValueError(f"{url!r}: {member!r} is not host:port of a member of etcd; write it like {_EXAMPLE}")
        members.append((found[1] or found[2], port))
    return tuple(members), job


def _user_of(environ: Mapping[str, str]) -> tuple[str, str]:
    """By etcdctl's rule: the password stands behind the name, or in a variable of its own."""
    name, password = env.ETCD_USER.get(environ) or "", env.ETCD_PASSWORD.get(environ)
    if password is None and name:
        name, _, password = name.partition(":")
    if bool(name) != bool(password):
        raise ValueError("ETCDCTL_USER names etcd's user as NAME:PASSWORD, or NAME beside ETCDCTL_PASSWORD")
    return name, password or ""


def _tls_of(environ: Mapping[str, str]) -> ssl.SSLContext:
    authority, certificate, key = (
        env.ETCD_CACERT.get(environ), env.ETCD_CERT.get(environ), env.ETCD_KEY.get(environ),
    )  # fmt: skip
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ValueError(f"ETCDCTL_CACERT={authority} has no certificates: {_reason(error)}") from None
    if (certificate is None) != (key is None):
        raise ValueError("ETCDCTL_CERT and ETCDCTL_KEY are a pair; give both, or none")
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:
            raise ValueError(
                f"ETCDCTL_CERT={certificate} and ETCDCTL_KEY={key} are no pair: {_reason(error)}"
            ) from None
    return context


def _lines(pieces: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The messages of a stream: a JSON object a line."""
    left = b""
    for piece in pieces:
        *whole, left = (left + piece).split(b"\n")
        for line in whole:
            message = json.loads(line) if line.strip() else {}
            if not isinstance(message, dict):
                raise ValueError("it is no object")
            if message:
                yield message


def _outcome(name: str, status: int, body: bytes) -> tuple[int, dict[str, Any]]:
    try:
        answer = json.loads(body)
        if not isinstance(answer, dict):
            raise ValueError("it is no object")
    except ValueError:
        if status >= 500:
            raise _AwayError(f"{name}: {status} {_text(body)}") from None
        raise _no_etcd(name, status, body) from None
    if status == 200:
        return _OK, answer
    code, text = answer.get("code"), str(answer.get("error") or answer.get("message") or "")
    if type(code) is not int:
        raise _no_etcd(name, status, body)
    if code in _AWAY and _FULL not in text:
        raise _AwayError(f"{name}: {text}")
    return code, {"error": text}


def _no_etcd(name: str, status: int, body: bytes) -> ConfigServerError:
    return ConfigServerError(
        f"{name} doesn't answer as etcd's v3 API does, but {status} {_text(body)}; is it the address for clients of an "
        "etcd of 3.4 or newer?"
    )


def _text(body: bytes) -> str:
    return " ".join(body[:200].decode("utf-8", "replace").split())


def _reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate isn't trusted ({error.verify_message}); ETCDCTL_CACERT names the file of its authority"
    if isinstance(error, OSError) and error.errno and error.errno > 0 and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def _encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _number(fields: Any, name: str) -> int:
    """The gateway writes numbers of 64 bits as text, and leaves out those that are 0."""
    try:
        return int((fields or {}).get(name, 0))
    except (AttributeError, TypeError, ValueError):
        raise ConfigServerError(f"an etcd tells no {name}: {fields!r:.200}") from None
