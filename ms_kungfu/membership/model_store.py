"""A worker's access to the model stores.

The worker registers its own store with the broker, which also returns the stores of other workers on the host. The
model transport requests models from other hosts (`ops_src/store/model_transport.h`).
"""

from __future__ import annotations

import os
from typing import Any

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.broker_protocol import BrokerClient
from ms_kungfu.errors import KungFuError
from ms_kungfu.membership.identity import identity, peer_of
from ms_kungfu.membership.member import current

_TIMEOUT_S = 10.0


def connect() -> None:
    """Exchange stores with the other workers of the job from now on. Called by :func:`ms_kungfu.runtime.init`."""
    current().core.set_store_handlers(_announce, _find)


def disconnect() -> None:
    core = current().core
    core.set_store_handlers(None, None)
    core.reset_store()


def _announce(fd: int) -> str:
    """Send this worker's store to the broker; return an error message, or an empty string on success."""
    peer, incarnation = identity()
    try:
        answer, fds = _ask({"type": "put_store", "peer": str(peer), "incarnation": incarnation}, fd)
    except (OSError, ProtocolError, KungFuError) as error:
        return f"{peer}: can't send the model store to the launcher ({error})"
    _close(fds)
    return "" if answer.get("found") is True else f"{peer}: {answer.get('error', 'the launcher refused the store')}"


def _find(rank: int) -> int:
    """Return a descriptor of the rank's store; -1 if the rank has no store yet, or the rank or launcher has ended."""
    peer = peer_of(rank)
    if peer is None:
        return -1
    try:
        _, fds = _ask({"type": "get_store", "peer": str(peer)})
    except (OSError, ProtocolError, KungFuError):
        return -1
    return fds[0] if len(fds) == 1 else _close(fds)


def _ask(request: dict[str, Any], fd: int | None = None) -> tuple[dict[str, Any], list[int]]:
    return BrokerClient.from_environment().exchange_store(request, _TIMEOUT_S, fd)


def _close(fds: list[int]) -> int:
    for fd in fds:
        os.close(fd)
    return -1
