"""Holds connections to a port and never does what a client should: strangers.py PORT COUNT. Says when all have been
made; begins another one, more slowly, for each that is closed."""

import contextlib
import itertools
import selectors
import socket
import sys
import time

PORT, COUNT = map(int, sys.argv[1:])
HEAD = b"GET /config?newer_than=1000&timeout=60 HTTP/1.1\r\nHost: x\r\n"
KINDS = (
    b"",  # idle
    HEAD[:20],  # half-sent
    b"no request\r\n\r\n",
    b"PUT /config HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n{",  # half of a body
    b"PUT /config HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer 00\r\nContent-Length: 100000\r\n\r\n{",
    HEAD + b"\r\n",  # waits for what will never be
    b"GET /config HTTP/1.1\r\nHost: x\r\n\r\n" * 50,  # reads none of the answers
)
kinds = itertools.cycle(KINDS)


def connect():
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)  # the least there is
    connection.connect(("127.0.0.1", PORT))
    with contextlib.suppress(OSError):  # closed at once
        connection.sendall(next(kinds))
    return connection


with selectors.DefaultSelector() as selector:
    for _ in range(COUNT):
        selector.register(connect(), selectors.EVENT_READ)
    print(f"{COUNT} connections", flush=True)
    while True:
        time.sleep(0.05)
        for key, _ in selector.select():
            with contextlib.suppress(OSError):
                if key.fileobj.recv(1):
                    continue  # an answer, read byte by byte
            selector.unregister(key.fileobj)
            key.fileobj.close()
            selector.register(connect(), selectors.EVENT_READ)
