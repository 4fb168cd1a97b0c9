"""Choose the widest vector instructions that MindSpore's convolutions may use, the same for all workers of a job.

oneDNN prepares a convolution at each launch. With AVX-512, the preparation can take 50 times as long as with AVX2
(docs/troubleshooting.md). ``-cpu-isa auto`` measures both levels once per combination of processor model and
MindSpore version, and stores the result in the user's cache. Each host reports its level when it registers with the
controller. The controller limits all workers to the lowest level of all hosts.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Callable

from msgspec import Struct
from msgspec.structs import asdict

from ms_kungfu import _cpu_isa
from ms_kungfu._files import lock_within, open_regular
from ms_kungfu.launcher import convolution
from ms_kungfu.launcher.wire.messages import CpuIsa

_log = logging.getLogger(__name__)
AUTO, NATIVE = "auto", "native"
NARROW = "AVX2"
_MUCH_SLOWER = 3  # a factor; narrower instructions slow other programs down by far less than this
_CPUINFO_BYTES = 8192  # enough for the first processor; reading the text for hundreds of processors is slow
_OF_THE_PROCESSOR = ("vendor_id", "cpu family", "model", "stepping", "microcode", "flags")
_LOCK_S = 2.0 * convolution.LIMIT_S  # long enough for another process to finish its measurement
_DAY_S = 86400.0
_MOST_CHARS = 4096


class NotMeasuredError(Exception):
    """The convolution could not be measured."""


class Times(Struct, frozen=True):
    """The time of a small convolution in milliseconds.

    `wide`: with all vector instructions of the processor. `narrow`: with none wider than `NARROW`.
    """

    wide: float
    narrow: float

    @property
    def is_much_slower(self) -> bool:
        """Return whether convolutions are much slower with the widest vector instructions than with narrower ones."""
        return self.wide > _MUCH_SLOWER * self.narrow

    def __str__(self) -> str:
        return f"a convolution takes {self.wide:.1f} ms, with {NARROW} at most {self.narrow:.1f} ms"


# ---- the job ----


def settle(hosts: Mapping[str, CpuIsa | None]) -> str | None:
    """Return the highest level of vector instructions that all workers may use, or None if there is no limit.

    Log the limit, unless the user has set the variable on all hosts. `hosts`: the report of each host, by host name.
    """
    known = {name: isa for name, isa in hosts.items() if isa is not None}
    common = _cpu_isa.common(isa.level for isa in known.values())
    cap = common if any(isa.native != common for isa in known.values()) else None
    unknown = next((name for name, isa in known.items() if isa.error), None)
    if unknown is not None:
        _log.info('cpu isa: cap=%s host=%s error="%s"', cap or NATIVE, unknown, known[unknown].error)
    elif cap is not None and not all(isa.is_users for isa in known.values()):
        narrowest = next((name for name, isa in known.items() if isa.level == cap), next(iter(known)))
        reason = known[narrowest].reason or "the processors of the hosts differ"
        _log.info('cpu isa: cap=%s host=%s reason="%s"', cap, narrowest, reason)
    return cap


def other_instructions(name: str, isa: CpuIsa | None, cap: str | None, own: CpuIsa | None) -> str:
    """Return a warning if a joining host lacks vector instructions that the job's workers use, or "" if it has them."""
    used = cap or (own.native if own is not None else "")
    if isa is None or not used or _cpu_isa.common((used, isa.native)) == used:
        return ""
    return (
        f"{name} supports at most {isa.native}, but the job's workers use {used}; results can differ in rounding; "
        f"start the job with -cpu-isa {isa.native.lower()} to use the same on all hosts"
    )


# ---- a host ----


def of_host(
    wanted: str, environ: Mapping[str, str], cpuinfo: str | None = None, measure: Callable[[str], Times] | None = None
) -> CpuIsa | None:
    """Return the widest vector instructions that the workers on this host should use.

    Return None if the processor supports none of the levels in `_cpu_isa`. The first call may take
    `convolution.LIMIT_S` or longer.

    Args:
        wanted: `AUTO`, `NATIVE` or one of `_cpu_isa.names()`. A variable that the user has set takes precedence.
        environ: the launcher's environment.
        cpuinfo: the text of /proc/cpuinfo, which a test can replace.
        measure: a function that takes `cpuinfo` and measures the convolution, as `measured` does.
    """
    cpuinfo = _read_cpuinfo() if cpuinfo is None else cpuinfo
    native = _cpu_isa.native(cpuinfo)
    if not native:
        return None
    variable, value = _cpu_isa.of_user(environ)
    if variable:
        level = _cpu_isa.level_named(value) or native
        return CpuIsa(_cpu_isa.common((level, native)), native, variable, is_users=True)
    if wanted not in (AUTO, NATIVE):
        return CpuIsa(_cpu_isa.common((wanted, native)), native, f"-cpu-isa {wanted.lower()}")
    if wanted == NATIVE or not _cpu_isa.has_avx512(native):
        return CpuIsa(native, native)
    try:
        times = (measured if measure is None else measure)(cpuinfo)
    except NotMeasuredError as error:
        return CpuIsa(native, native, error=str(error))
    return CpuIsa(NARROW, native, str(times)) if times.is_much_slower else CpuIsa(native, native)


def _read_cpuinfo() -> str:
    try:
        with open("/proc/cpuinfo", "rb", buffering=0) as file:
            return (file.read(_CPUINFO_BYTES) or b"").decode(errors="replace")
    except OSError:
        return ""


# ---- the measurement ----


def measured(cpuinfo: str | None = None) -> Times:
    """Return the times on this processor with the installed MindSpore, from the user's cache if possible.

    Only one process measures at a time. Raises NotMeasuredError if the convolution can't be measured. The cache stores
    such a failure for a day.
    """
    library = find_library()
    if library is None:
        return Times(0.0, 0.0)  # without MindSpore there are no convolutions
    cpuinfo = _read_cpuinfo() if cpuinfo is None else cpuinfo
    try:
        file = _cache_file(library, cpuinfo)
        found = _kept(file)
        if found is None:
            file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _one_at_a_time(file.with_name("convolution.lock")):
                found = _kept(file)
                if found is None:
                    found = _try(library)
                    _keep(found, file)
    except (OSError, RuntimeError):  # no home folder, or no space in it
        found = _try(library)
    if isinstance(found, str):
        raise NotMeasuredError(found)
    return found


def find_library() -> Path | None:
    """Find the oneDNN library of MindSpore without importing MindSpore. Return None if MindSpore isn't installed."""
    try:
        found = importlib.util.find_spec("mindspore")
    except (ImportError, ValueError):
        return None
    if found is None or found.origin is None:
        return None
    return next(iter(sorted((Path(found.origin).parent / "lib").glob("libdnnl.so*"))), None)


def _try(library: Path) -> Times | str:
    """Measure both times, each in a separate process. Return the times, or the reason for a failure.

    oneDNN reads its limit only once per process, and a crash must not end this process.
    """
    try:
        return Times(_run(library, None), _run(library, NARROW))
    except NotMeasuredError as error:
        return str(error)


def _run(library: Path, cap: str | None) -> float:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", convolution.__file__, str(library)],
            env=_cpu_isa.capped(os.environ, cap), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            errors="replace", timeout=convolution.LIMIT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise NotMeasuredError(f"a convolution took more than {convolution.LIMIT_S} s") from None
    except OSError as error:
        raise NotMeasuredError(f"the convolution could not be measured: {error}") from None
    try:
        return float(done.stdout)
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise NotMeasuredError(f"the convolution could not be measured: {last[0]}") from None


# ---- the cache ----


def _cache_file(library: Path, cpuinfo: str) -> Path:
    """Return the path of the cache file for this processor and this MindSpore version."""
    first = cpuinfo.partition("\n\n")[0].splitlines()
    processor = [line for line in first if line.startswith(_OF_THE_PROCESSOR)]
    info = os.stat(library)
    about = "\n".join([*processor, str(library), str(info.st_size), str(info.st_mtime_ns)])
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ms_kungfu"
    return folder / f"convolution-{hashlib.sha256(about.encode()).hexdigest()[:16]}.json"


def _kept(file: Path) -> Times | str | None:
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError), os.fdopen(open_regular(file)) as opened:
        found = json.loads(opened.read(_MOST_CHARS))
        if "error" not in found:
            return Times(float(found["wide"]), float(found["narrow"]))
        if time.time() - os.fstat(opened.fileno()).st_mtime < _DAY_S:
            return str(found["error"])
    return None


def _keep(found: Times | str, file: Path) -> None:
    temporary = file.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):  # e.g. a full disk; the next job measures again
        temporary.write_text(json.dumps({"error": found} if isinstance(found, str) else asdict(found)))
        temporary.replace(file)


@contextlib.contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock on the file `path`. If another process still holds it after `_LOCK_S`, continue without the lock."""
    with os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT), "r+") as file:
        lock_within(file.fileno(), _LOCK_S)
        yield
