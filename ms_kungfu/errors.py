"""The exceptions of ms_kungfu.

Three kinds, never mixed: *invalid use* raises ``ValueError`` or ``TypeError`` before anything is sent; *recoverable*
trouble raises a :class:`KungFuError`; a *broken invariant* raises :class:`InternalError` and is a bug of ours.
"""

from __future__ import annotations


class KungFuError(Exception):
    """Base of everything that can go wrong between peers."""


class CollectiveMismatchError(KungFuError, ValueError):
    """The ranks did not bring the same operation under one name; raised at every rank, naming who brought what.

    The communicator stays usable: the next operation under that name starts afresh.
    """


class PeerLostError(KungFuError):
    """A peer that the operation needs has failed or left.

    The communicator is finished, unless the operation is a broadcast whose root failed: every other rank raises this
    error then, and later operations go on.
    """


class CollectiveTimeoutError(KungFuError, TimeoutError):
    """A rank did not arrive within the deadline. The communicator is finished."""


class CollectiveAbortedError(KungFuError):
    """Another rank or thread gave the communicator up; the message says who and why."""


class StaleClusterError(KungFuError):
    """The operation belongs to a cluster version that is over, or this process has left the cluster."""


class ResizeError(KungFuError):
    """A change of membership was refused or failed; the cluster is as it was before."""


class DivergenceError(KungFuError):
    """Something that has to be equal on all workers isn't; raised at every rank, naming it and who has what."""


class ConfigServerError(KungFuError):
    """The config server can't be reached or refused the request; the message carries its answer."""


class DeviceError(KungFuError):
    """A GPU or Ascend device, or its library, refused or failed; the message carries the vendor's own name of it."""


class InternalError(KungFuError):
    """A broken invariant. Please report it with its message."""


def _subclasses(cls: type[Exception]) -> list[type[Exception]]:
    return [c for sub in cls.__subclasses__() for c in (sub, *_subclasses(sub))]


def from_message(text: str) -> Exception:
    """The typed exception for a message of the runtime, which begins with the exception's name.

    >>> from_message("PeerLostError: rank 2 died")
    PeerLostError('rank 2 died')
    """
    known: dict[str, type[Exception]] = {c.__name__: c for c in _subclasses(KungFuError)}
    known.update(ValueError=ValueError, TypeError=TypeError, ImportError=ImportError)
    name, separator, rest = text.partition(": ")
    if separator and name in known:
        return known[name](rest)
    return InternalError(text)
