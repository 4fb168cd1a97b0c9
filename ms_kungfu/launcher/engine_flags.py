"""Parse the flags of a job that runs under an engine (``-engine ray``).

An engine chooses the nodes on which the job runs, and starts kungfu-run on each of them.
"""

from __future__ import annotations

import argparse
import math
from argparse import Namespace
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ms_kungfu._flags import FlagParser, UsageError, duration, integer

ENGINES = ("ray",)
_NOT_WITH_AN_ENGINE = {
    **dict.fromkeys(("H", "hostfile", "self", "nic", "nnodes", "standalone"), "the engine finds the hosts"),
    **dict.fromkeys(("nproc-per-node", "nproc_per_node"), "the engine starts as many workers on a node as fit there"),
    **dict.fromkeys(("join", "joinable"), "nodes join automatically"),
    "port": "the engine chooses a port that is free on all nodes",
    "builtin-config-port": "the engine chooses a free port",
    "secret-file": "the engine passes the job's secret to its nodes; set your own secret in $KUNGFU_JOB_SECRET",
    "no-secret": "the engine passes the job's secret to its nodes",
    "standby": "the engine reserves resources only for workers",
    "init-version": "the engine creates the first cluster from the nodes that it finds",
}
_SETTLED = ("np", "min-np", "w")  # flags that the engine sets itself when it starts kungfu-run on a node


def _engine(name: str) -> str:
    if name not in ENGINES:
        raise argparse.ArgumentTypeError(f"unknown engine {name!r}; known engines: {', '.join(ENGINES)}")
    return name


def amount(text: str) -> float:
    """Parse an amount of a resource, such as 0.5 CPUs."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not an amount; write it like 1, 4 or 0.5")
    return value


ENGINE_FLAGS: dict[str, dict[str, Any]] = {
    "engine": {
        "help": (
            "the engine that places the job: ray runs one kungfu-run on each node of a Ray cluster, and resizes the "
            "job as nodes come and go; it requires ms_kungfu[ray]"
        ),
        "type": _engine,
        "metavar": "NAME",
    },
    "address": {
        "help": "with -engine: the address of the Ray cluster, e.g. 10.0.0.1:6379; auto: a cluster that runs on this "
        "machine; local: a new cluster on this machine (default: $RAY_ADDRESS, else auto, else local)",
        "metavar": "ADDRESS",
    },
    "max-np": {"help": "with -engine: grow to at most N workers (default -np)", "type": integer(1), "metavar": "N"},
    "wait": {
        "help": "with -engine: how long to wait until -np workers fit; after that, the job begins with fewer workers, "
        "but with at least -min-np (default 0s)",
        "type": duration,
        "metavar": "TIME",
    },
    "cpus-per-worker": {"help": "with -engine: CPUs per worker (default 1)", "type": amount, "metavar": "N"},
    "gpus-per-worker": {"help": "with -engine: GPUs per worker (default 0)", "type": amount, "metavar": "N"},
    "npus-per-worker": {"help": "with -engine: NPUs per worker (default 0)", "type": amount, "metavar": "N"},
}
_RESOURCES = {"cpus-per-worker": ("CPU", 1.0), "gpus-per-worker": ("GPU", 0.0), "npus-per-worker": ("NPU", 0.0)}


class EngineRequest(Struct, frozen=True):
    """A job that an engine has to run.

    `size`: the number of workers at the start. `least`: the minimum number of workers. `most`: the maximum number of
    workers. `needs`: the resources that each worker uses on its node. `flags`: the user's flags for kungfu-run on each
    node; the engine adds its own flags.
    """

    engine: str
    command: tuple[str, ...]
    address: str | None
    size: int
    least: int
    most: int
    wait_s: float
    needs: Mapping[str, float]
    flags: tuple[str, ...]


def settle_no_engine(flags: Namespace, given: Collection[str]) -> None:
    """Raise UsageError if the command line contains flags for an engine, but not -engine itself."""
    for name in ENGINE_FLAGS:
        if name in given:
            raise UsageError(f"-{name} requires -engine: it controls how an engine places the job")
        delattr(flags, name.replace("-", "_"))


def engine_request(flags: Namespace, parser: FlagParser, command: Sequence[str]) -> EngineRequest:
    """Return the job for the engine that the flags describe. Raises UsageError if flags are invalid."""
    if not command:
        raise UsageError(f"no program to run; write it after the flags: {parser.prog} -engine ray python train.py")
    refused = sorted(parser.given & _NOT_WITH_AN_ENGINE.keys())
    if refused:
        raise UsageError(
            f"-{refused[0]} can't be combined with -engine: {_NOT_WITH_AN_ENGINE[refused[0]]}; leave -{refused[0]} out"
        )
    size = flags.size or flags.min_size or 1
    least, most = flags.min_size or size, flags.max_np or size
    if least > size:
        raise UsageError(f"-np {size} is less than -min-np {least}")
    if most < size:
        raise UsageError(f"-max-np {most} is less than -np {size}")
    needs = {}
    for name, (resource, default) in _RESOURCES.items():
        given = getattr(flags, name.replace("-", "_"))
        needs[resource] = default if given is None else given
    needs = {resource: count for resource, count in needs.items() if count}
    if not needs:
        raise UsageError("-cpus-per-worker 0: a worker needs more than 0 CPUs, GPUs or NPUs of a node")
    passed = [word for word in parser.spelled if word[1:].partition("=")[0] not in {*_SETTLED, *ENGINE_FLAGS}]
    if "min-np" in parser.given:
        passed.append(f"-min-np={least}")
    if "affinity" not in parser.given and "cores-per-worker" not in parser.given:
        passed.append("-affinity=none")  # the engine doesn't report which cores belong to the job
    return EngineRequest(
        flags.engine, tuple(command), flags.address, size, least, most, flags.wait or 0.0, needs, tuple(passed)
    )  # fmt: skip
