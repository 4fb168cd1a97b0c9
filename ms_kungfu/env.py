"""All environment variables that ms_kungfu reads or sets, with type, unit, default and setter.

Only this module defines the names of the variables and parses their values. Other code calls, for example,
``env.COLLECTIVE_TIMEOUT.get()``. If a variable is unset or empty, its default is used. If its value can't be parsed,
``get`` raises a ValueError that names the variable, the value and the expected form. ``python -m ms_kungfu.env`` prints
the table of docs/environment.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Generic, TypeVar

_MOST_SECONDS = 2e6  # about 23 days; poll(2) has a 31-bit timeout in milliseconds
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True)
class Kind(Generic[T_co]):
    """The type of a value. `expected` completes the sentence "NAME must be ..."."""

    parse: Callable[[str], T_co]
    expected: str
    unit: str = "-"


@dataclass(frozen=True)
class Variable(Generic[T]):
    """An environment variable. `set_by` is "launcher", "user", both, or the name of the program that sets it."""

    name: str
    kind: Kind[T]
    default: T
    meaning: str
    set_by: str = "launcher"
    secret: bool = False

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the parsed value or the default. Raise ValueError if the value is invalid."""
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text:
            return self.default
        try:
            return self.kind.parse(text)
        except (KeyError, ValueError):
            got = "other text (not shown: it is a secret)" if self.secret else repr(text)
            raise ValueError(f"{self.name} must be {self.kind.expected}, got {got}") from None


def _optional(
    name: str, kind: Kind[T], meaning: str, set_by: str = "launcher", secret: bool = False
) -> Variable[T | None]:
    """Return a variable without a default."""
    return Variable(name, kind, None, meaning, set_by, secret)


def _natural(text: str) -> int:
    # int() also accepts "1_0", " 1" and "-1".
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= _MOST_SECONDS:  # also rejects NaN
        raise ValueError(text)
    return value


def _seconds_or_0(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _seconds(text)


def _parent(text: str) -> tuple[int, ...]:
    numbers = tuple(map(_natural, text.split(":")))
    if len(numbers) != 6:
        raise ValueError(text)
    return numbers


def _hex(text: str) -> str:
    bytes.fromhex(text)
    return text


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://", "etcd://", "etcds://")):
        raise ValueError(text)
    return text


def _level(text: str) -> str:
    return _one_of("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")(text.upper())


def _one_of(*words: str) -> Callable[[str], str]:
    return {word: word for word in words}.__getitem__


def port_range(text: str) -> range:
    """Parse ``"first-last"`` into a range that includes both ports."""
    first, _, last = text.partition("-")
    ports = range(_natural(first), _natural(last) + 1)
    if not ports or ports[0] < 1 or ports[-1] > 65535:
        raise ValueError(text)
    return ports


def _hosts(text: str) -> dict[str, int]:
    slots: dict[str, int] = {}
    for part in text.split(","):
        host, _, count = part.rpartition(":")
        if not host or host in slots:
            raise ValueError(text)
        slots[host] = _natural(count)
    return slots


NUMBER = Kind(_natural, "a number")
FLAG = Kind({"0": False, "1": True}.__getitem__, "0 or 1")
SECONDS = Kind(_seconds, "a positive number of seconds up to 2e6", "s")
PATH = Kind(str, "a path")

SELF = _optional("KUNGFU_SELF", Kind(str, "the worker's 'host:port'"), "The peer ID of this worker.")
INCARNATION = Variable(
    "KUNGFU_INCARNATION", NUMBER, 0, "The cluster version for which the launcher started this process."
)
BROKER = _optional(
    "KUNGFU_BROKER",
    Kind(str, "the name of a socket"),
    "Name of the abstract Unix socket of the host's broker, without the leading NUL. Unset: a cluster of one worker.",
)
JOB = _optional(
    "KUNGFU_JOB",
    Kind(str, "a word"),
    "The job's ID: the same in all its workers, and different for each job.",
)
JOB_SECRET = _optional(
    "KUNGFU_JOB_SECRET",
    Kind(_hex, "hexadecimal digits"),
    "Proves membership to the broker (HMAC) and authorizes writes to the config server (`Bearer`). The "
    "user sets it for a job on several hosts, or for a separate config server.",
    set_by="user, launcher",
    secret=True,
)
TLS_CERT = _optional(
    "KUNGFU_TLS_CERT",
    PATH,
    "This host's certificate, in PEM. With `KUNGFU_TLS_KEY` and `KUNGFU_TLS_CA`, it turns on TLS for all traffic "
    "between hosts. Unset: no encryption.",
    set_by="user",
)
TLS_KEY = _optional(
    "KUNGFU_TLS_KEY", PATH, "The key of `KUNGFU_TLS_CERT`, in PEM and without a password.", set_by="user"
)
TLS_CA = _optional(
    "KUNGFU_TLS_CA", PATH, "The certificate, in PEM, of the CA that has signed all hosts' certificates.", "user"
)
CONFIG_SERVER = _optional(
    "KUNGFU_CONFIG_SERVER",
    Kind(_url, "an http://, https://, etcd:// or etcds:// URL"),
    "URL of the config server's `/config`, or of the job in etcd. Unset: there is no config server, and the cluster "
    "can't change. From a shell, only `kungfu-run resize` and `evict` read the variable.",
    set_by="launcher, or by hand",
)
WATCH = Variable("KUNGFU_WATCH", FLAG, False, "Whether the launcher follows the config server (`-w`).")
HOSTS = _optional(
    "KUNGFU_HOSTS",
    Kind(_hosts, "'host:slots', comma-separated"),
    "The slots of each host, if `-H` sets them. Unset: no limit.",
)
PORT_RANGE = _optional("KUNGFU_PORT_RANGE", Kind(port_range, "'first-last' (ports)"), "Ports for new workers.")
COLLECTIVE_TIMEOUT = Variable(
    "KUNGFU_COLLECTIVE_TIMEOUT",
    SECONDS,
    600.0,
    "How long a collective waits for a live rank that doesn't call it. In the last 5 s of this limit (or in the second "
    "half of a limit below 10 s), the launcher looks for a stuck rank. It logs the rank's stack, and with `-w` kills "
    "the rank.",
    set_by="user",
)
JOIN_TIMEOUT = Variable(
    "KUNGFU_JOIN_TIMEOUT",
    SECONDS,
    300.0,
    "Time limit for all workers to join a new cluster version, for a new worker to become ready, and for a job's hosts "
    "to register. The launcher ends a stuck rank, as with `KUNGFU_COLLECTIVE_TIMEOUT`.",
    set_by="user",
)
DISTRIBUTE_HOSTS = _optional(
    "KUNGFU_DISTRIBUTE_HOSTS",
    Kind(_hosts, "'host:slots', comma-separated"),
    "The hosts of `kungfu-distribute`. `kungfu-run` without `-H`, `-hostfile` and `-standalone` uses them.",
    set_by="kungfu-distribute",
)
DISTRIBUTE_SHELL = _optional(
    "KUNGFU_DISTRIBUTE_SHELL",
    NUMBER,
    "Process ID of `kungfu-distribute` on this host. The head node sends SIGUSR1 to it when the job has begun.",
    set_by="kungfu-distribute",
)
RAY_FOLDER = _optional("KUNGFU_RAY_FOLDER", PATH, "Folder with a worker's function and result.", "ms_kungfu.ray")
DEVICE_ENGINE = Variable(
    "KUNGFU_DEVICE_ENGINE",
    Kind(_one_of("auto", "vendor", "staging"), "auto, vendor or staging"),
    "auto",
    "What runs reductions between GPUs or Ascend devices. `vendor`: the vendor's library (NCCL, HCCL), or an error. "
    "`staging`: the runtime, through host memory. `auto`: the vendor's library if all ranks can use it, otherwise the "
    "runtime.",
    set_by="user",
)
DEVICE_CHUNK_BYTES = Variable(
    "KUNGFU_DEVICE_CHUNK_BYTES",
    Kind(_natural, "a number", "bytes"),
    4 << 20,
    "Size of the chunks in which device memory is copied through host memory. It must be the same on all ranks.",
    set_by="user",
)
DEVICE_RUNTIME_LIBRARY = _optional(
    "KUNGFU_DEVICE_RUNTIME_LIBRARY",
    PATH,
    "The CUDA runtime (libcudart) or AscendCL (libascendcl) to open. Unset: the loaded library, or the loader's.",
    set_by="user",
)
DEVICE_ENGINE_LIBRARY = _optional(
    "KUNGFU_DEVICE_ENGINE_LIBRARY",
    PATH,
    "NCCL (libnccl) or HCCL (libhccl) to open. Unset: the first of these that exists: the loaded library, the Python "
    "package nvidia-nccl-cu*, MindSpore's library, the loader's library.",
    set_by="user",
)
PEER_TIMEOUT = Variable(
    "KUNGFU_PEER_TIMEOUT",
    Kind(_seconds_or_0, "a number of seconds up to 2e6, 0 for never", "s"),
    30.0,
    "How long a worker may hang, for example stopped by SIGSTOP, before the launcher kills it "
    "(`-peer-timeout`). Computing, compiling and waiting for other workers don't count as hanging.",
    set_by="user",
)
PARKED = Variable(
    "KUNGFU_PARKED", FLAG, False, "Whether this process joins a running job when it is ready to train, not in `init`."
)
STANDBY = _optional("KUNGFU_STANDBY", NUMBER, "The number of this standby, which has no peer ID yet.")
LEDGER_DIR = _optional(
    "KUNGFU_LEDGER_DIR",
    Kind(str, "a folder"),
    "Folder in which each ElasticDataset records the trained samples, for `python -m ms_kungfu.dataset.audit`. An "
    "ElasticDataset with `ledger=FOLDER` uses that folder instead. Unset: no record.",
    set_by="user",
)
CONTENTS_CHECK = Variable(
    "KUNGFU_CONTENTS_CHECK",
    Kind(_one_of("some", "all", "none"), "some, all or none"),
    "some",
    "Which samples workers compare by content when training begins. `contents_check=` overrides it.",
    set_by="user",
)
TRACE = _optional("KUNGFU_TRACE", Kind(str, "a folder"), "Folder for the workers' traces for Perfetto.", set_by="user")
TRACE_BYTES = Variable(
    "KUNGFU_TRACE_BYTES",
    Kind(_natural, "a number", "bytes"),
    64 << 20,
    "Size at which each worker's trace ends.",
    set_by="user",
)
REPLAY = _optional(
    "KUNGFU_REPLAY",
    PATH,
    "Set by `python -m ms_kungfu.replay` for the program that it runs again. Training then compares its steps with "
    "the recorded steps, doesn't record them, and doesn't request another size.",
    set_by="replay",
)
LOG_LEVEL = Variable(
    "KUNGFU_LOG_LEVEL",
    Kind(_level, "DEBUG, INFO, WARNING, ERROR or CRITICAL"),
    "INFO",
    "Lowest level of ms_kungfu's lines in a worker's log (stderr). Each resize, failure and checkpoint has a line at "
    "INFO or above. A wait of 10 s or more is a WARNING. If the program configures logging, its own levels apply.",
    set_by="user",
)
TEST_COMM_DELAY_MS = Variable(
    "KUNGFU_TEST_COMM_DELAY_MS",
    Kind(_natural, "a number", "ms"),
    0,
    "For tests only: delay of each all-reduce in MindSpore's kernels.",
    set_by="user",
)
MSRUN_SIZE = _optional(
    "KUNGFU_MSRUN_SIZE",
    NUMBER,
    "V, the number of virtual ranks that `mindspore.communication` reports (`--msrun`). Unset: MindSpore's own number.",
)
MSRUN_RANK = Variable("KUNGFU_MSRUN_RANK", NUMBER, 0, "The virtual rank of this worker. It never changes.")
METRICS_PORT = _optional(
    "KUNGFU_METRICS_PORT",
    NUMBER,
    "Port of 127.0.0.1 on which a `Monitor` serves its metrics. The host's other workers use the following ports. "
    "0: any free port. Unset: no metrics are served.",
    set_by="user",
)
START_SIZE = _optional("KUNGFU_START_SIZE", NUMBER, "The number of workers with which the job began.")
START_HOSTS = Variable("KUNGFU_START_HOSTS", NUMBER, 1, "The number of hosts on which the job began.")
START_CORES = _optional(
    "KUNGFU_START_CORES", NUMBER, "The number of cores with which the job began. Unset: several hosts."
)
COMPILE_AHEAD = Variable(
    "KUNGFU_COMPILE_AHEAD",
    Kind(_seconds_or_0, "seconds", "s"),
    5.0,
    "Time limit for [compiling in advance](resizing.md#batch-shapes) the batch shapes that a failure would cause.",
    set_by="user",
)
PRELOAD = Variable(
    "KUNGFU_PRELOAD", FLAG, True,
    "Whether workers share [the import](resizing.md#forked-workers) of MindSpore and "
    "[graphs](resizing.md#shared-graphs).",
    "user",
)  # fmt: skip
GRAPHS = _optional("KUNGFU_GRAPHS", PATH, "Folder of the host's [shared graphs](resizing.md#shared-graphs).")
# Variables with MindSpore's names, for programs that read these names. MindSpore itself reads DEVICE_ID.
RANK_ID = Variable("RANK_ID", NUMBER, 0, "The worker's rank when it started.")
RANK_SIZE = Variable("RANK_SIZE", NUMBER, 1, "The cluster size when the worker started.")
LOCAL_RANK = Variable(
    "KUNGFU_LOCAL_RANK", NUMBER, 0, "The worker's rank among the workers of its host when it started."
)
LOCAL_SIZE = Variable("KUNGFU_LOCAL_SIZE", NUMBER, 1, "The number of workers on its host when it started.")
PARENT = _optional(
    "KUNGFU_PARENT",
    Kind(_parent, "'process ID:rank:size:local rank:local size:cluster version'"),
    "In a child process of a worker: the worker's process ID, and its ranks and sizes when the child started. The "
    "child reports these as its own, and can't take part in collectives.",
    set_by="worker",
)
# Variables with PyTorch's names.
PLAIN_RANK = Variable("RANK", NUMBER, 0, "Same as `RANK_ID`, for programs that read torchrun's names.")
WORLD_SIZE = Variable("WORLD_SIZE", NUMBER, 1, "Same as `RANK_SIZE`.")
PLAIN_LOCAL_RANK = Variable("LOCAL_RANK", NUMBER, 0, "Same as `KUNGFU_LOCAL_RANK`.")
LOCAL_WORLD_SIZE = Variable("LOCAL_WORLD_SIZE", NUMBER, 1, "Same as `KUNGFU_LOCAL_SIZE`.")
CORES_PER_WORKER = _optional(
    "KUNGFU_CORES_PER_WORKER",
    NUMBER,
    "The number of cores of each worker at every cluster size: `-cores-per-worker`, or 1 if training uses shards. "
    "Unset: the launcher divides the cores again at each cluster change.",
)
DEVICE_ID = Variable(
    "DEVICE_ID",
    NUMBER,
    0,
    "Index of the worker's device among the devices that the worker can see. MindSpore reads it. Without devices: "
    "the lowest number that no other worker of the host has.",
)
# The devices that the job may use; an empty value means none. In each worker, the launcher sets the variable to the
# worker's own devices.
CUDA_VISIBLE_DEVICES = _optional(
    "CUDA_VISIBLE_DEVICES",
    Kind(str, "numbers or UUIDs of GPUs, comma-separated"),
    "The GPUs that the job may use (unset: all; empty: none). In a worker: the worker's GPU or, with `-allow-nvlink`, "
    "all GPUs of the job.",
    set_by="user, launcher",
)
ASCEND_RT_VISIBLE_DEVICES = _optional(
    "ASCEND_RT_VISIBLE_DEVICES",
    Kind(str, "numbers of devices, comma-separated"),
    "The Ascend devices that the job may use (unset: all; empty: none). In a worker: the worker's device or, with a "
    "rank table, all devices of the job.",
    set_by="user, launcher",
)
RANK_TABLE_FILE = _optional(
    "RANK_TABLE_FILE", PATH, "Ascend rank table. The workers get the devices that the table lists.", set_by="user"
)
HCCL_CONFIG_PATH = _optional(
    "MINDSPORE_HCCL_CONFIG_PATH", PATH, "Ascend rank table, used instead of `RANK_TABLE_FILE`.", "user"
)
# Variables with etcdctl's names, for `-config-server etcd://...`. Each host, and each worker that writes to etcd, needs
# these variables.
ETCD_USER = _optional("ETCDCTL_USER", Kind(str, "NAME:PASSWORD, or NAME"), "The job's user in etcd.", "user", True)
ETCD_PASSWORD = _optional(
    "ETCDCTL_PASSWORD", Kind(str, "a password"), "The password, if it isn't in `ETCDCTL_USER`.", "user", True
)
ETCD_CACERT = _optional(
    "ETCDCTL_CACERT", PATH, "The CA of etcd's certificates (`etcds://`). Unset: the system's CAs.", set_by="user"
)
ETCD_CERT = _optional("ETCDCTL_CERT", PATH, "The job's certificate for etcd, if etcd requires one.", set_by="user")
ETCD_KEY = _optional("ETCDCTL_KEY", PATH, "The key of the certificate in `ETCDCTL_CERT`.", set_by="user")
# The variables that Slurm sets for each task.
_NODES = Kind(str, "a list of nodes like gpu[01-03],login")
_COUNTS = Kind(str, "a number for each node, like 2(x3),1")
SLURM_JOB_ID = _optional("SLURM_JOB_ID", NUMBER, "The number of the allocation.", set_by="Slurm")
SLURM_STEP_ID = _optional(
    "SLURM_STEP_ID",
    NUMBER,
    "The number of the step in the allocation. If `SLURM_JOB_ID` is set too, and none of `-H`, `-hostfile`, "
    "`-standalone`, `-self` and `-nic` is given, the nodes of the step are the job's hosts.",
    set_by="Slurm",
)
SLURM_JOB_NODELIST = _optional("SLURM_JOB_NODELIST", _NODES, "The nodes of the allocation.", set_by="Slurm")
SLURM_STEP_NODELIST = _optional(
    "SLURM_STEP_NODELIST", _NODES, "The nodes of the step. Unset: the nodes of the allocation.", set_by="Slurm"
)
SLURM_TASKS_PER_NODE = _optional(
    "SLURM_TASKS_PER_NODE",
    _COUNTS,
    "Tasks on each node. A node with several tasks has at most as many workers.",
    "Slurm",
)
SLURM_STEP_TASKS_PER_NODE = _optional(
    "SLURM_STEP_TASKS_PER_NODE", _COUNTS, "The step's tasks on each node. Replaces `SLURM_TASKS_PER_NODE`.", "Slurm"
)
SLURM_JOB_CPUS_PER_NODE = _optional(
    "SLURM_JOB_CPUS_PER_NODE",
    _COUNTS,
    "Cores of the allocation on each node. If srun starts one task per node, a node's cores limit its workers.",
    set_by="Slurm",
)
SLURM_NODEID = Variable("SLURM_NODEID", NUMBER, 0, "The index of this node among the step's nodes.", set_by="Slurm")
SLURM_LOCALID = Variable(
    "SLURM_LOCALID", NUMBER, 0, "The index of this task on its node. Task 0 runs the node's `kungfu-run`.", "Slurm"
)

VARIABLES: tuple[Variable[object], ...] = tuple(v for v in list(globals().values()) if isinstance(v, Variable))

COMPILE_CACHE = "MS_COMPILER_CACHE_ENABLE"
PYNATIVE_BLOCKS = "MS_DEV_HOST_BLOCKING_RUN"

# Variables of other programs: the name, the setter, and what ms_kungfu uses the variable for. These variables aren't in
# `VARIABLES`, which the launcher checks before a job starts, and which a Ray driver passes to all nodes.
OTHERS: tuple[tuple[str, str, str], ...] = (
    ("OMP_NUM_THREADS", "user, else launcher", "Threads of a worker. Unset: its share of the cores."),
    ("PYTHONUNBUFFERED", "user, else launcher", "Unset: 1 in each worker, so that output appears "
     "immediately."),
        ("XDG_RUNTIME_DIR", "the system", "Its folder `ms_kungfu` contains a job's secret, socket (for "
     "`kungfu-run status`) and core locks. Unset: `/run/user/UID`. If that folder can't be "
     "used: `/tmp/ms_kungfu-UID`, then `/var/tmp/ms_kungfu-UID`, then `$TMPDIR/ms_kungfu-UID`."),
    ("TMPDIR", "user", "Its folder `ms_kungfu-UID` contains a job's secret "
     "and socket if they can't be in `/tmp` or `/var/tmp`."),
    ("SLURM_CPU_BIND_TYPE", "Slurm", "Whether Slurm has bound tasks to cores (`mask_cpu`)."),
    ("SLURM_CPU_BIND_LIST", "Slurm", "The cores to which the tasks of the node are bound. `kungfu-run` uses the "
     "cores of all these tasks."),
    ("RAY_ADDRESS", "user", "The Ray cluster of `kungfu-run -engine ray` and `ms_kungfu.ray.run`, if the address "
     "is `auto` or missing."),
    ("ONEDNN_MAX_CPU_ISA", "user, else launcher", "The newest instruction set that MindSpore's convolutions may use."
     " If it is unset, `kungfu-run` may set it ([`-cpu-isa`](cores.md#vector-instructions)). "
     "A ledger with shards records the resulting instruction set, because exact results depend on it."),
    ("DNNL_MAX_CPU_ISA", "user", "Used if `ONEDNN_MAX_CPU_ISA` is unset."),
    ("XDG_CACHE_HOME", "user", "Folder `ms_kungfu` contains the measurements of `-cpu-isa auto`. Unset: "
     "`~/.cache`."),
    ("GLOG_v", "user", "MindSpore's log level. `python -m ms_kungfu.fusion` sets it to 4 if it is unset."),
    (PYNATIVE_BLOCKS, "user, else launcher", "1: no queues in PyNative mode ([why](cores.md#pynative-mode))."),
    (COMPILE_CACHE, "user", "`kungfu-run` removes it from a worker's environment, and logs a line if it is 1: "
     "MindSpore's compile cache is off in workers ([why](limits.md))."),
    ("MS_ENABLE_GRACEFUL_EXIT", "user", "Turns on MindSpore's `OnRequestExit` in the compiled step. If it is 1, "
     "`kungfu-run` doesn't set `RANK_SIZE` ([why](mindspore.md))."),
    ("CUDA_HOME", "user", "The folder where the doctor looks for `nvcc`."),
    ("ASCEND_TOOLKIT_HOME", "CANN's set_env.sh", "The folder in which the doctor looks for CANN."),
    ("ASCEND_HOME_PATH", "CANN's set_env.sh", "Used if `ASCEND_TOOLKIT_HOME` is unset."),
    ("MINDSPORE_ROOT", "user", "The folder of the MindSpore for which ms_kungfu is built. Unset: the installed "
     "MindSpore. `-DMINDSPORE_ROOT=` overrides it."),
)  # fmt: skip


def to_markdown() -> str:
    """Return the text of docs/environment.md."""
    lines = [
        "# Environment variables",
        "",
        "Generated by `python -m ms_kungfu.env > docs/environment.md`; edit `ms_kungfu/env.py` instead.",
        "",
        "`kungfu-run` passes its own environment on to the workers, and adds the variables that the launcher",
        "sets. If a value can't be parsed, the program exits with a message that names the variable.",
        "",
        "| variable | value | unit | default | set by | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for v in VARIABLES:
        shown = f"{v.default:g}" if isinstance(v.default, (bool, float)) else str(v.default)
        default = "unset" if v.default is None else shown
        lines.append(f"| `{v.name}` | {v.kind.expected} | {v.kind.unit} | {default} | {v.set_by} | {v.meaning} |")
    lines += [
        "",
        "## Variables of other programs",
        "",
        "ms_kungfu also reads these variables:",
        "",
        "| variable | set by | use |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {set_by} | {meaning} |" for name, set_by, meaning in OTHERS]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    import argparse

    from ms_kungfu._processes import printing

    what = "List the environment variables that ms_kungfu reads or sets, in Markdown."
    parser = argparse.ArgumentParser("python -m ms_kungfu.env", description=what)
    parser.parse_args(arguments)
    with printing(parser.prog):
        print(to_markdown(), end="")


if __name__ == "__main__":
    main()
