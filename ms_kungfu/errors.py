"""The exceptions of ms_kungfu.

There are three kinds, never mixed:

- *Invalid use* raises ``ValueError`` or ``TypeError`` before anything is sent.
- *Recoverable* trouble raises a :class:`KungFuError`.
- A *broken invariant* raises :class:`InternalError` and is a bug of ms_kungfu.
"""

from __future__ import annotations


class KungFuError(Exception):
    """Base of every error between peers."""


class CollectiveMismatchError(KungFuError, ValueError):
    """The ranks did not bring the same operation under one name.

    Every rank raises it, with a message that names what each rank brought. The communicator stays
    usable: the next operation under that name starts afresh.
    """


class PeerLostError(KungFuError):
    """A peer that the operation needs has failed or left.

    The communicator is finished, with one exception. If the root of a broadcast failed, every other
    rank raises this error, and later operations work.
    """


class CollectiveTimeoutError(KungFuError, TimeoutError):
    """A rank did not arrive within the deadline.

    The communicator is finished.
    """


class CollectiveAbortedError(KungFuError):
    """Another rank or thread aborted the communicator.

    The message names the rank or thread, and the reason.
    """


class StaleClusterError(KungFuError):
    """The operation belongs to a past cluster version, or this process has left the cluster."""


class ResizeError(KungFuError):
    """A change of membership was rejected or failed.

    The cluster is as it was before.
    """


class DivergenceError(KungFuError):
    """A value that has to be equal on all workers isn't.

    Every rank raises it, with a message that names what differs and at which ranks, and has the
    values if they are numbers.
    """


class ConfigServerError(KungFuError):
    """The config server can't be reached, or it rejected the request.

    The message carries the server's answer.
    """


class DeviceError(KungFuError):
    """A GPU or Ascend device, or its library, rejected a call or failed.

    The message carries the vendor's own name of the error.
    """


class InternalError(KungFuError):
    """A broken invariant of ms_kungfu.

    Please report it with its message.
    """


def _subclasses(cls: type[Exception]) -> list[type[Exception]]:
    return [c for sub in cls.__subclasses__() for c in (sub, *_subclasses(sub))]


def from_message(text: str) -> Exception:
    """Return the typed exception for a message of the runtime.

    Args:
        text: the message, which begins with the exception's name.

    Returns:
        An exception of the named type with the rest of the text, or an `InternalError` with all of it
        if the name is unknown.

    >>> from_message("PeerLostError: rank 2 died")
    PeerLostError('rank 2 died')
    """
    known: dict[str, type[Exception]] = {c.__name__: c for c in _subclasses(KungFuError)}
    known.update(ValueError=ValueError, TypeError=TypeError, ImportError=ImportError)
    name, separator, rest = text.partition(": ")
    if separator and name in known:
        return known[name](rest)
    return InternalError(text)
