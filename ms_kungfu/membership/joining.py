"""Join and leave a cluster. The host's broker sends the shared-memory segment of a cluster version.

A process that is started for a running job doesn't join in :func:`begin`. Its join is *deferred*:
the other workers continue training while the new process is importing modules and compiling. The
process reports that it is ready when it calls :func:`join` or its first collective.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal

from ms_kungfu import env
from ms_kungfu._processes import stat_of
from ms_kungfu.broker_protocol import Detached, Granted, Stay
from ms_kungfu.cluster import PeerID
from ms_kungfu.errors import KungFuError, ResizeError
from ms_kungfu.membership import children, timeline
from ms_kungfu.membership.identity import answers, identity
from ms_kungfu.membership.member import Member, current

_log = logging.getLogger(__name__)
_NICE_OF_THE_DETACHED = 10
_LEAVING_S = 10.0  # a program that ends within this time causes no warning
_ANSWER_S = 10.0
_handles_sigterm = False  # also true if this process inherited the handler in a fork


def begin() -> bool:
    """Join the cluster for which this process was started. If the job is already running, prepare a deferred join.

    :func:`ms_kungfu.runtime.init` calls this function once. Return False in a child process of a worker, where
    functions that communicate raise an error.
    """
    member = current()
    own, standby = member.get(env.SELF), member.get(env.STANDBY)
    if own is None and standby is None:
        raise ValueError("KUNGFU_BROKER is set but KUNGFU_SELF is not; start the program with kungfu-run")
    member.reset(None if own is None else PeerID.parse(own), member.get(env.INCARNATION))
    member.parents_answers = children.parents_answers(member)
    if member.parents_answers is not None:
        member.core.set_join_handler(children.refuse)
        return False
    timeline.start(member)
    children.announce(member, answers())
    if member.get(env.PARKED):
        member.deferred, member.received = True, False
        member.core.set_join_handler(join)
    else:
        enter_first(member, request_segment(member, None, None, member.get(env.JOIN_TIMEOUT)))
    return True


def join() -> None:
    """Carry out a deferred join: report that this process is ready, and wait for its slot.

    The wait has no time limit. The first collective calls this function automatically. If the
    process is no longer needed, :func:`is_detached` is true after the call. Further calls do
    nothing. The function is thread-safe.
    """
    member = current()
    with member.joining:
        if not member.deferred or member.entering:
            return
        standby = member.get(env.STANDBY)
        if standby is None:
            granted = request_segment(member, None, None, None)
        else:
            granted = member.broker().request_identity(standby)
        # Other threads that call a collective during this time wait for the lock; this thread's collectives don't wait.
        member.entering = True
        try:
            enter_first(member, granted)
        finally:
            member.entering = False
        member.deferred = False
        member.core.set_join_handler(None)


def forget() -> None:
    """Reset this process to its state before it had a cluster."""
    member = current()
    member.core.set_join_handler(None)
    member.reset()


def request_segment(
    member: Member, member_of: int | None, version: int | None, timeout: float | None
) -> Granted | Detached | Stay:
    """Request the shared-memory segment of a cluster version from the broker."""
    peer, incarnation = identity()
    return member.broker().request_segment(peer, incarnation, member_of, version, timeout, member.training_step)


@timeline.traced("join cluster version")
def enter(member: Member, granted: Granted, has_state: bool) -> None:
    """Join the segment of a new cluster version, together with the other members of that version."""
    fds, cluster = (granted.fd, *granted.between_hosts), granted.cluster
    try:
        timeouts = member.get(env.COLLECTIVE_TIMEOUT), member.get(env.JOIN_TIMEOUT)
        if granted.between_hosts:
            where = cluster.host_of_rank
            member.core.join_hosts(*fds, granted.rank, where, str(granted.peer), has_state, *timeouts)
        else:
            member.core.join(granted.fd, granted.rank, str(granted.peer), has_state, *timeouts)
    finally:
        for fd in fds:
            member.ports.close(fd)
    if member.ended_steps.last is not None:  # other threads must find the last step in the new segment
        member.core.note_step(member.ended_steps.last, member.ended_steps.each_s)
    member.cluster = granted.cluster
    member.superseded = member.sync_points = 0
    children.announce(member, answers())


def enter_first(member: Member, granted: Granted | Detached | Stay) -> None:
    """Let this process join its first cluster, or detach it if the broker no longer has a slot for it."""
    if not isinstance(granted, Granted):
        # The cluster shrank again before this process was ready.
        detach(member, None, evicted=isinstance(granted, Detached) and granted.evicted)
        return
    member.self_id, member.incarnation = granted.peer, granted.incarnation
    enter(member, granted, has_state=False)
    # In the job's first cluster, no worker has a training state to send. A worker that joins later must receive the
    # state. If it didn't have to, and the ranks with the state failed now, it would silently train from the beginning.
    member.received = not member.deferred
    _leave_on_sigterm(member)


def detach(member: Member, version: int | None, evicted: bool = False) -> None:
    """Remove this process from the cluster, beginning with cluster version `version`.

    `evicted` is true if a worker or a user evicted this process.
    """
    member.detached, member.evicted = True, evicted
    member.hang_up()
    if member.ports.owns_process:
        _step_back()
        _tell_who_works_on(member)
    reason = f" at version {version}" if version else ""
    member.core.leave(f"this process has been detached from the cluster{reason}")


def _step_back() -> None:
    """Lower this process's priority, so that workers that are training run first on shared cores.

    A process that has left the cluster only has to end its program.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, max(os.getpriority(os.PRIO_PROCESS, 0), _NICE_OF_THE_DETACHED))


def _tell_who_works_on(member: Member) -> None:
    """Warn if the program is still running `_LEAVING_S` seconds after this worker has left the cluster."""
    ports = member.ports
    left = ports.monotonic()

    def tell() -> None:
        ports.sleep(_LEAVING_S)
        _log.warning(
            "still running: seconds=%.0f. This worker has left the cluster, but its program still runs. "
            "No other worker waits for it, and the launcher ends it when its slot is needed or the job "
            "ends. ms_kungfu.detached() is True in a worker that has left: skip work that only a worker "
            "of the cluster should do, such as a final evaluation",
            ports.monotonic() - left,
        )

    ports.start_thread("kungfu-left", tell)


def _leave_on_sigterm(member: Member) -> None:
    """Handle SIGTERM by asking the launcher to remove this worker after its step.

    SIGTERM may mean that the machine is needed for something else. If the worker can't leave, the launcher ends the job
    after a checkpoint.
    """
    global _handles_sigterm
    if (
        not _handles_sigterm
        and member.ports.owns_process
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # keep the program's own handler
    ):
        _handles_sigterm = True
        told, tells = os.pipe()
        member.core.catch_sigterm(tells, _supervisor())
        member.ports.start_thread("kungfu-leave", lambda: _ask_to_leave(member, told))


def _supervisor() -> int:
    """Return the ID of the process that ends this worker's group: the parent of the group's leader. 0: unknown."""
    with contextlib.suppress(OSError):
        return int(stat_of(os.getpgrp())[1])
    return 0


def _ask_to_leave(member: Member, told: int) -> None:
    """Wait for a SIGTERM, then ask the broker to remove this worker from the cluster."""
    os.read(told, 1)
    try:
        if member.detached or member.self_id is None:
            raise ResizeError("this process isn't a member of the cluster")
        member.terminated = True  # set before the request, which may take effect immediately
        member.broker().request_leave(member.self_id, _ANSWER_S, terminated=True)
    except KungFuError:
        member.core.end_by_sigterm()  # the job is ending, or no launcher answers


def evict(rank: int) -> None:
    """Request that a rank leave the current cluster.

    A few steps later, the other workers continue without the rank. Any worker may call this
    function, at any time and from any thread; it isn't a collective. Several requests for the same
    rank evict only one worker. On the evicted worker, `ms_kungfu.detached()` is true after its
    step. The worker's program should then exit with status 0.

    Args:
        rank: the rank of the worker to evict.

    Raises:
        ValueError: if the cluster has no such rank.
        ResizeError: if the worker can't leave: it is the last worker, fewer than ``-min-np``
            workers would remain, or the launcher runs without ``-w``. The cluster then doesn't
            change.
    """
    join()
    member = current()
    size = 1 if member.cluster is None else member.cluster.size
    if not 0 <= rank < size:
        raise ValueError(f"there is no rank {rank} in a cluster of {size}")
    if member.cluster is None:
        raise ResizeError(
            "this process was not started by kungfu-run, so no rank can leave; start it with kungfu-run -w"
        )
    member.broker().request_leave(member.cluster.workers[rank], member.get(env.JOIN_TIMEOUT))
