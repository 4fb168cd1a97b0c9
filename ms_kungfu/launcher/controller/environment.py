"""The environment of a worker process (docs/environment.md)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ms_kungfu import _cpu_isa, env
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.processes import Process
from ms_kungfu.launcher.controller.startup import JobStart
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.hosts import Hosts

# In PyNative mode the program's thread passes each operation through three queues of MindSpore. Each queue has a
# thread. All four threads wait by spinning (`AsyncRQueue::Wait`). On fewer than four cores, they prevent each other
# from running: on one core, a LeNet step takes 13 times as long as without the queues.
_PYNATIVE_THREADS = 4


def environment_of(
    process: Process,
    ranks: Sequence[str],
    joins_later: bool,
    options: Options,
    hosts: Hosts,
    begun: JobStart,
    agent: AgentHandle,
    cores: int,
) -> dict[str, str | None]:
    """Return how a worker process's environment differs from the environment of its host's launcher.

    The value None removes a variable that an outer job may have set. The agent adds the variables whose values only the
    host knows (`HostWorkers._start`).

    Args:
        process: a worker that the next cluster version contains, or a standby.
        ranks: the host of each rank.
        hosts: the job's current hosts.
        agent: the host of the process.
        cores: the number of cores in the process's share. With `-w` the share may become smaller, unless
            -cores-per-worker fixes the number.
    """
    standby, each = process.peer is None, agent.shares.each
    rank, size = str(process.rank), str(process.size)
    local = ranks[: process.rank].count(process.host)
    local_rank, local_size = str(local), str(ranks.count(process.host))
    has_few = cores < _PYNATIVE_THREADS or (options.watch and each is None)
    return {
        env.SELF.name: None if standby else str(process.peer),
        env.INCARNATION.name: None if standby else str(process.incarnation),
        env.PARKED.name: "1" if joins_later else None,
        env.STANDBY.name: str(process.standby) if standby else None,
        env.JOB.name: begun.writer,
        env.START_SIZE.name: str(begun.first.size),
        env.START_HOSTS.name: str(len(begun.first.hosts)),
        env.START_CORES.name: str(begun.cores) if begun.cores else None,
        env.CONFIG_SERVER.name: begun.url,
        env.WATCH.name: "1" if options.watch else None,
        env.HOSTS.name: hosts.limit,
        env.PORT_RANGE.name: f"{options.ports[0]}-{options.ports[-1]}",
        env.RANK_ID.name: rank,
        env.RANK_SIZE.name: size,
        env.LOCAL_RANK.name: local_rank,
        env.LOCAL_SIZE.name: local_size,
        env.PLAIN_RANK.name: rank,
        env.WORLD_SIZE.name: size,
        env.PLAIN_LOCAL_RANK.name: local_rank,
        env.LOCAL_WORLD_SIZE.name: local_size,
        env.PARENT.name: None,
        env.DISTRIBUTE_HOSTS.name: None,  # a kungfu-run that the program starts is a separate job
        env.DISTRIBUTE_SHELL.name: None,
        **({env.SLURM_STEP_ID.name: None} if options.in_slurm else {}),
        env.MSRUN_SIZE.name: str(options.msrun_size) if options.msrun_size else None,
        env.MSRUN_RANK.name: str(place_of(process, local, options)) if options.msrun_size else None,
        env.CORES_PER_WORKER.name: str(each) if each else None,
        **({_cpu_isa.VARIABLE: begun.cpu_isa} if begun.cpu_isa else {}),
        **({env.PYNATIVE_BLOCKS: "1"} if has_few and not agent.devices.each else {}),
        env.COMPILE_CACHE: None,  # for the reason, see ms_kungfu/ops/_compile_cache.py
        **agent.devices.environment(process.device),
    }


def place_of(process: Process, local_rank: int, options: Options) -> int:
    """Return the process's number among all slots of the job.

    Slots are ordered by host, and the slots of a host are ordered by port.
    """
    before = itertools.takewhile(lambda host: host.name != process.host, options.hosts.each)
    on_host = local_rank if process.peer is None else options.ports.index(process.peer.port)
    return sum(host.slots or 0 for host in before) + on_host
