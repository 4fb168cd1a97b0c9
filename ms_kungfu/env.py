"""Every environment variable that ms_kungfu reads or sets: its type, unit, default and setter.

The table is the single place for names and parsing: code says ``env.COLLECTIVE_TIMEOUT.get()``. A variable that is
unset or empty has its default; text that can't be parsed raises a ValueError that names the variable, the text and what
was expected. ``python -m ms_kungfu.env`` prints the table as docs/environment.md.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Callable, Generic, TypeVar

_MOST_SECONDS = 2e6  # 23 days: poll(2) counts milliseconds in 31 bits
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
    """One variable. `set_by` is "launcher", "user" or both; or the one program that sets it."""

    name: str
    kind: Kind[T]
    default: T
    meaning: str
    set_by: str = "launcher"
    secret: bool = False

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the parsed value in `environ` (by default the process's), or the default; ValueError if it's wrong."""
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
    """Make a variable without a default."""
    return Variable(name, kind, None, meaning, set_by, secret)


def _natural(text: str) -> int:
    # int() alone would accept "1_0", " 1" and "-1" as well.
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= _MOST_SECONDS:  # nor NaN
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
    """Parse ``"first-last"``, both included."""
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

SELF = _optional("KUNGFU_SELF", Kind(str, "the worker's 'host:port'"), "This worker's peer ID.")
INCARNATION = Variable("KUNGFU_INCARNATION", NUMBER, 0, "The cluster version that this process was started for.")
BROKER = _optional(
    "KUNGFU_BROKER",
    Kind(str, "the name of a socket"),
    "Abstract Unix socket of the host's broker, without the leading NUL. Unset: a cluster of one.",
)
JOB = _optional(
    "KUNGFU_JOB", Kind(str, "a word"), "What all workers of a job have in common, on whatever host, and no other job."
)
JOB_SECRET = _optional(
    "KUNGFU_JOB_SECRET",
    Kind(_hex, "hexadecimal digits"),
    "Proves membership to the broker (HMAC) and authorizes writes to the config server (`Bearer`). Never log it. Set "
    "by the user it is the job's, which several hosts share, or that of a config server elsewhere.",
    set_by="user, launcher",
    secret=True,
)
TLS_CERT = _optional(
    "KUNGFU_TLS_CERT",
    PATH,
    "This host's certificate, in PEM. With the next two it turns on TLS for all that hosts send each other: data, the "
    "launchers' words, the config server (https). Unset: that is in the clear.",
    set_by="user",
)
TLS_KEY = _optional("KUNGFU_TLS_KEY", PATH, "Its key, in PEM and without a password.", set_by="user")
TLS_CA = _optional(
    "KUNGFU_TLS_CA", PATH, "The certificate, in PEM, of the CA that has to have signed every host's.", set_by="user"
)
CONFIG_SERVER = _optional(
    "KUNGFU_CONFIG_SERVER",
    Kind(_url, "an http://, https://, etcd:// or etcds:// URL"),
    "URL of the config server's `/config`, or of the job in an etcd. Unset: there is none, and the cluster "
    "can't change. In another shell it names the job of `kungfu-run resize` and `evict`; `kungfu-run` itself doesn't "
    "read it.",
    set_by="launcher, or by hand",
)
WATCH = Variable("KUNGFU_WATCH", FLAG, False, "Whether the launcher follows the config server (`-w`).")
HOSTS = _optional(
    "KUNGFU_HOSTS",
    Kind(_hosts, "'host:slots', comma-separated"),
    "How many workers each host takes, where `-H` says so. Unset: no limit.",
)
PORT_RANGE = _optional(
    "KUNGFU_PORT_RANGE", Kind(port_range, "'first-last' (ports)"), "Ports for new workers, both included."
)
COLLECTIVE_TIMEOUT = Variable(
    "KUNGFU_COLLECTIVE_TIMEOUT",
    SECONDS,
    600.0,
    "How long a collective waits for a rank that is alive but doesn't come. In the last 5 s, at most the last half, "
    "the launcher looks for a rank that is stuck: it logs that rank's stack, and with `-w` ends it.",
    set_by="user",
)
JOIN_TIMEOUT = Variable(
    "KUNGFU_JOIN_TIMEOUT",
    SECONDS,
    300.0,
    "How long a new cluster version may take to assemble, a new worker to become ready to join it, and the hosts of a "
    "job to meet before it begins. In the last 5 s of the first, at most the last half, the launcher ends a rank that "
    "is stuck, as with KUNGFU_COLLECTIVE_TIMEOUT.",
    set_by="user",
)
DISTRIBUTE_HOSTS = _optional(
    "KUNGFU_DISTRIBUTE_HOSTS",
    Kind(_hosts, "'host:slots', comma-separated"),
    "The hosts of `kungfu-distribute`, where it has several: those of a `kungfu-run` that is given neither `-H` nor "
    "`-hostfile`, nor `-standalone`.",
    set_by="kungfu-distribute",
)
DISTRIBUTE_SHELL = _optional(
    "KUNGFU_DISTRIBUTE_SHELL",
    NUMBER,
    "The process of `kungfu-distribute` on this host, to which the `kungfu-run` of the head tells by SIGUSR1 that the "
    "job has begun.",
    set_by="kungfu-distribute",
)
RAY_FOLDER = _optional(
    "KUNGFU_RAY_FOLDER",
    PATH,
    "Where a worker of `ms_kungfu.ray.run` finds its function, and leaves what that has returned.",
    set_by="ms_kungfu.ray",
)
DEVICE_ENGINE = Variable(
    "KUNGFU_DEVICE_ENGINE",
    Kind(_one_of("auto", "vendor", "staging"), "auto, vendor or staging"),
    "auto",
    "What reduces between GPUs or Ascend devices: the vendor's library (NCCL, HCCL) where all ranks can use it, that "
    "or an error, or the runtime by way of host memory.",
    set_by="user",
)
DEVICE_CHUNK_BYTES = Variable(
    "KUNGFU_DEVICE_CHUNK_BYTES",
    Kind(_natural, "a number", "bytes"),
    4 << 20,
    "Size of the pieces in which device memory goes through host memory. The same at all ranks.",
    set_by="user",
)
DEVICE_RUNTIME_LIBRARY = _optional(
    "KUNGFU_DEVICE_RUNTIME_LIBRARY",
    PATH,
    "The CUDA runtime (libcudart) or AscendCL (libascendcl) to open. Unset: the one that is loaded, or that the loader "
    "finds.",
    set_by="user",
)
DEVICE_ENGINE_LIBRARY = _optional(
    "KUNGFU_DEVICE_ENGINE_LIBRARY",
    PATH,
    "NCCL (libnccl) or HCCL (libhccl) to open. Unset: the one that is loaded, of the Python package nvidia-nccl-cu*, "
    "of MindSpore, or that the loader finds.",
    set_by="user",
)
PEER_TIMEOUT = Variable(
    "KUNGFU_PEER_TIMEOUT",
    Kind(_seconds_or_0, "a number of seconds up to 2e6, 0 for never", "s"),
    30.0,
    "How long a worker may stand still, e.g. stopped by SIGSTOP, before the launcher kills it (`-peer-timeout`). "
    "Computing, compiling and waiting for others is not standing still.",
    set_by="user",
)
PARKED = Variable(
    "KUNGFU_PARKED",
    FLAG,
    False,
    "This process joins a job that is running: not in `init`, but when it is ready to train.",
)
STANDBY = _optional(
    "KUNGFU_STANDBY",
    NUMBER,
    "This process is a spare one: it gets its peer ID when it is needed (`-standby`, a schedule).",
)
LEDGER_DIR = _optional(
    "KUNGFU_LEDGER_DIR",
    Kind(str, "a folder"),
    "Where each ElasticDataset without a `ledger=` of its own records what was trained, for "
    "`python -m ms_kungfu.dataset.audit`. Unset: nowhere.",
    set_by="user",
)
CONTENTS_CHECK = Variable(
    "KUNGFU_CONTENTS_CHECK",
    Kind(_one_of("some", "all", "none"), "some, all or none"),
    "some",
    "Which samples the workers compare by their content as training begins, for each ElasticDataset without a "
    "`contents_check=` of its own.",
    set_by="user",
)
REPLAY = _optional(
    "KUNGFU_REPLAY",
    PATH,
    "What `python -m ms_kungfu.replay` asks of the program that it runs again: its training compares its steps with "
    "those on record, instead of recording them, and asks for no other size.",
    set_by="replay",
)
LOG_LEVEL = Variable(
    "KUNGFU_LOG_LEVEL",
    Kind(_level, "DEBUG, INFO, WARNING, ERROR or CRITICAL"),
    "INFO",
    "From which level on a worker's log (stderr) has the lines of ms_kungfu: each resize, death and checkpoint is one "
    "at INFO or above, a wait of 10 s and more a WARNING. Where the program configures Python's logging itself, its "
    "levels hold.",
    set_by="user",
)
TEST_COMM_DELAY_MS = Variable(
    "KUNGFU_TEST_COMM_DELAY_MS",
    Kind(_natural, "a number", "ms"),
    0,
    "For tests only: each all-reduce of MindSpore's kernels takes this much longer. Read at init.",
    set_by="user",
)
MSRUN_SIZE = _optional(
    "KUNGFU_MSRUN_SIZE",
    NUMBER,
    "V, the ranks of the virtual world that `mindspore.communication` answers with (`--msrun`). Unset: it is "
    "MindSpore's own.",
)
MSRUN_RANK = Variable("KUNGFU_MSRUN_RANK", NUMBER, 0, "Which of those this worker is, as long as it lives.")
METRICS_PORT = _optional(
    "KUNGFU_METRICS_PORT",
    NUMBER,
    "A `Monitor` serves its metrics on this port of 127.0.0.1, further workers of a host on the following ones; 0: any "
    "free one. Unset: nowhere.",
    set_by="user",
)
START_SIZE = _optional("KUNGFU_START_SIZE", NUMBER, "How many workers the job began with, for those that join, too.")
START_HOSTS = Variable(
    "KUNGFU_START_HOSTS", NUMBER, 1, "On how many hosts the job's first workers were, for those that join, too."
)
# MindSpore's names, for programs that read them; DEVICE_ID is read by MindSpore itself.
RANK_ID = Variable("RANK_ID", NUMBER, 0, "The worker's rank at its start.")
RANK_SIZE = Variable("RANK_SIZE", NUMBER, 1, "The size at its start.")
LOCAL_RANK = Variable("KUNGFU_LOCAL_RANK", NUMBER, 0, "The worker's rank among those of its host, at its start.")
LOCAL_SIZE = Variable("KUNGFU_LOCAL_SIZE", NUMBER, 1, "How many workers its host has, at its start.")
PARENT = _optional(
    "KUNGFU_PARENT",
    Kind(_parent, "'process ID:rank:size:local rank:local size:cluster version'"),
    "In a child process of a worker: the worker's process and its numbers as the child started. A child answers rank "
    "and size by them, and takes no part in collectives.",
    set_by="worker",
)
# PyTorch's names for the same.
PLAIN_RANK = Variable("RANK", NUMBER, 0, "As `RANK_ID`, for programs that read torchrun's names.")
WORLD_SIZE = Variable("WORLD_SIZE", NUMBER, 1, "As `RANK_SIZE`.")
PLAIN_LOCAL_RANK = Variable("LOCAL_RANK", NUMBER, 0, "As `KUNGFU_LOCAL_RANK`.")
LOCAL_WORLD_SIZE = Variable("LOCAL_WORLD_SIZE", NUMBER, 1, "As `KUNGFU_LOCAL_SIZE`.")
CORES_PER_WORKER = _optional(
    "KUNGFU_CORES_PER_WORKER",
    NUMBER,
    "How many cores each worker has, whatever the size of the cluster (`-cores-per-worker`, or 1 once the training "
    "uses shards). Unset: they are divided again at each change.",
)
DEVICE_ID = Variable(
    "DEVICE_ID",
    NUMBER,
    0,
    "The worker's device, counted among those that it sees; MindSpore reads it. Without devices: the lowest number "
    "that no other worker of the host has.",
)
# Devices that the user allows the job; set but empty means none. The launcher gives each worker its share.
CUDA_VISIBLE_DEVICES = _optional(
    "CUDA_VISIBLE_DEVICES",
    Kind(str, "numbers or UUIDs of GPUs, comma-separated"),
    "The GPUs that the job may use (unset: all; empty: none), and in a worker its own, or all with `-allow-nvlink`.",
    set_by="user, launcher",
)
ASCEND_RT_VISIBLE_DEVICES = _optional(
    "ASCEND_RT_VISIBLE_DEVICES",
    Kind(str, "numbers of devices, comma-separated"),
    "The Ascend devices that the job may use (unset: all; empty: none), and in a worker its own, or all with a rank "
    "table.",
    set_by="user, launcher",
)
RANK_TABLE_FILE = _optional(
    "RANK_TABLE_FILE", PATH, "Ascend rank table; the workers get the devices that it lists.", set_by="user"
)
HCCL_CONFIG_PATH = _optional(
    "MINDSPORE_HCCL_CONFIG_PATH", PATH, "The same, and the one that counts where both are set.", set_by="user"
)
# etcdctl's names, for `-config-server etcd://...`; each host and each worker that writes needs them.
ETCD_USER = _optional(
    "ETCDCTL_USER",
    Kind(str, "NAME:PASSWORD, or NAME"),
    "The user of etcd that the job is, where the config server is one.",
    set_by="user",
    secret=True,
)
ETCD_PASSWORD = _optional(
    "ETCDCTL_PASSWORD", Kind(str, "a password"), "His password, where it isn't in `ETCDCTL_USER`.", "user", secret=True
)
ETCD_CACERT = _optional(
    "ETCDCTL_CACERT", PATH, "The CA of etcd's certificates (`etcds://`). Unset: the system's.", set_by="user"
)
ETCD_CERT = _optional("ETCDCTL_CERT", PATH, "The job's own certificate for etcd, where it asks for one.", set_by="user")
ETCD_KEY = _optional("ETCDCTL_KEY", PATH, "The key of that certificate.", set_by="user")
# Slurm's variables for each task.
_NODES = Kind(str, "a list of nodes like gpu[01-03],login")
_COUNTS = Kind(str, "a number for each node, like 2(x3),1")
SLURM_JOB_ID = _optional("SLURM_JOB_ID", NUMBER, "The allocation.", set_by="Slurm")
SLURM_STEP_ID = _optional(
    "SLURM_STEP_ID",
    NUMBER,
    "The step of it. With both, and neither `-H`, `-hostfile`, `-standalone`, `-self` nor `-nic`, the nodes of the "
    "step are the job's hosts.",
    set_by="Slurm",
)
SLURM_JOB_NODELIST = _optional("SLURM_JOB_NODELIST", _NODES, "The nodes of the allocation.", set_by="Slurm")
SLURM_STEP_NODELIST = _optional(
    "SLURM_STEP_NODELIST", _NODES, "The nodes of the step. Unset: those of the allocation.", set_by="Slurm"
)
SLURM_TASKS_PER_NODE = _optional(
    "SLURM_TASKS_PER_NODE",
    _COUNTS,
    "Tasks on each node: so many workers it may have, where they are several on some node.",
    set_by="Slurm",
)
SLURM_STEP_TASKS_PER_NODE = _optional(
    "SLURM_STEP_TASKS_PER_NODE", _COUNTS, "The same for the step, and the one that counts where it is set.", "Slurm"
)
SLURM_JOB_CPUS_PER_NODE = _optional(
    "SLURM_JOB_CPUS_PER_NODE",
    _COUNTS,
    "Cores of the allocation on each node: so many workers it may have, where srun starts one task on each.",
    set_by="Slurm",
)
SLURM_NODEID = Variable("SLURM_NODEID", NUMBER, 0, "Which of the step's nodes this one is.", set_by="Slurm")
SLURM_LOCALID = Variable(
    "SLURM_LOCALID", NUMBER, 0, "Which task of its node this is. The first is its `kungfu-run`.", set_by="Slurm"
)

VARIABLES: tuple[Variable[object], ...] = tuple(v for v in list(globals().values()) if isinstance(v, Variable))

COMPILE_CACHE = "MS_COMPILER_CACHE_ENABLE"

# Variables of other programs, read by name in the code that needs them: what sets them, and what ms_kungfu uses of
# them. They are no `VARIABLES`: those of the user's are checked before a job starts, and a Ray driver passes them on to
# all nodes.
OTHERS: tuple[tuple[str, str, str], ...] = (
    ("OMP_NUM_THREADS", "user, else launcher", "Threads of a worker. Set, `kungfu-run` leaves it alone, as it does"
     " `PYTHONUNBUFFERED`; unset, it is the worker's share of the cores."),
    ("PYTHONUNBUFFERED", "user, else launcher", "Unset: 1 in a worker, so that its lines come as they are printed."),
    ("XDG_RUNTIME_DIR", "the system", "Its folder `ms_kungfu` holds a job's secret, its socket for"
     " `kungfu-run status`, and the locks of its cores. Unset: `/run/user/UID`. If that can't be used:"
     " `/tmp/ms_kungfu-UID`, then `/var/tmp/ms_kungfu-UID`, then `$TMPDIR/ms_kungfu-UID`."),
    ("TMPDIR", "user", "The folder for temporary files; in its folder `ms_kungfu-UID` the same where it can't be in"
     " `/tmp` and `/var/tmp`."),
    ("SLURM_CPU_BIND_TYPE", "Slurm", "Whether Slurm has bound tasks to cores (`mask_cpu`)."),
    ("SLURM_CPU_BIND_LIST", "Slurm", "Which cores the node's tasks are bound to: `kungfu-run` takes those of all."),
    ("RAY_ADDRESS", "user", "The Ray cluster of `kungfu-run -engine ray` and `ms_kungfu.ray.run`, if none is given,"
     " or `auto`."),
    ("ONEDNN_MAX_CPU_ISA", "user, else launcher", "The most of a processor's instructions that MindSpore's convolutions"
     " take. Unset, `kungfu-run` sets it if [`-cpu-isa`](launcher.md#what-a-worker-gets) says so. The doctor shows it,"
     " and a ledger of shards records what follows from it, since bits hang on it."),
    ("DNNL_MAX_CPU_ISA", "user", "The same, if that is unset."),
    ("XDG_CACHE_HOME", "user", "Its folder `ms_kungfu` holds what `-cpu-isa auto` has measured. Unset: `~/.cache`."),
    ("GLOG_v", "user", "MindSpore's level of logging. Unset: 4 in `python -m ms_kungfu.fusion`."),
    (COMPILE_CACHE, "user", "`kungfu-run` removes it from a worker's environment, with a log line if it is 1:"
     " MindSpore's compile cache is off in workers ([why](limits.md))."),
    ("MS_ENABLE_GRACEFUL_EXIT", "user", "MindSpore's `OnRequestExit` in the compiled step. With 1 `kungfu-run` doesn't"
     " set `RANK_SIZE` ([why](mindspore.md))."),
    ("CUDA_HOME", "user", "Where the doctor looks for `nvcc`."),
    ("ASCEND_TOOLKIT_HOME", "CANN's set_env.sh", "Where the doctor looks for CANN."),
    ("ASCEND_HOME_PATH", "CANN's set_env.sh", "The same, where that is unset."),
    ("MINDSPORE_ROOT", "user", "When ms_kungfu is built: the folder of the MindSpore to build for. Unset: the one that"
     " is installed. `-DMINDSPORE_ROOT=` goes before."),
)  # fmt: skip


def to_markdown() -> str:
    """Return docs/environment.md."""
    lines = [
        "# Environment variables",
        "",
        "Generated by `python -m ms_kungfu.env > docs/environment.md`; edit `ms_kungfu/env.py` instead.",
        "",
        "`kungfu-run` passes its own environment on to the workers and adds what the launcher sets. A",
        "variable that can't be parsed stops the program with a message that names it.",
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
        "## Of other programs",
        "",
        "Read, too:",
        "",
        "| variable | set by | what is taken from it |",
        "|---|---|---|",
    ]
    lines += [f"| `{name}` | {set_by} | {meaning} |" for name, set_by, meaning in OTHERS]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    import argparse

    from ms_kungfu._processes import printing

    what = "Lists the environment variables that ms_kungfu reads or sets, in Markdown."
    parser = argparse.ArgumentParser("python -m ms_kungfu.env", description=what)
    parser.parse_args(arguments)
    with printing(parser.prog):
        print(to_markdown(), end="")


if __name__ == "__main__":
    main()
