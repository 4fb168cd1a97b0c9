"""What a config server, or another server at its port, answers to a client over HTTP."""

import socket
import ssl
import threading
import time
from types import SimpleNamespace

import pytest

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.cluster_store import StoreUnreachableError, http, open_store
from ms_kungfu.errors import ConfigServerError


@pytest.fixture
def served():
    """A server that sends these pieces to each client, so many seconds apart; its URL."""
    listeners = []

    def serve(*pieces, apart_s=0.0):
        listener = socket.create_server(("127.0.0.1", 0))
        listeners.append(listener)

        def answer():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(1 << 16)
                    for piece in pieces:
                        try:
                            connection.sendall(piece)
                        except OSError:
                            break
                        time.sleep(apart_s)

        threading.Thread(target=answer, daemon=True).start()
        return f"http://127.0.0.1:{listener.getsockname()[1]}/config"

    yield serve
    for each in listeners:
        each.close()


OK = b"HTTP/1.1 200 OK\r\n"


def drip(count):
    return [f"X-Header-{k}: x\r\n".encode() for k in range(count)]


def test_slowly_dripping_answer_is_held_to_the_time_limit(served):
    for pieces in ([OK, *drip(600)], [OK, b"\r\n", *drip(600)], [b"H"] * 600):
        store = open_store(served(*pieces, apart_s=0.1), timeout_s=0.5)
        began = time.monotonic()
        with pytest.raises(StoreUnreachableError, match="no complete answer within 0.5 s"):
            store.get()
        assert time.monotonic() - began < 30  # of 60


def test_a_whole_answer_is_read_to_its_end(served):
    document = b'{"Runners": [], "Workers": ["127.0.0.1:10000"], "Version": 3}'
    for length in (f"Content-Length: {len(document)}\r\n".encode(), b""):
        cluster = open_store(served(OK + length + b"\r\n" + document[:10], document[10:], apart_s=0.05)).get()
        assert (cluster.version, cluster.size) == (3, 1)


@pytest.mark.parametrize(
    ("body", "why"),
    [(b"", "not JSON"), (b"\xff", "not UTF-8"), (b"[" * 100_000, "nested more than"), (b"1" * 5000, "over 64 bits")],
)
def test_malformed_status_answer_is_an_error_in_a_sentence(served, body, why):
    url = served(OK + b"\r\n" + body)
    with pytest.raises(ConfigServerError, match=f"{url} gave an answer that isn't a job's status: .*{why}"):
        open_store(url).status()


@pytest.mark.parametrize("status", [b"204 No Content", b"302 Found\r\nLocation: http://127.0.0.1:1/"])
def test_neither_is_nothing(served, status):
    with pytest.raises(ConfigServerError, match="gave an answer that isn't a job's status"):
        open_store(served(b"HTTP/1.1 " + status + b"\r\n\r\n")).status()


@pytest.mark.parametrize("url", ["http://a..b/config", f"http://{'a' * 70}/config", "http://x/é", "https://.x/config"])
def test_malformed_url_is_refused(url):
    with pytest.raises(ValueError, match="is not a URL like"):
        open_store(url)


def test_a_refusal_does_nothing_to_the_terminal(served):
    for body in (b"\x1b[2J<html>", b'{"error": "\\u001b[2J<html>"}', b"[" * 100_000):
        with pytest.raises(ConfigServerError) as refused:
            open_store(served(b"HTTP/1.1 500 Oh\r\n\r\n" + body)).status()
        assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("status", "message"), [(400, "^too few workers$"), (413, "^PUT http://h:1/config: 413 too few workers$")]
)
def test_reason_why_a_cluster_is_wrong_stands_alone(monkeypatch, status, message):
    answer = SimpleNamespace(status=status), b'{"error": "too few workers"}'
    monkeypatch.setattr(http, "exchange", lambda *_: answer)
    with pytest.raises(ConfigServerError, match=message):
        open_store("http://h:1/config", "5ec7e7").put(Cluster((PeerID("h", 10000),), (), 1))


@pytest.mark.parametrize("kind", ["https", "etcds"])
@pytest.mark.parametrize(
    ("error", "reason", "is_named"),
    [
        (ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed (EOF)"), None, True),  # Python 3.11.2
        (ssl.SSLEOFError(8, "[SSL: UNEXPECTED_EOF_WHILE_READING] ..."), "UNEXPECTED_EOF_WHILE_READING", True),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] ..."), "WRONG_VERSION_NUMBER", True),  # OpenSSL 3.0
        (ssl.SSLError(1, "[SSL] record layer failure"), "RECORD_LAYER_FAILURE", True),  # 3.2
        (ssl.SSLError(1, "[SSL: PACKET_LENGTH_TOO_LONG] ..."), "PACKET_LENGTH_TOO_LONG", True),
        (ssl.SSLError(1, "..."), "TLSV1_ALERT_PROTOCOL_VERSION", False),
        (ssl.SSLError(1, "..."), "TLSV13_ALERT_CERTIFICATE_REQUIRED", False),
        (ssl.SSLCertVerificationError(1, "..."), "CERTIFICATE_VERIFY_FAILED", False),
        (ConnectionResetError(104, "..."), None, False),
    ],
)  # fmt: skip
def test_peer_without_tls_is_recognized_by_exception_type(kind, error, reason, is_named, monkeypatch):
    if isinstance(error, ssl.SSLError):
        error.reason, error.verify_message = reason, "why"

    def fail(*_):
        raise error

    monkeypatch.setattr("ms_kungfu.cluster_store.exchange.begin", fail)
    with pytest.raises(StoreUnreachableError) as caught:
        open_store(f"{kind}://127.0.0.1:1/config").get()
    assert ("it doesn't answer with TLS; if it doesn't use TLS, write" in str(caught.value)) == is_named
