"""Send requests to the members of an etcd cluster, through the JSON gateway of etcd's v3 API.

The client asks one member after another until a member answers. The credentials come from etcdctl's environment
variables. The time limit of a request applies to all members together. If a member can't answer because it is
unreachable or has no leader, the client spends only a part of the time limit on this member.
"""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from ms_kungfu import env
from ms_kungfu._decoding import MalformedError, decode_object
from ms_kungfu._run_time import run_time
from ms_kungfu._words import printable
from ms_kungfu.cluster_store.exchange import FAILURES, MAX_ANSWER_BYTES, TooLongError, exchange, speaks_tls
from ms_kungfu.cluster_store.store import StoreFullError, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError

_PORT = 2379
_AWAY = (4, 8, 10, 14)  # gRPC codes of errors after which another member, or a later attempt, may succeed
_OK, _DENIED, _NOT_SO, _STRANGER = 0, 7, 9, 16
_FULL = "database space exceeded"
_EXAMPLE = "etcd://10.0.0.1:2379,10.0.0.2:2379/job"


class _AwayError(Exception):
    """An etcd member can't answer, but another member might."""


class EtcdMembers:
    """The members of an etcd cluster.

    Each call opens its own connection, and begins with the member that answered the previous call.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Raise ValueError if the URL, or an environment variable of etcdctl, is invalid."""
        self.url = url
        self._members, job = _parsed(url)
        self._folder = f"/ms_kungfu/{job}/"
        self._timeout_s = timeout_s
        self._tls = _tls_of(os.environ) if url.startswith("etcds:") else None
        self._user, self._password = _user_of(os.environ)
        self._token = ""
        self._turn = 0  # index of the member to ask

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(host for host, _ in self._members)

    def _ask(self, path: str, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to one member after another. Return the first response."""
        deadline = run_time() + self._timeout_s
        trouble = ""
        for left in range(len(self._members), 0, -1):
            turn = self._turn
            try:
                # The remaining time is divided among the members that haven't been asked.
                return self._ask_member(turn, path, message, (deadline - run_time()) / left)
            except _AwayError as error:
                trouble = str(error)
                self._turn = turn + 1
        raise StoreUnreachableError(f"config server {self.url}: {trouble}")

    def _ask_member(self, turn: int, path: str, message: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        deadline = run_time() + timeout_s
        if self._user and not self._token:
            self._log_in(turn, timeout_s)
        code, answer = self._say(turn, path, message, deadline - run_time())
        # A token is valid for only a few minutes, and becomes invalid when etcd restarts.
        if code == _STRANGER and self._user:
            self._log_in(turn, deadline - run_time())
            code, answer = self._say(turn, path, message, deadline - run_time())
        if code != _OK:
            raise self._refused(code, str(answer.get("error")))
        return answer

    def _log_in(self, turn: int, timeout_s: float) -> None:
        self._token = ""
        message = {"name": self._user, "password": self._password}
        code, answer = self._say(turn, "/v3/auth/authenticate", message, timeout_s)
        text = str(answer.get("error"))
        if code == _NOT_SO and "not enabled" in text:  # without authentication, each client has all permissions
            return
        if code != _OK:
            raise self._refused(code, text)
        self._token = str(answer.get("token", ""))

    def _refused(self, code: int, text: str) -> ConfigServerError:
        kind = StoreFullError if _FULL in text else ConfigServerError
        return kind(f"config server {self.url}: {self._refusal(code, text)}")

    def _refusal(self, code: int, text: str) -> str:
        """Return a message with the reason why etcd has rejected a request and, if known, the remedy."""
        if "authentication failed" in text:
            return f"it rejects user {self._user!r} with this password; correct ETCDCTL_USER=NAME:PASSWORD"
        if "user name is empty" in text or (code == _STRANGER and not self._user):
            return "it requires a user and a password; set ETCDCTL_USER=NAME:PASSWORD, as for etcdctl"
        if code == _DENIED:
            return (
                f"user {self._user!r} may not read and write below {self._folder}; grant this permission to one of the "
                f"user's roles: etcdctl role grant-permission ROLE readwrite --prefix=true {self._folder}"
            )
        if _FULL in text:
            return "its database is full; free space with etcdctl compact and defrag, then etcdctl alarm disarm"
        return text

    def _say(self, turn: int, path: str, message: Mapping[str, Any], timeout_s: float) -> tuple[int, dict[str, Any]]:
        """Send a request to one member. Return the gRPC code and the response.

        Raises:
            _AwayError: the member can't answer, but another member might.
        """
        connection, name = self._connection(turn)
        try:
            response, body = exchange(
                connection, "POST", path, json.dumps(message).encode(), self._headers(), max(0.01, timeout_s)
            )
        except FAILURES as error:
            raise _AwayError(f"{name}: {self._remedy(error) or reason(error)}") from None
        except TooLongError as error:
            raise ConfigServerError(f"{self.url}: {name} {error}") from None
        return _outcome(name, response.status, body)

    def _remedy(self, error: Exception) -> str:
        """Return the remedy if only one side of the connection seems to use TLS; "" in all other cases.

        The remedy's wording is conditional, because a killed member also closes the connection.
        """
        if self._tls is not None and speaks_tls(error) is False:
            return "it doesn't answer with TLS; if it doesn't use TLS, write etcd://"
        if self._tls is None and isinstance(error, http.client.RemoteDisconnected):
            return "it closes the connection without an answer; if it uses TLS, write etcds://"
        return ""

    def _connection(self, turn: int) -> tuple[http.client.HTTPConnection, str]:
        host, port = self._members[turn % len(self._members)]
        name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        if self._tls is None:
            return http.client.HTTPConnection(host, port), name
        return http.client.HTTPSConnection(host, port, context=self._tls), name

    def _headers(self) -> dict[str, str]:
        # With the header hasleader, a member that has no leader reports an error instead of waiting.
        headers = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
        return {**headers, "Authorization": self._token} if self._token else headers


def _parsed(url: str) -> tuple[tuple[tuple[str, int], ...], str]:
    """Parse the URL into the hosts and ports of the etcd members, and the job's name."""
    parts = urlsplit(url)
    job = parts.path.strip("/")
    if "@" in parts.netloc:
        raise ValueError(
            "the URL contains a user name, but a config server's URL is public; set ETCDCTL_USER=NAME:PASSWORD instead"
        )
    if re.fullmatch(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*", job) is None or parts.query or parts.fragment:
        raise ValueError(f"{url!r} has no job name; write a URL like {_EXAMPLE}")
    members = []
    for member in parts.netloc.split(","):
        found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{1,5}))?", member)
        port = int(found[3] or _PORT) if found else 0
        if found is None or not 0 < port < 65536:
            raise ValueError(
                f"{url!r}: {member!r} is not the address (host:port) of an etcd member; write a URL like {_EXAMPLE}"
            )
        members.append((found[1] or found[2], port))
    return tuple(members), job


def _user_of(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the user's name and password; both are "" if no user is set.

    As for etcdctl, the password follows the name in ETCDCTL_USER, or is in ETCDCTL_PASSWORD.
    """
    name, password = env.ETCD_USER.get(environ) or "", env.ETCD_PASSWORD.get(environ)
    if password is None and name:
        name, _, password = name.partition(":")
    if bool(name) != bool(password):
        raise ValueError("ETCDCTL_USER must be NAME:PASSWORD, or NAME together with ETCDCTL_PASSWORD")
    return name, password or ""


def _tls_of(environ: Mapping[str, str]) -> ssl.SSLContext:
    authority, certificate, key = (
        env.ETCD_CACERT.get(environ), env.ETCD_CERT.get(environ), env.ETCD_KEY.get(environ),
    )  # fmt: skip
    try:
        context = ssl.create_default_context(cafile=authority)
    except OSError as error:
        raise ValueError(f"ETCDCTL_CACERT={authority} has no certificates: {reason(error)}") from None
    if (certificate is None) != (key is None):
        raise ValueError("only one of ETCDCTL_CERT and ETCDCTL_KEY is set; set both or neither")
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:
            raise ValueError(f"ETCDCTL_CERT={certificate} and ETCDCTL_KEY={key} don't match: {reason(error)}") from None
    return context


def _outcome(name: str, status: int, body: bytes) -> tuple[int, dict[str, Any]]:
    try:
        answer = decode_object(body, MAX_ANSWER_BYTES)
    except MalformedError:
        if status >= 500:
            raise _AwayError(f"{name}: {status} {_text(body)}") from None
        raise _no_etcd(name, status, body) from None
    if status == 200:
        return _OK, answer
    code, text = answer.get("code"), printable(str(answer.get("error") or answer.get("message") or ""))
    if type(code) is not int:
        raise _no_etcd(name, status, body)
    if code in _AWAY and _FULL not in text:
        raise _AwayError(f"{name}: {text}")
    return code, {"error": text}


def _no_etcd(name: str, status: int, body: bytes) -> ConfigServerError:
    return ConfigServerError(
        f"{name} sent an answer that doesn't follow etcd's v3 API: {status} {_text(body)}; is this the client address "
        "of etcd 3.4 or newer?"
    )


def _text(body: bytes) -> str:
    return printable(" ".join(body[:200].decode("utf-8", "replace").split()))


def reason(error: BaseException) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return (
            f"its certificate isn't trusted ({error.verify_message}); set ETCDCTL_CACERT to the certificate of its CA"
        )
    if isinstance(error, OSError) and error.errno and error.errno > 0 and not isinstance(error, ssl.SSLError):
        return os.strerror(error.errno)
    return str(error) or type(error).__name__


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def number(fields: Any, name: str) -> int:
    """Return an integer field of a response.

    The gateway writes 64-bit integers as text, and omits zeros.
    """
    try:
        return int((fields or {}).get(name, 0))
    except (AttributeError, TypeError, ValueError):
        raise ConfigServerError(f"etcd's answer has no {name}: {fields!r:.200}") from None
