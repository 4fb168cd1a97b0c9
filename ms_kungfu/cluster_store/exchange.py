"""One HTTP request, with a limit on the time of all of it and on what is read.

On http.client and not urllib: no proxy variables of the environment and no redirects, neither of which should ever see
the job's secret.
"""

from __future__ import annotations

import http.client
import socket
import time
from collections.abc import Iterator, Mapping

MAX_ANSWER_BYTES = 1024 * 1024
FAILURES = (OSError, http.client.HTTPException)  # nobody answers, or not in time, or not by HTTP


class TooLongError(Exception):
    """More was answered than anybody asked for."""


def exchange(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None,
    headers: Mapping[str, str],
    timeout_s: float,
) -> tuple[http.client.HTTPResponse, bytes]:
    """The answer and all of its body; the connection is closed then. One of FAILURES, or TooLongError."""
    received = bytearray()
    try:
        response, pieces = begin(connection, method, path, body, headers, timeout_s)
        for piece in pieces:
            received += piece
            if len(received) > MAX_ANSWER_BYTES:
                raise TooLongError(f"answered more than {MAX_ANSWER_BYTES} bytes")
        return response, bytes(received)
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
    """The answer and its body, as it comes. One of FAILURES, here or from there."""
    deadline = time.monotonic() + timeout_s
    connection.timeout = timeout_s
    connection.connect()
    stream = connection.sock

    def wait_no_longer() -> None:
        # The timeout of a socket is for one wait; a server that sends a byte now and then needs the deadline too.
        left = deadline - time.monotonic()
        if left <= 0:
            raise socket.timeout(f"no complete answer within {timeout_s:g} s")
        stream.settimeout(left)

    def pieces() -> Iterator[bytes]:
        while True:
            wait_no_longer()
            piece = response.read1(65536)
            if not piece:
                return
            yield piece

    wait_no_longer()
    connection.request(method, path, body, dict(headers))
    wait_no_longer()
    response = connection.getresponse()
    return response, pieces()
