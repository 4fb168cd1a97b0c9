"""One HTTP request, with a limit on its total time and on the bytes of the answer.

It uses http.client instead of urllib, because proxies from the environment and redirects must never get the job's
secret.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any, Callable

from ms_kungfu._run_time import SLICE_S, run_time

MAX_ANSWER_BYTES = 1024 * 1024
FAILURES = (OSError, http.client.HTTPException)  # no answer, a late answer, or an answer that isn't HTTP


def speaks_tls(error: Exception) -> bool | None:
    """Return whether the other end uses TLS, judged by the error of a call with TLS; None if unknown.

    It relies only on exception types, which Python keeps stable, and on OpenSSL's text for an alert. Other texts and
    reasons vary. If the peer closed the connection during a handshake, the error was EOF, ZERO_RETURN or
    UNEXPECTED_EOF_WHILE_READING, depending on the patch release.
    """
    if not isinstance(error, ssl.SSLError):
        return None
    # Otherwise the peer closed the connection, or its answer is no TLS record. A peer with too old a version usually
    # sends an alert.
    return isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in (error.reason or "")


class TooLongError(Exception):
    """The answer is longer than the limit."""


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
) -> tuple[http.client.HTTPResponse, bytes]:
    """Return the answer with its whole body, and close the connection. Raise one of FAILURES, or TooLongError."""
    received = bytearray()
    try:
        response, pieces = begin(connection, method, path, body, headers, timeout_s)
        for piece in pieces:
            received += piece
            if len(received) > MAX_ANSWER_BYTES:
                raise TooLongError(f"answered more than {MAX_ANSWER_BYTES} bytes")
        return response, bytes(received)
    except socket.timeout:  # also from a single wait, with a text of Python's
        raise socket.timeout(f"no complete answer within {timeout_s:g} s") from None
    finally:
        connection.close()


def begin(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
) -> tuple[http.client.HTTPResponse, Iterator[bytes]]:
    """Return the answer and stream its body as it arrives. Raise one of FAILURES, now or while the body is read."""
    deadline = run_time() + timeout_s
    connection.timeout = timeout_s
    connection.connect()
    stream = connection.sock

    def wait_no_longer(most_s: float = SLICE_S) -> None:
        left = deadline - run_time()
        if left <= 0:
            raise socket.timeout(f"no complete answer within {timeout_s:g} s")
        stream.settimeout(min(left, most_s))

    class Answer(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, *arguments: Any, **more: Any) -> None:
            super().__init__(sock, *arguments, **more)
            self.fp = io.BufferedReader(_InTime(sock, wait_no_longer))

    connection.response_class = Answer
    wait_no_longer(timeout_s)  # send all at once: requests are small, and half a request can't be repeated
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    return response, iter(lambda: response.read1(65536), b"")


class _InTime(io.RawIOBase):
    """Data from a socket, up to a deadline.

    The socket's timeout limits one slice of a wait (see `run_time`). A server may send a byte now and then, even of
    the header, so the timeout alone isn't enough.
    """

    def __init__(self, sock: socket.socket, wait_no_longer: Callable[[], None]) -> None:
        super().__init__()
        # Don't use the socket's file object: it would read nothing more after a slice. It is kept so that the socket
        # stays open while this object exists.
        self._sock, self._open, self._wait_no_longer = sock, sock.makefile("rb", buffering=0), wait_no_longer

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        while True:
            self._wait_no_longer()
            with contextlib.suppress(socket.timeout):
                return self._sock.recv_into(buffer)

    def close(self) -> None:
        self._open.close()
        super().close()
