"""Convert the options of MindSpore's msrun to kungfu-run's flags, or reject them and name the equivalent.

The flags also determine how many ranks the program sees with ``--msrun`` (`ms_kungfu.msrun`).
"""

from __future__ import annotations

from argparse import ArgumentTypeError, Namespace
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ms_kungfu._flags import UsageError, integer, switch
from ms_kungfu.launcher import network
from ms_kungfu.launcher.state.hosts import Hosts

_MSRUN = "msrun's, with --msrun: "
_HOSTS = "name the hosts with the same -H on each host; -self or -nic says which of them is this host"
MSRUN_FLAGS: dict[str, dict[str, Any]] = {
    "worker_num": {"help": _MSRUN + "-np", "type": integer(1), "metavar": "N"},
    "local_worker_num": {
        "help": _MSRUN + "the number of workers on one host; must be equal to -np",
        "type": integer(1),
        "metavar": "K",
    },
    "log_dir": {"help": _MSRUN + "-logdir", "metavar": "DIR"},
    "master_addr": {"help": _MSRUN + "this machine's address; name several hosts with -H", "metavar": "ADDRESS"},
    "master_port": {
        "help": _MSRUN + "the port for --master_addr; not used",
        "type": integer(1, 65535),
        "metavar": "PORT",
    },
}
# The other flags of msrun, which kungfu-run rejects, with the alternative to each.
NO_MSRUN_FLAGS = {
    "bind_core": "-affinity auto, the default, divides the cores; -cores-per-worker K gives each worker K cores",
    "bind_numa": "-affinity auto, the default, divides the cores, regardless of NUMA nodes",
    "cluster_time_out": "set KUNGFU_JOIN_TIMEOUT in the environment, the time that a cluster may take to assemble",
    "rank_table_file": "name the rank table with RANK_TABLE_FILE in the environment",
    "tail_worker_log": "-v=false with -log_dir keeps the workers' output off the screen",
    "worker_log_name": "a worker's two files in -log_dir are named after its address",
    "sim_level": "kungfu-run can't simulate another cluster",
    "sim_rank_id": "kungfu-run can't simulate another cluster",
}
# Flags of mpirun, which scripts for MindSpore programs may contain, with the alternative to each.
NO_MPIRUN_FLAGS = {
    "n": "-np N sets the number of workers",
    "allow-run-as-root": "any user may start a job; leave it out",
    "oversubscribe": "-H HOST:SLOTS sets a host's number of workers, regardless of its cores; leave it out",
    "merge-stderr-to-stdout": "the screen shows both streams, and -logdir writes each to its own file; leave it out",
    "output-filename": "-logdir DIR stores the output of the workers",
    "mca": "it configures Open MPI, which kungfu-run doesn't use; leave it out",
    "x": "workers inherit the environment of kungfu-run; leave it out",
    "bind-to": "-affinity auto, the default, divides the cores; -affinity none leaves them to the system",
    "map-by": "-placement selects the host of the next worker",
}


def settle_words(flags: Namespace) -> None:
    """Convert msrun's flags to kungfu-run's flags. Call this before `settle_hosts`."""
    given = [name for name in MSRUN_FLAGS if getattr(flags, name) is not None]
    if given and not flags.msrun:
        refusal = _HOSTS if given[0].startswith("master") else "write --msrun before it, or -np and -logdir"
        raise UsageError(f"--{given[0]} is an option of msrun; {refusal}")
    if flags.worker_num is not None:
        if flags.size is not None:
            raise UsageError("-np and --worker_num both set the number of workers; give only one of them")
        flags.size = flags.worker_num
    if flags.join is not None:  # with --msrun, -join is msrun's flag
        try:
            waits = switch(flags.join)
        except ArgumentTypeError:
            raise UsageError(
                f"--join={flags.join}: with --msrun, this flag of msrun must be True or False; without --msrun, -join "
                "URL lets this host join a running job"
            ) from None
        if not waits:
            text = "the launcher always waits for the job and returns its exit status; leave it out"
            raise UsageError(f"--join=False: {text}")
    if flags.log_dir is not None:
        if flags.logdir is not None:
            raise UsageError("-logdir and --log_dir both set the log folder; give only one of them")
        flags.logdir = Path(flags.log_dir) if flags.log_dir else None


def settle_world(flags: Namespace) -> None:
    """Set how many ranks the program sees, which is the maximum size of the job.

    Call this when the hosts and the size are known.
    """
    hosts: Hosts = flags.hosts
    address, local = flags.master_addr, flags.local_worker_num
    if address is not None and (hosts.is_several or not network.is_loopback(address.strip("[]"))):
        raise UsageError(f"--master_addr {address}: kungfu-run has no master address; {_HOSTS}")
    if local is not None and (hosts.is_several or local != flags.size):
        raise UsageError(f"--local_worker_num {local} means that the job has other hosts; {_HOSTS}")
    if not flags.msrun:
        if flags.msrun_size is not None:
            raise UsageError("-msrun-size has an effect only together with --msrun; give --msrun, too")
    else:
        if flags.standbys:
            raise UsageError(
                "-standby starts processes without a rank, but with --msrun a program must have a rank when "
                "it starts; leave -standby out"
            )
        if flags.msrun_size is None:
            flags.msrun_size = hosts.slots or flags.size
        if flags.size > flags.msrun_size:
            raise UsageError(
                f"-np {flags.size} is more than -msrun-size {flags.msrun_size}, the maximum number of workers"
            )
        flags.hosts = replace(hosts, most=flags.msrun_size, ports=flags.ports)
    for name in MSRUN_FLAGS:
        delattr(flags, name)
    del flags.msrun
