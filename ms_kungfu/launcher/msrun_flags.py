"""The flags of ``--msrun``: msrun's own options as they apply here, or rejected by name.

They also give the size of the virtual world that the program sees (`ms_kungfu.msrun`).
"""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from ms_kungfu._flags import UsageError, integer, switch
from ms_kungfu.launcher import network
from ms_kungfu.launcher.state.hosts import Hosts

_MSRUN = "msrun's, with --msrun: "
_HOSTS = "name the hosts by -H, the same on each; -self or -nic says which one this is"
MSRUN_FLAGS: dict[str, dict[str, Any]] = {
    "worker_num": {"help": _MSRUN + "-np", "type": integer(1), "metavar": "N"},
    "local_worker_num": {
        "help": _MSRUN + "how many of one host, so as many as -np",
        "type": integer(1),
        "metavar": "K",
    },
    "log_dir": {"help": _MSRUN + "-logdir", "metavar": "DIR"},
    "master_addr": {"help": _MSRUN + "this machine; several hosts are named by -H", "metavar": "ADDRESS"},
    "master_port": {
        "help": _MSRUN + "goes with it; nothing listens there",
        "type": integer(1, 65535),
        "metavar": "PORT",
    },
}
# msrun's other flags.
NO_MSRUN_FLAGS = {
    "bind_core": "-affinity auto, the default, divides the cores; -cores-per-worker K gives K to each",
    "bind_numa": "-affinity auto, the default, divides the cores, and knows nothing of NUMA nodes",
    "cluster_time_out": "KUNGFU_JOIN_TIMEOUT in the environment is how long a cluster may take to assemble",
    "rank_table_file": "RANK_TABLE_FILE in the environment names the rank table",
    "tail_worker_log": "-v=false with -log_dir keeps the workers' output off the screen",
    "worker_log_name": "a worker's two files in -log_dir are named by its address",
    "sim_level": "there is no simulation of another cluster",
    "sim_rank_id": "there is no simulation of another cluster",
}
# mpirun's flags, in scripts that start MindSpore's programs by it.
NO_MPIRUN_FLAGS = {
    "n": "-np N is how many workers there are",
    "allow-run-as-root": "any user may start a job; leave it out",
    "oversubscribe": "a host has as many workers as -H HOST:SLOTS says, whatever its cores; leave it out",
    "merge-stderr-to-stdout": "on the screen both come together, and with -logdir into a file each; leave it out",
    "output-filename": "-logdir DIR keeps what the workers write",
    "mca": "it sets up Open MPI, which isn't used here; leave it out",
    "x": "workers have the environment that kungfu-run is started in; leave it out",
    "bind-to": "-affinity auto, the default, divides the cores; -affinity none leaves them to the system",
    "map-by": "-placement says which host has the next worker",
}


def settle_words(flags: Namespace) -> None:
    """Turn msrun's flags into kungfu-run's, before the hosts are settled."""
    given = [name for name in MSRUN_FLAGS if getattr(flags, name) is not None]
    if given and not flags.msrun:
        refusal = _HOSTS if given[0].startswith("master") else "write --msrun before it, or -np and -logdir"
        raise UsageError(f"--{given[0]} is an option of msrun; {refusal}")
    if flags.worker_num is not None:
        if flags.size is not None:
            raise UsageError("-np and --worker_num are the same; leave one of them out")
        flags.size = flags.worker_num
    if flags.join is not None:  # with --msrun it is msrun's
        try:
            waits = switch(flags.join)
        except ArgumentTypeError:
            raise UsageError(
                f"--join={flags.join}: with --msrun it is msrun's, True or False; without, -join URL has this host "
                "join a running job"
            ) from None
        if not waits:
            text = "the launcher waits for the job, and its exit status is the job's; leave it out"
            raise UsageError(f"--join=False: {text}")
    if flags.log_dir is not None:
        if flags.logdir is not None:
            raise UsageError("-logdir and --log_dir are the same; leave one of them out")
        flags.logdir = Path(flags.log_dir) if flags.log_dir else None


def settle_world(flags: Namespace) -> None:
    """Set how many ranks the program sees: all that the job may have. Call it once hosts and size are settled."""
    hosts: Hosts = flags.hosts
    address, local = flags.master_addr, flags.local_worker_num
    if address is not None and (hosts.is_several or not network.is_loopback(address.strip("[]"))):
        raise UsageError(f"--master_addr {address} is how msrun's hosts meet; {_HOSTS}")
    if local is not None and (hosts.is_several or local != flags.size):
        raise UsageError(f"--local_worker_num {local} says that there are other hosts; {_HOSTS}")
    if not flags.msrun:
        if flags.msrun_size is not None:
            raise UsageError("-msrun-size is the number of ranks that --msrun tells a program of; give --msrun, too")
    else:
        if flags.standbys:
            raise UsageError(
                "-standby keeps processes that have no rank yet, and with --msrun a program asks for its rank at its "
                "start; leave it out"
            )
        if flags.msrun_size is None:
            flags.msrun_size = hosts.slots or flags.size
        if flags.size > flags.msrun_size:
            raise UsageError(
                f"-np {flags.size} is more than the {flags.msrun_size} ranks of -msrun-size, which is the largest size"
            )
        flags.hosts = replace(hosts, most=flags.msrun_size, ports=flags.ports)
    for name in MSRUN_FLAGS:
        delattr(flags, name)
    del flags.msrun
