"""Derive a job's hosts from a Slurm step, so that ``srun kungfu-run python train.py`` needs no list of hosts.

The hosts are the nodes of the step. The node number that Slurm sets identifies this host. A node may have as many
workers as srun starts tasks on it. If srun starts one task per node, a node may have as many workers as the allocation
has cores on it. The first task on a node runs as the node's kungfu-run. The other tasks on the node end at once, and
kungfu-run also uses the cores to which Slurm has bound them.
"""

from __future__ import annotations

import contextlib
import os
from argparse import ArgumentTypeError
from collections.abc import Mapping
from typing import Callable, TypeVar

from msgspec import Struct

from ms_kungfu import env
from ms_kungfu._flags import UsageError
from ms_kungfu._words import counted
from ms_kungfu.launcher.node_lists import counts_of, nodes_of
from ms_kungfu.launcher.state.hosts import Host, parse_hosts

# Step IDs from this number on belong to steps that srun hasn't started (a batch script, an interactive shell).
_FIRST_SPECIAL_STEP = 0xFFFFFFF0
_PORTS = range(12000, 28000)  # below the ephemeral ports of most systems
_PORTS_OF_A_JOB = 16
T = TypeVar("T")
_REMEDY = "name the hosts with -H, or give --standalone for a job on this host"


class SpareTaskError(Exception):
    """This task has nothing to do, because another task on this node runs as the node's kungfu-run."""


class Step(Struct, frozen=True):
    """A Slurm step.

    `own`: the name of this node. `size`: the default number of workers. `port`: the port on which the launchers listen.
    The port is the same on all nodes, and differs from the port of another job on the same nodes.
    """

    hosts: tuple[Host, ...]
    own: str
    size: int
    port: int


def is_step(environ: Mapping[str, str]) -> bool:
    """Return whether srun has started this process as a task of a step.

    Raises UsageError if Slurm's variables are inconsistent.
    """
    try:
        step = env.SLURM_STEP_ID.get(environ)
        return env.SLURM_JOB_ID.get(environ) is not None and step is not None and step < _FIRST_SPECIAL_STEP
    except ValueError as error:
        raise UsageError(f"{error}; {_REMEDY}") from None


def step_of(environ: Mapping[str, str]) -> Step:
    """Return the Slurm step of this process.

    Raises SpareTaskError if this isn't the first task on its node, and UsageError if Slurm's variables are
    inconsistent.
    """
    try:
        return _step_of(environ)
    except (ValueError, ArgumentTypeError) as error:
        raise UsageError(f"{error}; {_REMEDY}") from None


def _step_of(environ: Mapping[str, str]) -> Step:
    listed = env.SLURM_STEP_NODELIST if env.SLURM_STEP_NODELIST.get(environ) else env.SLURM_JOB_NODELIST
    tasks_of = env.SLURM_STEP_TASKS_PER_NODE if env.SLURM_STEP_TASKS_PER_NODE.get(environ) else env.SLURM_TASKS_PER_NODE
    nodes, tasks = _read(listed, nodes_of, environ), _read(tasks_of, counts_of, environ)
    if len(tasks) != len(nodes):
        raise ValueError(
            f"{tasks_of.name}={tasks_of.get(environ)} is for {counted(len(tasks), 'node')}, but "
            f"{listed.name}={listed.get(environ)} lists {len(nodes)}"
        )
    number = env.SLURM_NODEID.get(environ)
    if number >= len(nodes):
        all_nodes = f"{counted(len(nodes), 'node')} {listed.name}={listed.get(environ)}"
        raise ValueError(f"SLURM_NODEID={number} is too large for the {all_nodes}")
    if env.SLURM_LOCALID.get(environ):
        raise SpareTaskError
    slots = tasks if max(tasks) > 1 else _cores_of(nodes, environ)
    job, step = env.SLURM_JOB_ID.get(environ) or 0, env.SLURM_STEP_ID.get(environ) or 0
    port = _PORTS[(job * _PORTS_OF_A_JOB + step) % len(_PORTS)]
    hosts = tuple(parse_hosts(f"{node}:{count}")[0] for node, count in zip(nodes, slots))
    return Step(hosts, hosts[number].name, sum(tasks), port)


def _read(variable: env.Variable[str | None], parse: Callable[[str], list[T]], environ: Mapping[str, str]) -> list[T]:
    text = variable.get(environ)
    if text is None:
        raise ValueError(f"Slurm has not set {variable.name}")
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{variable.name}: {error}") from None


def _cores_of(nodes: list[str], environ: Mapping[str, str]) -> list[int]:
    """Return the number of cores of the allocation on each node of the step."""
    if env.SLURM_JOB_CPUS_PER_NODE.get(environ) is None:
        return [1] * len(nodes)
    every = _read(env.SLURM_JOB_NODELIST, nodes_of, environ)
    counts = dict(zip(every, _read(env.SLURM_JOB_CPUS_PER_NODE, counts_of, environ)))
    return [max(1, counts.get(node, 1)) for node in nodes]


def take_cores(environ: Mapping[str, str]) -> None:
    """If Slurm has bound the step's tasks to cores, use the cores of all tasks on this node."""
    with contextlib.suppress(
        ValueError, OSError
    ):  # nothing to do if the tasks aren't bound, or if Slurm doesn't allow other cores
        if environ.get("SLURM_CPU_BIND_TYPE", "").startswith("mask_cpu"):
            union = 0
            for mask in environ.get("SLURM_CPU_BIND_LIST", "").split(","):
                union |= int(mask, 16)
            os.sched_setaffinity(0, {core for core in range(union.bit_length()) if union >> core & 1})
