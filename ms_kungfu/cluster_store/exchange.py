"""One HTTP request, with a limit on its total time and on the bytes of the answer.

It uses http.client instead of urllib: urllib follows redirects and uses proxies from the environment, and these must
never get the job's secret.
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
FAILURES = (OSError, http.client.HTTPException)  # for no answer, a late answer, or an answer that isn't HTTP


def speaks_tls(error: Exception) -> bool | None:
    """Return whether the other end uses TLS, judged by the error of a call with TLS; None if unknown.

    The function relies only on exception types, which Python keeps stable, and on OpenSSL's text for an alert. Other
    texts and reasons vary. For example, if the peer closes the connection during a handshake, the error is EOF,
    ZERO_RETURN or UNEXPECTED_EOF_WHILE_READING, depending on the patch release.
    """
    if not isinstance(error, ssl.SSLError):
        return None
    # For other errors, the peer closed the connection, or its answer isn't a TLS record. A peer whose TLS version is
    # too old usually sends an alert.
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
    except socket.timeout:  # a single wait raises it, too, with Python's own text
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
    wait_no_longer(timeout_s)  # send everything at once: requests are small, and half a request can't be repeated
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    return response, iter(lambda: response.read1(65536), b"")


class _InTime(io.RawIOBase):
    """Data from a socket, up to a deadline.

    The socket's timeout limits only one slice of a wait (see `run_time`). That isn't enough, because a server may send
    a single byte from time to time, even of the header.
    """

    def __init__(self, sock: socket.socket, wait_no_longer: Callable[[], None]) -> None:
        super().__init__()
        # Don't read from the socket's file object: after one slice has timed out, it reads nothing more. Keep it,
        # because it keeps the socket open while this object exists.
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
