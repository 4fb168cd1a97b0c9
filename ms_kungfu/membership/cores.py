"""The number of a worker's cores, if bits depend on it.

Some of MindSpore's CPU kernels divide their work by the size of the affinity mask at the time of the launch.
"""

from __future__ import annotations

import contextlib
import logging
import os

from ms_kungfu import env
from ms_kungfu._processes import pin_threads
from ms_kungfu.membership.identity import local_rank
from ms_kungfu.membership.member import current

_log = logging.getLogger(__name__)
_TIMEOUT_S = 60.0
_MAX_PASSES = 10


def fix_cores() -> None:
    """Give this process a permanent number of cores, the same as all other workers'.

    It is that of ``-cores-per-worker``, else one. Later calls do nothing.

    If the launcher pins workers, it does so for all of them. It spreads them evenly, and would undo a worker's own
    choice at the next change of the cluster.
    """
    member = current()
    if member.cores_fixed:
        return
    if member.get(env.CORES_PER_WORKER) is None:
        if member.get(env.BROKER) is None or member.broker().fix_cores(1, _TIMEOUT_S) == 0:
            allowed = sorted(os.sched_getaffinity(0))
            core = allowed[local_rank() % len(allowed)]
            for _ in range(_MAX_PASSES):  # until no thread is left that may have started another one meanwhile
                if not pin_threads("self", {core}):
                    break
        # This only repeats how a step of shards is computed (docs/shards.md), and each worker would log it.
        _log.debug("shards: cores=%d cpus=%s", core_count(), ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    member.cores_fixed = True


def let_wakers_go_on() -> None:
    """Keep the calling thread from preempting the thread that wakes it, if there is only one core.

    MindSpore's thread that has run a graph wakes its caller while it holds a spin lock that the caller takes at once.
    Woken on the same core, in its place, the caller would spin there for the rest of its time slice: 0.6 ms.
    """
    if core_count() == 1 and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox that doesn't allow it
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def core_count() -> int:
    """Return how many cores this thread, and what it computes, has."""
    return len(os.sched_getaffinity(0))


def fixed_core_count() -> int:
    """Return how many cores a worker has once they are fixed."""
    return core_count() if current().cores_fixed else current().get(env.CORES_PER_WORKER) or 1
