"""What a worker process is told by its environment (docs/environment.md)."""

from __future__ import annotations

import itertools

from ms_kungfu import env
from ms_kungfu.cluster import Cluster
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.processes import Process
from ms_kungfu.launcher.controller.startup import JobStart
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.hosts import Hosts


def environment_of(
    process: Process,
    cluster: Cluster,
    joins_later: bool,
    options: Options,
    hosts: Hosts,
    begun: JobStart,
    agent: AgentHandle,
) -> dict[str, str | None]:
    """Changes to the environment of its host's launcher; None removes what an outer job may have set. What only the
    host itself knows is added there (`agents.told_of_the_host`).

    Args:
        process: a worker of `cluster`, or a standby, which is to be in the next one.
        hosts: those that the job has by now; `agent`: its own one.
    """
    standby, each = process.peer is None, agent.shares.each
    here = [worker for worker in cluster.workers if worker.host == process.host]
    elsewhere = cluster.size - len(here)
    rank, size = str(process.rank), str(process.size)
    local_rank = str(here.index(process.peer) if process.peer in here else process.rank - elsewhere)
    local_size = str(process.size - elsewhere)
    return {
        env.SELF.name: None if standby else str(process.peer),
        env.INCARNATION.name: None if standby else str(process.incarnation),
        env.PARKED.name: "1" if joins_later else None,
        env.STANDBY.name: str(process.standby) if standby else None,
        env.JOB.name: begun.writer,
        env.START_SIZE.name: str(begun.first.size),
        env.START_HOSTS.name: str(len(begun.first.hosts)),
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
        env.DISTRIBUTE_HOSTS.name: None,  # a kungfu-run in the program is another job
        env.DISTRIBUTE_SHELL.name: None,
        **({env.SLURM_STEP_ID.name: None} if options.in_slurm else {}),
        env.MSRUN_SIZE.name: str(options.msrun_size) if options.msrun_size else None,
        env.MSRUN_RANK.name: str(place_of(process, options)) if options.msrun_size else None,
        env.CORES_PER_WORKER.name: str(each) if each else None,
        env.COMPILE_CACHE: None,  # ms_kungfu/ops/_compile_cache.py says why
        **agent.devices.environment(process.device),
    }


def place_of(process: Process, options: Options) -> int:
    """Its number among all that the job may have: hosts in their order, and on each the lowest port that is free."""
    if process.peer is None:
        return process.rank
    before = itertools.takewhile(lambda host: host.name != process.host, options.hosts.each)
    return sum(host.slots or 0 for host in before) + options.ports.index(process.peer.port)
