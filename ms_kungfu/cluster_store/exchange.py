"""Make an HTTP request, with limits on the total time and on the size of the answer.

The module uses http.client rather than urllib, which would follow redirects and use proxies from the environment. Other
servers and proxies must never receive the job's secret.
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
FAILURES = (OSError, http.client.HTTPException)  # the answer is missing, late or not HTTP


def speaks_tls(error: Exception) -> bool | None:
    """Return whether the server uses TLS, judging by the error of a request with TLS; None if unknown.

    The function uses only exception types and OpenSSL's text for an alert. Other texts vary between releases.
    """
    if not isinstance(error, ssl.SSLError):
        return None
    # Only a server with TLS sends a certificate or an alert. Other errors mean that the server closed the connection,
    # or that its answer wasn't a TLS record.
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
    """Make a request, and close the connection. Return the answer and its whole body.

    Raises:
        FAILURES: there is no complete answer within `timeout_s` seconds, or the answer isn't HTTP.
        TooLongError: the answer is longer than the limit.
    """
    received = bytearray()
    try:
        response, pieces = begin(connection, method, path, body, headers, timeout_s)
        for piece in pieces:
            received += piece
            if len(received) > MAX_ANSWER_BYTES:
                raise TooLongError(f"answered more than {MAX_ANSWER_BYTES} bytes")
        return response, bytes(received)
    except socket.timeout:  # Python's own text doesn't contain the time limit
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
    """Make a request. Return the answer, and an iterator that yields the pieces of its body as they arrive.

    Raises:
        FAILURES: as in `exchange`. The iterator may also raise these errors.
    """
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
    wait_no_longer(timeout_s)  # sending isn't split into slices: requests are small, and a part can't be sent again
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    return response, iter(lambda: response.read1(65536), b"")


class _InTime(io.RawIOBase):
    """Data that a socket receives before a deadline.

    The socket's own timeout isn't enough, because it limits only one slice of a wait (see `run_time`), and a server may
    send the header or the body one byte at a time.
    """

    def __init__(self, sock: socket.socket, wait_no_longer: Callable[[], None]) -> None:
        super().__init__()
        # The socket's file object can't be used for reading, because it reads nothing more after its first timeout. It
        # is stored only to keep the socket open.
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
