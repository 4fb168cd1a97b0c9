"""Access a cluster store in a config server, over HTTP."""

from __future__ import annotations

import http.client
import ssl
from typing import Any
from urllib.parse import urlsplit

from ms_kungfu import env
from ms_kungfu._decoding import MalformedError, decode, decode_object
from ms_kungfu._tls import from_environment
from ms_kungfu._words import printable
from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store.exchange import FAILURES, MAX_ANSWER_BYTES, TooLongError, exchange, speaks_tls
from ms_kungfu.cluster_store.store import StaleVersionError, StoreUnreachableError
from ms_kungfu.errors import ConfigServerError

WRITER_HEADER = (
    # The writer's name is in a header rather than in the document, because a client that edits and returns a document
    # is a different writer.
    "Kungfu-Writer"
)


class HttpClusterStore:
    """A cluster store in a config server; see :class:`ClusterStore`. Each call opens its own connection."""

    needs_secret = True

    def __init__(self, url: str, secret: str | None, writer: str, timeout_s: float) -> None:
        """Raise ValueError if the URL is invalid."""
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != -1
            # Check the host's name in its encoded form: a name with an empty part, or with a part of more than 63
            # letters, is invalid.
            good = good and bool(str(parts.hostname).encode("idna")) and (parts.path + parts.query).isascii()
        except ValueError:  # the port isn't a number, or brackets don't match
            good = False
        if not good:
            raise ValueError(
                f"{url!r} is not a URL like http://127.0.0.1:9100/config or etcd://10.0.0.1:2379,10.0.0.2:2379/job"
            )
        self.url = url
        self._tls = _tls_for(parts.scheme)
        self._host, self._port = str(parts.hostname), parts.port
        self._path = parts.path if parts.path not in ("", "/") else "/config"
        self._secret = secret
        self._writer = writer
        self._timeout_s = timeout_s

    @property
    def servers(self) -> tuple[str, ...]:
        return (self._host,)

    def get(self) -> Cluster | None:
        return self._cluster(*self._request("GET", self._path, None, self._timeout_s))

    def watch(self, version: int, timeout_s: float) -> Cluster | None:
        path = f"{self._path}?newer_than={version}&timeout={timeout_s}"
        found = self._cluster(*self._request("GET", path, None, timeout_s + self._timeout_s))
        return found if found is not None and found.version > version else None

    def put(self, cluster: Cluster) -> Cluster:
        writer = cluster.writer or self._writer
        written = self._cluster(*self._request("PUT", self._path, cluster.dumps().encode(), self._timeout_s, writer))
        if written is None:
            raise ConfigServerError(f"{self.url} answered the PUT with something other than a cluster description")
        return written

    def status(self) -> Any:
        path = f"{self._path.rstrip('/')}/status"
        status, body, _ = self._request("GET", path, None, self._timeout_s, needs_secret=True)
        try:
            # The status is only printed, so it may contain paths and commands that aren't UTF-8.
            return None if status == 404 else decode(body, MAX_ANSWER_BYTES, raw_bytes=True)
        except MalformedError as error:
            raise ConfigServerError(f"{self.url} gave an answer that isn't a job's status: {error}") from None

    def delete(self) -> None:
        self._request("DELETE", self._path, None, self._timeout_s)

    def _cluster(self, status: int, body: bytes, writer: str) -> Cluster | None:
        if status in (304, 404):
            return None
        try:
            return Cluster.from_json(decode(body, MAX_ANSWER_BYTES), writer=writer)
        except ValueError as error:
            raise ConfigServerError(f"{self.url} gave an answer that isn't a cluster description: {error}") from None

    def _request(
        self, method: str, path: str, body: bytes | None, timeout_s: float, writer: str = "", needs_secret: bool = False
    ) -> tuple[int, bytes, str]:
        connection = (
            http.client.HTTPConnection(self._host, self._port)
            if self._tls is None
            else http.client.HTTPSConnection(self._host, self._port, context=self._tls)
        )
        headers = {"Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
            if writer:
                headers[WRITER_HEADER] = writer
        if self._secret and (method != "GET" or needs_secret):
            headers["Authorization"] = f"Bearer {self._secret}"
        try:
            response, received = exchange(connection, method, path, body, headers, timeout_s)
        except FAILURES as error:
            raise StoreUnreachableError(f"config server {self.url}: {_text_of_error(error)}") from None
        except TooLongError as error:
            raise ConfigServerError(f"{self.url} {error}") from None
        if response.status < 400 or (response.status == 404 and method == "GET"):
            return response.status, received, response.getheader(WRITER_HEADER, "")
        what = _text_of(received)
        if response.status != 400 or not what:  # with status 400, the server's own message is complete
            what = f"{method} {self.url}: {response.status} {what}"
        raise (StaleVersionError if response.status == 409 else ConfigServerError)(what)


def _tls_for(scheme: str) -> ssl.SSLContext | None:
    """Return an SSL context with the user's certificates or, if the user has set none, the system's.

    Raises:
        ValueError: the user's certificates are invalid.
    """
    if scheme != "https":
        return None
    own = from_environment()
    return ssl.create_default_context() if own is None else own.context(called=False)


def _text_of_error(error: Exception) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate isn't accepted ({error.verify_message}); set {env.TLS_CA.name} to its CA's certificate"
    if speaks_tls(error) is False:
        return (
            "it doesn't answer with TLS; if it doesn't use TLS, write http://, or also set KUNGFU_TLS_CERT, "
            "KUNGFU_TLS_KEY and KUNGFU_TLS_CA for the config server"
        )
    if isinstance(error, ssl.SSLError) and any(word in (error.reason or "") for word in ("CERTIFICATE", "UNKNOWN_CA")):
        return (
            f"it rejects this client's certificate, or requires a certificate ({error.reason}); set "
            f"{env.TLS_CERT.name} and {env.TLS_KEY.name}"
        )
    return str(error) or type(error).__name__


def _text_of(body: bytes) -> str:
    """Return the error message in the body of a response."""
    try:
        return printable(str(decode_object(body, MAX_ANSWER_BYTES)["error"]))
    except (MalformedError, KeyError):
        return printable(body[:200].decode("utf-8", "replace").strip())
