"""This process as a member of a cluster.

``kungfu-run`` starts a process with what it needs in its environment. Without that the process is a
cluster of one, in which everything works and nothing is sent. The runtime joins its cluster at
:func:`init`, or at the first call that needs it. It leaves with the process or at :func:`finalize`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

from . import _device, _logging, env, errors, membership
from ._processes import show_stacks_when_asked
from .membership import deadlocks, model_store, outside
from .membership.children import may_take_a_slot

_lock = threading.Lock()
_alone = 0  # blocks of keep_waiting that this process is in


def init(device: str | None = None) -> None:
    """Join the cluster that ``kungfu-run`` has started this process for.

    Idempotent; the first call is collective.

    A process that is started for a running job does not wait here. It joins when it begins to train
    (``ElasticTraining``, ``KungFuElasticCallback``), or at its first collective. So the other workers
    train on while it imports and compiles. Until then its rank and size are provisional: those it was
    started for.

    Args:
        device: MindSpore's name of the device: ``"CPU"``, ``"GPU"`` or ``"Ascend"``. For the last two
            the vendor's libraries are opened now instead of with the first primitive.

    Raises:
        ValueError: for another device, or for an invalid value of an environment variable.
        ImportError: if a library that the device needs is missing; before anything is joined.
        CollectiveTimeoutError: if the other members don't come within ``KUNGFU_JOIN_TIMEOUT``.
    """
    target = "CPU" if device is None else _device.check_target(device)
    if target != "CPU":
        _device.open_device(target)
    member = membership.current()
    if member.begun:
        return
    with member.joining:
        if member.begun:
            return
        if using_kungfu():
            if member.ports.owns_process:
                _logging.set_up(membership.rank)
                show_stacks_when_asked()
            if membership.begin():
                member.core.set_resize_handler(membership.change_size)
                model_store.connect()
                if member.ports.owns_process:
                    deadlocks.start(member.core, member.ports.start_thread)
                    if member.get(env.WATCH):
                        outside.start(member)
                    membership.report_program_end(member)
        member.core.set_delay_for_tests(member.get(env.TEST_COMM_DELAY_MS))
        # Nothing at exit: a failing process would notify the others that it has left before the launcher knows its exit
        # code. They would fail first and be blamed. The launcher marks a process within milliseconds of its end.
        member.begun = True


def finalize(device: str | None = None) -> None:
    """Leave the cluster.

    Idempotent. Peers that still wait for this process raise ``PeerLostError`` at once.

    Args:
        device: ignored; older programs pass it.
    """
    del device  # older programs pass it
    member = membership.current()
    with member.joining:
        if not member.begun:
            return
        member.begun = False
        member.core.set_resize_handler(None)
        model_store.disconnect()
        member.core.reset()
        member.core.device_close()
        membership.forget()


class KungFuContext:
    """Join the cluster for a ``with`` block, and leave it at the end.

    ``with KungFuContext(device="CPU"):``. If an exception ends the block, the process does not leave:
    it is about to fail, and the launcher logs how. The other workers go on without it if they would
    otherwise (``-recover``). For workers that wait for it, its leaving would be an error.

    Args:
        device: as in :func:`init`.
    """

    def __init__(self, device: str = "CPU") -> None:
        self._device = device

    def __enter__(self) -> KungFuContext:
        init(self._device)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            finalize()


def using_kungfu() -> bool:
    """Return whether ``kungfu-run`` has started this process."""
    return membership.current().get(env.BROKER) is not None


def _begin_to_ask() -> None:
    """Join, except in a process of `multiprocessing` that would take its worker's slot by asking."""
    member = membership.current()
    if member.begun or not (using_kungfu() and may_take_a_slot(member)):
        init()


def current_rank() -> int:
    """Return this process's rank, from 0.

    It changes only inside a resize. A child process of a worker returns the rank that its worker had
    when the child started.
    """
    _begin_to_ask()
    return membership.rank()


def current_cluster_size() -> int:
    """Return the number of ranks.

    It changes only inside a resize.
    """
    _begin_to_ask()
    return membership.size()


def current_local_rank() -> int:
    """Return the rank among the workers of this host, from 0."""
    _begin_to_ask()
    return membership.local_rank()


def current_local_size() -> int:
    """Return the number of workers on this host."""
    _begin_to_ask()
    return membership.local_size()


def cluster_version() -> int:
    """Return the version of the present membership.

    It grows with every change of membership.
    """
    _begin_to_ask()
    return membership.cluster_version()


def uid() -> int:
    """Return a number that no other process of this job has or had.

    It is ``start version << 48 | host << 16 | port``. The host is its IPv4 address, or 32 bits of the
    checksum of its name. The number of a standby changes when it joins.
    """
    return membership.uid()


def detached() -> bool:
    """Return whether a change of membership has removed this process.

    A detached process should finish and exit with 0.
    """
    return membership.is_detached()


@contextlib.contextmanager
def keep_waiting() -> Iterator[None]:
    """Have the other workers wait during a ``with`` block, however long it takes.

    ``with keep_waiting(): evaluate()`` is for work that this worker does alone. The other workers come
    to the next collective before it, and would give up after ``KUNGFU_COLLECTIVE_TIMEOUT``. Their time
    counts from the end of the block instead; of nested blocks, from the end of the outermost.

    Not collective, and the block must not call a collective. It has no effect in a cluster of one, and
    in a process that has left or not joined yet. If this worker fails meanwhile, the others go on as
    they do otherwise; if it hangs, they wait.
    """
    global _alone
    init()
    if membership.is_deferred() or membership.is_detached():
        yield  # notifying others would be joining them
        return
    with _lock:
        _alone += 1
        if _alone == 1:
            membership.current().core.set_busy(True)
    try:
        yield
    finally:
        with _lock:
            _alone -= 1
            if _alone == 0:
                membership.current().core.set_busy(False)


def run_barrier() -> None:
    """Wait until every living rank is here.

    A worker that is started for a running job passes at once. The members are past this barrier of the
    program's preparation ("rank 0 downloads, the others wait").

    The worker waits like any other from the moment it joins: when it begins to train, or at its first
    collective that moves data. If the members are in a later call of training, it waits from the moment
    at which it comes to that call.
    """
    init()
    if not membership.is_deferred() and not membership.is_catching_up():
        membership.current().core.barrier("kungfu/barrier")


def resize(size: int) -> tuple[bool, bool]:
    """Change the cluster to `size` ranks.

    Collective: every rank has to ask for the same size.

    Args:
        size: the number of ranks, at least 1.

    Returns:
        ``(changed, detached)``. The first says whether the membership is another one now, the second
        whether this process is no longer part of it. The present size gives ``(False, False)`` and
        needs no config server.

    Raises:
        ValueError: for a size below 1.
        CollectiveMismatchError: if the ranks ask for different sizes.
        CollectiveTimeoutError: if not all ranks call it; the others, which train on, wait as well.
        ResizeError: if the change isn't possible; the cluster is as before.
    """
    init()
    change = membership.resize(size)
    return change.changed, change.detached


def propose_new_size(size: int) -> None:
    """Request an asynchronous resize to `size` workers.

    Training continues; the cluster follows at one of the next steps, as after ``kungfu-run resize``.
    Not collective: any worker may ask, and the last request counts.

    Args:
        size: the number of workers, at least 1.

    Raises:
        ValueError: for a size below 1.
        ResizeError: if the job can't change, or not to that size.
        ConfigServerError: if the config server can't be reached.
    """
    init()
    membership.join()
    membership.propose(size)


def last_error() -> Exception | None:
    """Return the last failure of the runtime in this process.

    MindSpore turns whatever a kernel raises into a RuntimeError, whose text begins with the error's
    name. This function returns the error itself.

    Returns:
        The typed exception, or ``None`` if there was no failure.
    """
    text = membership.current().core.last_error()
    return errors.from_message(text) if text else None
