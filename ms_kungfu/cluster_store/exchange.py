"""One HTTP request, with a limit on its whole time and on the bytes that are read.

It uses http.client and not urllib: the environment's proxies and redirects must never get the job's secret.
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
FAILURES = (OSError, http.client.HTTPException)  # no answer, or not in time, or not by HTTP


def speaks_tls(error: Exception) -> bool | None:
    """Return whether the other end speaks TLS, by the error of a call with TLS; None if that isn't known.

    It goes only by types, which Python keeps, and by OpenSSL's word for an alert. Texts and other reasons differ: an
    end that hangs up at a handshake has caused EOF, ZERO_RETURN and UNEXPECTED_EOF_WHILE_READING, by the patch release.
    """
    if not isinstance(error, ssl.SSLError):
        return None
    # Otherwise it has hung up, or what came is no record of TLS. An end with too old a version mostly sends an alert.
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
    """Return the answer and all of its body; the connection is closed then. Raises one of FAILURES, or TooLongError."""
    received = bytearray()
    try:
        response, pieces = begin(connection, method, path, body, headers, timeout_s)
        for piece in pieces:
            received += piece
            if len(received) > MAX_ANSWER_BYTES:
                raise TooLongError(f"answered more than {MAX_ANSWER_BYTES} bytes")
        return response, bytes(received)
    except socket.timeout:  # also of a single wait, with a text of Python's
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
    """Return the answer and its body, as it comes. Raises one of FAILURES, then or later."""
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
    wait_no_longer(timeout_s)  # sent at once: requests are small, and half a request can't be sent again
    connection.request(method, path, body, dict(headers))
    response = connection.getresponse()
    return response, iter(lambda: response.read1(65536), b"")


class _InTime(io.RawIOBase):
    """Data from a socket, up to a deadline.

    The socket's timeout is for one slice of a wait (see `run_time`), and a server may send a byte now and then, of the
    header, too.
    """

    def __init__(self, sock: socket.socket, wait_no_longer: Callable[[], None]) -> None:
        super().__init__()
        # A file of the socket would read no more once a slice is over; it keeps the socket open for as long as this
        # object.
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
