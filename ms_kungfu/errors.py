"""The exceptions of ms_kungfu.

There are three kinds of errors:

- *Invalid use* raises ``ValueError`` or ``TypeError`` before anything is sent.
- A *recoverable* problem raises a :class:`KungFuError`.
- A *broken invariant* raises :class:`InternalError`. It is a bug in ms_kungfu.
"""

from __future__ import annotations


class KungFuError(Exception):
    """Base class of all recoverable errors."""


class CollectiveMismatchError(KungFuError, ValueError):
    """The ranks called different operations under the same name.

    Every rank raises this error. The message lists each rank's operation. The communicator remains
    usable: the ranks can start a new operation under that name.
    """


class PeerLostError(KungFuError):
    """A peer that the operation requires has failed or left.

    Later operations of the communicator usually fail, too. A broadcast whose root has failed is
    different: every other rank raises this error, but can continue to use the communicator.
    """


class CollectiveTimeoutError(KungFuError, TimeoutError):
    """A rank did not call the operation before the deadline.

    Later operations of the communicator fail, too.
    """


class CollectiveAbortedError(KungFuError):
    """Another rank or thread aborted the communicator.

    The message names that rank or thread, and the reason.
    """


class StaleClusterError(KungFuError):
    """The operation belongs to an earlier cluster version, or this process has left the cluster."""


class ResizeError(KungFuError):
    """A change of the cluster was rejected or failed.

    The cluster hasn't changed.
    """


class DivergenceError(KungFuError):
    """A value that must be equal on all workers differs.

    Every rank raises this error. The message names what differs, and the ranks that have different
    values. If the values are numbers, the message also contains them.
    """


class ConfigServerError(KungFuError):
    """The config server can't be reached, or it rejected the request.

    The message contains the server's answer.
    """


class DeviceError(KungFuError):
    """A GPU or Ascend device, or the vendor's library, rejected a call or failed.

    The message contains the vendor's name of the error.
    """


class InternalError(KungFuError):
    """An invariant of ms_kungfu is broken.

    Please report the bug, and include the message.
    """


def _subclasses(cls: type[Exception]) -> list[type[Exception]]:
    return [c for sub in cls.__subclasses__() for c in (sub, *_subclasses(sub))]


def from_message(text: str) -> Exception:
    """Convert an error message of the runtime to an exception.

    Args:
        text: the message, which begins with the exception's name.

    Returns:
        An exception of the named type, with the rest of the text as its message. If the name is
        unknown, an `InternalError` with the whole text.

    >>> from_message("PeerLostError: rank 2 died")
    PeerLostError('rank 2 died')
    """
    known: dict[str, type[Exception]] = {c.__name__: c for c in _subclasses(KungFuError)}
    known.update(ValueError=ValueError, TypeError=TypeError, ImportError=ImportError)
    name, separator, rest = text.partition(": ")
    if separator and name in known:
        return known[name](rest)
    return InternalError(text)
