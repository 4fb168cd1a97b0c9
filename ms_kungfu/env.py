"""Every environment variable that ms_kungfu reads or sets: its type, unit, default and who sets it.

The table is the single place for names and parsing: code says ``env.COLLECTIVE_TIMEOUT.get()``. A variable that is
unset or empty has its default; text that can't be parsed raises a ValueError that names the variable, the text and what
was expected. ``python -m ms_kungfu.env`` prints the table as docs/environment.md.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Callable, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One variable. `expected` completes the sentence "NAME must be ..."; `set_by` is "launcher", "user" or both."""

    name: str
    parse: Callable[[str], T]
    default: T
    expected: str
    set_by: str
    meaning: str
    unit: str = "-"
    secret: bool = False

    def get(self, environ: Mapping[str, str] | None = None) -> T:
        """The parsed value in `environ` (by default the process's), or the default; ValueError for wrong text."""
        text = (os.environ if environ is None else environ).get(self.name, "")
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError:
            got = "other text (not shown: it is a secret)" if self.secret else repr(text)
            raise ValueError(f"{self.name} must be {self.expected}, got {got}") from None


def _natural(text: str) -> int:
    # int() alone would take "1_0", " 1" and "-1" as well.
    if not (text.isascii() and text.isdigit()):
        raise ValueError(text)
    return int(text)


def _flag(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise ValueError(text)
    return value


def _seconds_or_0(text: str) -> float:
    return 0.0 if text in ("0", "0.0") else _seconds(text)


def _hex(text: str) -> str:
    bytes.fromhex(text)
    return text


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(text)
    return text


def _engine(text: str) -> str:
    if text not in ("auto", "vendor", "staging"):
        raise ValueError(text)
    return text


def _log_level(text: str) -> int:
    if text.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError(text)
    return int(getattr(logging, text.upper()))


def _port_range(text: str) -> range:
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


SELF: Variable[str | None] = Variable(
    "KUNGFU_SELF", str, None, "the worker's 'host:port'", "launcher", "This worker's peer ID."
)
INCARNATION: Variable[int] = Variable(
    "KUNGFU_INCARNATION", _natural, 0, "a number", "launcher", "The cluster version that this process was started for."
)
BROKER: Variable[str | None] = Variable(
    "KUNGFU_BROKER",
    str,
    None,
    "the name of a socket",
    "launcher",
    "Abstract Unix socket of the host's broker, without the leading NUL. Unset: a cluster of one.",
)
JOB: Variable[str | None] = Variable(
    "KUNGFU_JOB",
    str,
    None,
    "a word",
    "launcher",
    "What all workers of a job have in common, on whatever host, and no other job.",
)
JOB_SECRET: Variable[str | None] = Variable(
    "KUNGFU_JOB_SECRET",
    _hex,
    None,
    "hexadecimal digits",
    "launcher",
    "Proves membership to the broker and authorizes writes to the config server. Never log it.",
    secret=True,
)
CONFIG_SERVER: Variable[str | None] = Variable(
    "KUNGFU_CONFIG_SERVER",
    _url,
    None,
    "an http:// or https:// URL",
    "launcher",
    "URL of the config server's `/config`. Unset: there is none, and the cluster can't change.",
)
WATCH: Variable[bool] = Variable(
    "KUNGFU_WATCH", _flag, False, "0 or 1", "launcher", "Whether the launcher follows the config server (`-w`)."
)
HOSTS: Variable[dict[str, int] | None] = Variable(
    "KUNGFU_HOSTS",
    _hosts,
    None,
    "'host:slots', comma-separated",
    "launcher",
    "How many workers each host takes, where `-H` says so. Unset: no limit.",
)
PORT_RANGE: Variable[range | None] = Variable(
    "KUNGFU_PORT_RANGE", _port_range, None, "'first-last' (ports)", "launcher", "Ports for new workers, both included."
)
COLLECTIVE_TIMEOUT: Variable[float] = Variable(
    "KUNGFU_COLLECTIVE_TIMEOUT",
    _seconds,
    600.0,
    "a positive number of seconds",
    "user",
    "How long a collective waits for a rank that is alive but doesn't come.",
    unit="s",
)
JOIN_TIMEOUT: Variable[float] = Variable(
    "KUNGFU_JOIN_TIMEOUT",
    _seconds,
    300.0,
    "a positive number of seconds",
    "user",
    "How long a new cluster version may take to assemble, and a new worker to become ready to join it.",
    unit="s",
)
DEVICE_ENGINE: Variable[str] = Variable(
    "KUNGFU_DEVICE_ENGINE",
    _engine,
    "auto",
    "auto, vendor or staging",
    "user",
    "What reduces between GPUs or Ascend devices: the vendor's library (NCCL, HCCL) where all ranks can use it, that "
    "or an error, or the runtime by way of host memory.",
)
DEVICE_CHUNK_BYTES: Variable[int] = Variable(
    "KUNGFU_DEVICE_CHUNK_BYTES",
    _natural,
    4 << 20,
    "a number",
    "user",
    "Size of the pieces in which device memory goes through host memory. The same at all ranks.",
    unit="bytes",
)
DEVICE_RUNTIME_LIBRARY: Variable[str | None] = Variable(
    "KUNGFU_DEVICE_RUNTIME_LIBRARY",
    str,
    None,
    "a path",
    "user",
    "The CUDA runtime (libcudart) or AscendCL (libascendcl) to open. Unset: the one that is loaded, or that the loader "
    "finds.",
)
DEVICE_ENGINE_LIBRARY: Variable[str | None] = Variable(
    "KUNGFU_DEVICE_ENGINE_LIBRARY",
    str,
    None,
    "a path",
    "user",
    "NCCL (libnccl) or HCCL (libhccl) to open. Unset: the one that is loaded, of the Python package nvidia-nccl-cu*, "
    "of MindSpore, or that the loader finds.",
)
PEER_TIMEOUT: Variable[float] = Variable(
    "KUNGFU_PEER_TIMEOUT",
    _seconds_or_0,
    30.0,
    "a number of seconds, 0 for never",
    "user",
    "How long a worker may stand still, e.g. stopped by SIGSTOP, before the launcher kills it (`-peer-timeout`). "
    "Computing, compiling and waiting for others is not standing still.",
    unit="s",
)
PARKED: Variable[bool] = Variable(
    "KUNGFU_PARKED",
    _flag,
    False,
    "0 or 1",
    "launcher",
    "This process joins a job that is running: not in `init`, but when it is ready to train.",
)
STANDBY: Variable[int | None] = Variable(
    "KUNGFU_STANDBY",
    _natural,
    None,
    "a number",
    "launcher",
    "This process is a spare one: it gets its peer ID when it is needed (`-standby`).",
)
LEDGER_DIR: Variable[str | None] = Variable(
    "KUNGFU_LEDGER_DIR",
    str,
    None,
    "a folder",
    "user",
    "Where each ElasticDataset without a `ledger=` of its own records what was trained, for "
    "`python -m ms_kungfu.dataset.audit`. Unset: nowhere.",
)
LOG_LEVEL: Variable[int] = Variable(
    "KUNGFU_LOG_LEVEL",
    _log_level,
    logging.INFO,
    "DEBUG, INFO, WARNING, ERROR or CRITICAL",
    "user",
    "From which level on a worker's log (stderr) has the lines of ms_kungfu: each resize, death and checkpoint is one "
    "at INFO or above, a wait of 10 s and more a WARNING. Where the program configures Python's logging itself, its "
    "levels hold.",
)
TEST_COMM_DELAY_MS: Variable[int] = Variable(
    "KUNGFU_TEST_COMM_DELAY_MS",
    _natural,
    0,
    "a number",
    "user",
    "For tests only: each all-reduce of MindSpore's kernels takes this much longer. Read at init.",
    unit="ms",
)
METRICS_PORT: Variable[int | None] = Variable(
    "KUNGFU_METRICS_PORT",
    _natural,
    None,
    "a number",
    "user",
    "A `Monitor` serves its metrics on this port of 127.0.0.1, further workers of a host on the following ones; 0: any "
    "free one. Unset: nowhere.",
)
# MindSpore's names, for programs that read them; DEVICE_ID is read by MindSpore itself.
RANK_ID: Variable[int] = Variable("RANK_ID", _natural, 0, "a number", "launcher", "The worker's rank at its start.")
RANK_SIZE: Variable[int] = Variable("RANK_SIZE", _natural, 1, "a number", "launcher", "The size at its start.")
LOCAL_RANK: Variable[int] = Variable(
    "KUNGFU_LOCAL_RANK", _natural, 0, "a number", "launcher", "The worker's rank among those of its host, at its start."
)
LOCAL_SIZE: Variable[int] = Variable(
    "KUNGFU_LOCAL_SIZE", _natural, 1, "a number", "launcher", "How many workers its host has, at its start."
)
DEVICE_ID: Variable[int] = Variable(
    "DEVICE_ID",
    _natural,
    0,
    "a number",
    "launcher",
    "The worker's device, counted among those that it sees; MindSpore reads it. Without devices: the lowest number "
    "that no other worker of the host has.",
)
# What the user lets the job use; set but empty means none. The launcher gives each worker its share.
CUDA_VISIBLE_DEVICES: Variable[str | None] = Variable(
    "CUDA_VISIBLE_DEVICES",
    str,
    None,
    "numbers or UUIDs of GPUs, comma-separated",
    "user, launcher",
    "The GPUs that the job may use (unset: all; empty: none), and in a worker its own, or all with `-allow-nvlink`.",
)
ASCEND_RT_VISIBLE_DEVICES: Variable[str | None] = Variable(
    "ASCEND_RT_VISIBLE_DEVICES",
    str,
    None,
    "numbers of devices, comma-separated",
    "user, launcher",
    "The Ascend devices that the job may use (unset: all; empty: none), and in a worker its own, or all with a rank "
    "table.",
)
RANK_TABLE_FILE: Variable[str | None] = Variable(
    "RANK_TABLE_FILE", str, None, "a path", "user", "Ascend rank table; the workers get the devices that it lists."
)
HCCL_CONFIG_PATH: Variable[str | None] = Variable(
    "MINDSPORE_HCCL_CONFIG_PATH", str, None, "a path", "user", "The same, and the one that counts where both are set."
)

VARIABLES: tuple[Variable[object], ...] = tuple(v for v in list(globals().values()) if isinstance(v, Variable))


def to_markdown() -> str:
    """docs/environment.md."""
    lines = [
        "# Environment variables",
        "",
        "Generated by `python -m ms_kungfu.env > docs/environment.md`; edit `ms_kungfu/env.py` instead.",
        "",
        "`kungfu-run` passes its own environment on to the workers and adds what is set by the launcher. A variable",
        "that can't be parsed stops the program with a sentence that names it.",
        "",
        "| variable | value | unit | default | set by | meaning |",
        "|---|---|---|---|---|---|",
    ]
    for v in VARIABLES:
        default = "unset" if v.default is None else f"{v.default:g}" if isinstance(v.default, float) else str(v.default)
        if v is LOG_LEVEL:
            default = logging.getLevelName(LOG_LEVEL.default)
        if isinstance(v.default, bool):
            default = str(int(v.default))
        lines.append(f"| `{v.name}` | {v.expected} | {v.unit} | {default} | {v.set_by} | {v.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(to_markdown(), end="")
