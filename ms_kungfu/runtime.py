"""This process as a member of a cluster.

``kungfu-run`` starts a process with environment variables that describe its cluster. Without these
variables, the process is a cluster of one, in which every call works without communication. The
process joins its cluster when it calls :func:`init` or another function that needs the cluster, and
leaves when it ends or calls :func:`finalize`.
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
_alone = 0  # number of nested keep_waiting blocks


def init(device: str | None = None) -> None:
    """Join the cluster for which ``kungfu-run`` has started this process.

    The first call is a collective. Further calls do nothing.

    If the process was started for a running job, `init` doesn't wait for the cluster. The process
    joins when it begins to train (``ElasticTraining``, ``KungFuElasticCallback``), or at its first
    collective. So the other workers continue training while the new process is importing modules
    and compiling. Until the process has joined, its rank and size are provisional: the values with
    which it was started.

    Args:
        device: MindSpore's name of the device: ``"CPU"``, ``"GPU"`` or ``"Ascend"``. For GPU and
            Ascend, `init` opens the vendor's libraries. Without `device`, the first primitive opens
            them.

    Raises:
        ValueError: if the device is unknown, or if an environment variable has an invalid value.
        ImportError: if a library that the device needs is missing. Then the process hasn't joined.
        CollectiveTimeoutError: if the other members don't join within ``KUNGFU_JOIN_TIMEOUT``.
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
        # Don't leave the cluster when the process exits. If a failing process left, it would notify the other workers
        # before the launcher knows its exit code. Those workers would then fail first, and the launcher would report
        # their failures as the cause. The launcher itself detects within milliseconds that a process has ended.
        member.begun = True


def finalize(device: str | None = None) -> None:
    """Leave the cluster.

    Workers that are still waiting for this process immediately raise ``PeerLostError``. Further
    calls do nothing.

    Args:
        device: ignored. Programs for older versions pass it.
    """
    del device
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
    """Join the cluster for a block, ``with KungFuContext(device="CPU"):``, and leave it afterwards.

    If an exception ends the block, the process doesn't leave the cluster, because it is about to
    fail, and the launcher logs the failure. With ``-recover``, the other workers continue without
    the failed process. If the process left the cluster instead, workers that are waiting for it
    would raise an error.

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
    """Call `init`, except in a worker's `multiprocessing` child, for which `init` would take the worker's slot."""
    member = membership.current()
    if member.begun or not (using_kungfu() and may_take_a_slot(member)):
        init()


def current_rank() -> int:
    """Return this process's rank, starting at 0.

    The rank changes only during a resize. In a child process of a worker, the function returns the rank
    that the worker had when the child started.
    """
    _begin_to_ask()
    return membership.rank()


def current_cluster_size() -> int:
    """Return the number of ranks.

    The number changes only during a resize.
    """
    _begin_to_ask()
    return membership.size()


def current_local_rank() -> int:
    """Return the rank among the workers of this host, starting at 0."""
    _begin_to_ask()
    return membership.local_rank()


def current_local_size() -> int:
    """Return the number of workers on this host."""
    _begin_to_ask()
    return membership.local_size()


def cluster_version() -> int:
    """Return the current cluster version.

    The version increases with every change of membership.
    """
    _begin_to_ask()
    return membership.cluster_version()


def uid() -> int:
    """Return a number that no other process of this job has or has had.

    The number is ``version << 48 | host << 16 | port``. Here, version is the cluster version for which
    the process was started. host is the IPv4 address or a 32-bit checksum of the host name. The number
    of a standby changes when the standby joins.
    """
    return membership.uid()


def detached() -> bool:
    """Return whether a change of membership has removed this process.

    A detached process should finish its work and exit with 0.
    """
    return membership.is_detached()


@contextlib.contextmanager
def keep_waiting() -> Iterator[None]:
    """Make the other workers wait during a ``with`` block, without a time limit.

    ``with keep_waiting(): evaluate()`` is for work that only this worker does. During the block,
    the other workers wait in their next collective. Normally, that collective would time out after
    ``KUNGFU_COLLECTIVE_TIMEOUT``. With this block, the timeout starts when the outermost
    ``keep_waiting`` block ends.

    The function isn't a collective, and the block must not call a collective. The block has no effect
    in a cluster of one, or in a process that has left or hasn't joined yet. If this worker fails during
    the block, the other workers handle the failure like any other failure. If this worker hangs in the
    block, the other workers wait forever.
    """
    global _alone
    init()
    if membership.is_deferred() or membership.is_detached():
        yield  # `set_busy` would make this process join the cluster
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
    """Wait until every living rank has called this function.

    If this worker was started for a running job and hasn't joined, the call returns immediately.
    The reason is that programs use a barrier before training ("rank 0 downloads, the others wait"),
    which the cluster's members have already passed.

    The worker joins when it begins to train, or at its first collective that moves data. From then
    on, it waits in a barrier like any other worker. But if the members are in a later training
    call, it waits only after reaching that call.
    """
    init()
    if not membership.is_deferred() and not membership.is_catching_up():
        membership.current().core.barrier("kungfu/barrier")


def resize(size: int) -> tuple[bool, bool]:
    """Change the cluster to `size` ranks.

    This function is a collective: every rank must request the same size.

    Args:
        size: the number of ranks, from 1 to 65,535.

    Returns:
        Two booleans, ``(changed, detached)``, which say whether the membership has changed, and
        whether this process is no longer part of the cluster. If `size` is the current size, the
        result is ``(False, False)``, and no config server is needed.

    Raises:
        ValueError: if `size` isn't in this range.
        CollectiveMismatchError: if the ranks request different sizes.
        CollectiveTimeoutError: if not all ranks call this function. Ranks that instead continue
            training also wait until this timeout.
        ResizeError: if the change isn't possible. The cluster doesn't change.
    """
    init()
    change = membership.resize(size)
    return change.changed, change.detached


def propose_new_size(size: int) -> None:
    """Request an asynchronous resize to `size` workers.

    Training continues, and the cluster changes a few steps later, as with ``kungfu-run resize``.
    This function isn't a collective: any worker may call it. The last of several requests applies.

    Args:
        size: the number of workers, from 1 to 65,535.

    Raises:
        ValueError: if `size` isn't in this range.
        ResizeError: if the job can't change its size at all, or can't change to this size.
        ConfigServerError: if the config server can't be reached.
    """
    init()
    membership.join()
    membership.propose(size)


def last_error() -> Exception | None:
    """Return the last failure of the runtime in this process.

    If a kernel raises an exception, MindSpore converts it to a RuntimeError whose text begins with the
    exception's name. This function returns the original exception.

    Returns:
        An exception of the original class, or ``None`` if there was no failure.
    """
    text = membership.current().core.last_error()
    return errors.from_message(text) if text else None
