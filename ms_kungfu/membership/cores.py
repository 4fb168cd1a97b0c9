"""Fix the number of a worker's cores if the exact results depend on that number.

Some of MindSpore's CPU kernels split their work by the number of cores in the affinity mask when a kernel is launched.
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
    """Fix the number of this process's cores until the process ends. The number is the same on all workers.

    The number is the value of ``-cores-per-worker``, or 1 if the flag isn't set. Later calls do nothing.

    If there is a launcher, it pins all workers, distributed evenly over the cores. If a worker pinned itself, the
    launcher would undo the pinning at the next change of the cluster.
    """
    member = current()
    if member.cores_fixed:
        return
    if member.get(env.CORES_PER_WORKER) is None:
        if member.get(env.BROKER) is None or member.broker().fix_cores(1, _TIMEOUT_S) == 0:
            allowed = sorted(os.sched_getaffinity(0))
            core = allowed[local_rank() % len(allowed)]
            for _ in range(_MAX_PASSES):  # a thread may start another thread before this loop pins it
                if not pin_threads("self", {core}):
                    break
        # The level is DEBUG, because each worker logs this line.
        _log.debug("shards: cores=%d cpus=%s", core_count(), ",".join(map(str, sorted(os.sched_getaffinity(0)))))
    member.cores_fixed = True


def let_wakers_go_on() -> None:
    """If there is only one core, keep the calling thread from preempting the thread that wakes it.

    After the MindSpore thread has run a graph, it holds a spin lock while it wakes the calling thread. The calling
    thread immediately acquires the same lock. If the calling thread preempted the MindSpore thread on the only core, it
    would spin for the rest of its time slice (0.6 ms).
    """
    if core_count() == 1 and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(OSError):  # a sandbox may forbid the call
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def core_count() -> int:
    """Return the number of cores on which this thread and its kernels may run."""
    return len(os.sched_getaffinity(0))


def fixed_core_count() -> int:
    """Return the number of cores that `fix_cores` assigns, or has assigned, to this worker."""
    return core_count() if current().cores_fixed else current().get(env.CORES_PER_WORKER) or 1
