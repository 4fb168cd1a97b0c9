"""Fix the number of a worker's cores, if the bits of its results depend on it.

When some of MindSpore's CPU kernels are launched, they split their work by the number of cores in the affinity mask.
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
    """Fix the number of this process's cores for its lifetime: the same number at each worker.

    The number is that of ``-cores-per-worker``, or one without that flag. Later calls do nothing.

    If there is a launcher, it does the pinning for all workers. The launcher spreads the workers evenly over the
    cores. At the next change of the cluster it would undo a worker's own choice.
    """
    member = current()
    if member.cores_fixed:
        return
    if member.get(env.CORES_PER_WORKER) is None:
        if member.get(env.BROKER) is None or member.broker().fix_cores(1, _TIMEOUT_S) == 0:
            allowed = sorted(os.sched_getaffinity(0))
            core = allowed[local_rank() % len(allowed)]
            for _ in range(_MAX_PASSES):  # a thread may start another thread before it is pinned
                if not pin_threads("self", {core}):
                    break
        # DEBUG: docs/shards.md states it already, and each worker would log it.
        _log.debug("shards: cores=%d cpus=%s", core_count(), ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    member.cores_fixed = True


def let_wakers_go_on() -> None:
    """Keep the calling thread from preempting the thread that wakes it, if there is only one core.

    The MindSpore thread that has run a graph wakes its caller while it holds a spin lock. The caller acquires the same
    lock at once. If the caller preempted the MindSpore thread on their only core, the caller would spin for the rest
    of its time slice: 0.6 ms.
    """
    if core_count() == 1 and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox may forbid the call
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def core_count() -> int:
    """Return the number of cores on which this thread and its kernels may run."""
    return len(os.sched_getaffinity(0))


def fixed_core_count() -> int:
    """Return the number of cores that `fix_cores` gives a worker, or has given it."""
    return core_count() if current().cores_fixed else current().get(env.CORES_PER_WORKER) or 1
