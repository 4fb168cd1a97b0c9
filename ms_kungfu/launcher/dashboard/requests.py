"""Which requests the dashboard serves. The functions here have no side effects.

1. The Host header of a request must name this server. Otherwise, an attacker's page could use a DNS name that the
   attacker redirects to this server (DNS rebinding). An IP address can't be redirected, so a server that isn't on
   loopback accepts any IP address in the header. (`test_foreign_host_is_refused`.)

2. If a page of another site has caused a request, the request is refused. The exception is a link to the page itself,
   because opening the page changes nothing. (`test_request_of_another_site_is_refused`.)

3. A command needs the token in a header. A browser never sends the token on its own, because it isn't in a cookie.
   (`test_command_without_the_token_is_refused`.)
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.cluster import MAX_WORKERS_OF_HOSTS
from ms_kungfu.launcher.network import is_loopback
from ms_kungfu.launcher.wire.codec import Reads
from ms_kungfu.launcher.wire.messages import Peer

MAX_BODY_BYTES = 1024
_HOST = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[0-9A-Za-z._-]+)(?::([0-9]{1,5}))?")
_OWN_SITE = ("same-origin", "none")
_PAGE = ("default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
         "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")  # fmt: skip
HEADERS = {
    "Content-Security-Policy": _PAGE,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""The headers that each answer contains."""


class Refused(Exception):
    """The request isn't served. The message is for the user."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class CommandRefused(Exception):
    """The job doesn't accept the command. The message is for the user."""


class Resize(Struct, forbid_unknown_fields=True):
    """Change the number of workers."""

    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS_OF_HOSTS)]


class Evict(Struct, forbid_unknown_fields=True):
    """Remove the worker that has rank `rank`.

    `peer`: the peer ID that the worker must have, because ranks may shift in the meantime. "" allows any worker.
    """

    rank: Annotated[int, Meta(ge=0, lt=MAX_WORKERS_OF_HOSTS)]
    peer: Peer = ""


class Stop(Struct, forbid_unknown_fields=True):
    """End the job, as a SIGTERM to its launcher does."""


def check_source(headers: Mapping[str, str], own: str, names: Collection[str], is_page: bool) -> None:
    """Raise `Refused` unless the request comes from this server's page, or from a program that isn't a browser.

    Args:
        headers: the headers of the request. Looking up a name ignores case.
        own: the address on which the server listens.
        names: the DNS names of this machine.
        is_page: whether the request is for the page itself, to which other sites may link.
    """
    host = headers.get("Host", "")
    if not _is_own_host(host, own, names):
        raise Refused(403, "the Host header names another server; use the URL that kungfu-run has printed")
    origin = headers.get("Origin")
    if origin is not None and origin.lower() != f"http://{host}".lower():
        raise Refused(403, "the request comes from a page of another site (Origin)")
    if headers.get("Sec-Fetch-Site", "none") not in _OWN_SITE and not is_page:
        raise Refused(403, "the request comes from a page of another site (Sec-Fetch-Site)")


def _is_own_host(host: str, own: str, names: Collection[str]) -> bool:
    found = _HOST.fullmatch(host)
    if found is None:
        return False
    name = found[1].strip("[]").lower()
    if is_loopback(name) or name == "localhost":
        return True
    if is_loopback(own):
        return False
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return name in {own.lower(), *map(str.lower, names)}
    return True


def check_token(headers: Mapping[str, str], token: str) -> None:
    """Raise `Refused` unless the request has the token."""
    scheme, _, given = headers.get("Authorization", "").partition(" ")
    # Compare in constant time, and accept any text in the header.
    is_right = hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
    if scheme.lower() != "bearer" or not is_right:
        raise Refused(401, 'a command needs the header "Authorization: Bearer TOKEN"; TOKEN is in the URL that '
                      "kungfu-run has printed")  # fmt: skip


COMMANDS: dict[str, Reads[Any]] = {"resize": Reads(Resize), "evict": Reads(Evict), "stop": Reads(Stop)}


def read_command(name: str, content_type: str, body: bytes) -> Resize | Evict | Stop:
    """Return the command `name` that the body of a request contains. Raise `Refused` if the body is invalid."""
    if content_type != "application/json":
        raise Refused(415, "a command needs Content-Type: application/json")
    try:
        return COMMANDS[name](body)
    except ProtocolError as error:
        raise Refused(400, f"the body isn't the command {name}: {error}") from None
