"""This process as a member of a cluster.

``kungfu-run`` starts a process with what it needs in its environment; without that the process is a cluster of one, in
which everything works and nothing is sent. The runtime joins its cluster at :func:`init`, or at the first call that
needs it, and leaves with the process or at :func:`finalize`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import TracebackType

from . import _device, _logging, env, errors, membership
from ._processes import show_stacks_when_asked
from .membership import deadlocks, model_store

_lock = threading.Lock()
_alone = 0  # blocks of keep_waiting that this process is in


def init(device: str | None = None) -> None:
    """Joins the cluster that ``kungfu-run`` has started this process for. Idempotent; collective at the first call.

    A process that is started for a job that is running already does not wait here: it joins when it begins to train
    (``ElasticTraining``, ``KungFuElasticCallback``), or at its first collective, so that the others train on while it
    imports and compiles. Until then rank and size are provisional: those it was started for.

    Args:
        device: MindSpore's name of the device, ``"CPU"``, ``"GPU"`` or ``"Ascend"``; for the last two the vendor's
            libraries are opened now instead of with the first primitive.

    Raises:
        ValueError: for another device, or an environment variable with wrong text.
        ImportError: where a library that the device needs is missing; before anything is joined.
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
            membership.begin()
            member.core.set_resize_handler(membership.change_size)
            model_store.connect()
            if member.ports.owns_process:
                deadlocks.start(member.core, member.ports.start_thread)
        member.core.set_delay_for_tests(member.get(env.TEST_COMM_DELAY_MS))
        # Nothing at exit: a process that fails would tell the others that it has left before the launcher can see how
        # it ended, and they would fail first and be blamed. The launcher marks whoever ends within milliseconds.
        member.begun = True


def finalize(device: str | None = None) -> None:
    """Leaves the cluster; idempotent. Peers that still wait for this process learn it at once (``PeerLostError``)."""
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
    """``with KungFuContext(device="CPU"):`` joins the cluster and leaves it at the end.

    Where an exception ends the block it doesn't leave: the process is about to fail, the launcher says how, and the
    others go on without it where they would (``-recover``). To those who wait for it, that it has left is an error.
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
    """Whether ``kungfu-run`` has started this process."""
    return membership.current().get(env.BROKER) is not None


def current_rank() -> int:
    """This process's rank, from 0. Changes only inside a resize."""
    init()
    return membership.rank()


def current_cluster_size() -> int:
    """The number of ranks. Changes only inside a resize."""
    init()
    return membership.size()


def current_local_rank() -> int:
    """The rank among the workers of this host."""
    init()
    return membership.local_rank()


def current_local_size() -> int:
    """The number of workers on this host."""
    init()
    return membership.local_size()


def cluster_version() -> int:
    """The version of the present membership; grows with every change."""
    init()
    return membership.cluster_version()


def uid() -> int:
    """A number that no other process of this job has, nor had: ``start version << 48 | host << 16 | port``.

    The host is its IPv4 address, or 32 bits of its name's checksum. That of a standby changes when it joins.
    """
    return membership.uid()


def detached() -> bool:
    """Whether a change of membership has left this process out; it should finish and exit 0."""
    return membership.is_detached()


@contextlib.contextmanager
def keep_waiting() -> Iterator[None]:
    """``with keep_waiting(): evaluate()``: what this worker does alone may take long, and the others wait for it.

    They come to the next collective before it, and would give up after ``KUNGFU_COLLECTIVE_TIMEOUT``; their time counts
    from the end of the block then, of the outermost where there is one in another. No collective in the block. Not
    collective; without effect in a process alone, at one that has left, and at one that has not joined yet, for which
    nobody waits. If this worker dies meanwhile, they go on as ever; if it hangs, they wait.
    """
    global _alone
    init()
    if membership.is_deferred() or membership.is_detached():
        yield  # to tell others would be to join them
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
    """Wait until every rank that lives is here.

    A worker that is started for a job that is running already passes: the members have this barrier of a program's
    preparation behind them ("rank 0 downloads, the others wait"). From the moment it joins, when it begins to train or
    at its first collective that moves data, it waits like any other; if the members are in a later call of training,
    from the moment at which it comes to that call.
    """
    init()
    if not membership.is_deferred() and not membership.is_catching_up():
        membership.current().core.barrier("kungfu/barrier")


def resize(size: int) -> tuple[bool, bool]:
    """Collective: changes the cluster to `size` ranks; every rank has to ask for the same.

    Returns:
        ``(changed, detached)``: whether the membership is another one now, and whether this process is no longer part
        of it. The present size gives ``(False, False)`` and needs no config server.

    Raises:
        ValueError: for a size below 1.
        CollectiveMismatchError: if the ranks ask for different sizes.
        CollectiveTimeoutError: where not all ranks call it; the others, who train on, wait as well.
        ResizeError: if the change isn't possible; the cluster is as before.
    """
    init()
    change = membership.resize(size)
    return change.changed, change.detached


def propose_new_size(size: int) -> None:
    """Has the cluster become one of `size` workers as soon as it can; training goes on meanwhile and follows at one of
    its next steps, as after ``kungfu-run resize``. Not collective: any worker may ask, and who asks last counts.

    Raises:
        ValueError: for a size below 1.
        ResizeError: where the job can't change, or not to that size.
        ConfigServerError: where the config server can't be reached.
    """
    init()
    membership.join()
    membership.propose(size)


def last_error() -> Exception | None:
    """The last failure of the runtime in this process as a typed exception, ``None`` if there was none.

    MindSpore turns whatever a kernel raises into a RuntimeError, whose text begins with the error's name; this is the
    error itself.
    """
    text = membership.current().core.last_error()
    return errors.from_message(text) if text else None
