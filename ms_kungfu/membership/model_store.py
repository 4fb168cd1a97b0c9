"""A worker's access to the model stores.

A worker registers its own store with its host's broker, which returns the stores of the host's other workers. The model
transport requests models from other hosts (`ops_src/store/model_transport.h`).
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
    """Make the model stores of the job's workers accessible. :func:`ms_kungfu.runtime.init` calls this function."""
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
    """Return a file descriptor of the rank's store; -1 if it has no store yet, or if the rank or launcher has ended."""
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
