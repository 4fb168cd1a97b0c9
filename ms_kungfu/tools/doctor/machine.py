"""Check the CPU, the cores, shared memory and the limits of the process."""

from __future__ import annotations

from collections.abc import Iterator

from ms_kungfu._cpu_isa import VARIABLE, of_user
from ms_kungfu.launcher.cpu_isa import NARROW, NotMeasuredError
from ms_kungfu.launcher.quota import cpu_quota, within_quota
from ms_kungfu.tools.doctor.finding import Finding, missing, ok, wrong
from ms_kungfu.tools.doctor.system import LOAD_RUNTIME, System

_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq")
# This program creates, maps and touches the shared memory of a cluster, as the launcher and the workers do, and returns
# its size. The program's first argument is the number of workers.
_MAKE_SEGMENT = """
import mmap, os
import ms_kungfu._core as core
fd = core.create_segment(int(sys.argv[1]), 0, 1)
size = os.fstat(fd).st_size
with mmap.mmap(fd, size) as memory:
    memory[-1] = 1
answer(size)
"""
_FEWEST_FILES = 256
_FILES_PER_WORKER = 8  # the launcher needs descriptors for pipes, a broker connection, and short-lived purposes


def check_cpu(system: System) -> Iterator[Finding]:
    """Check the CPU, and the instruction set that the reductions use."""
    flags = set((system.search(r"^(?:flags|Features)\s*:\s*(.+)$", "/proc/cpuinfo") or "").split())
    outcome = system.run(LOAD_RUNTIME)
    used = "unknown, as the runtime can't be loaded" if outcome.error else str(outcome.value)
    found = f"{system.cpu()}; instruction set of the reductions: {used}"
    if system.architecture in ("x86_64", "AMD64") and "avx2" not in flags:
        remedy = "reductions are slower; in a virtual machine, pass the host's CPU features on to it"
        yield missing("CPU", f"{found}; no AVX2", remedy)
        return
    if used == "avx2" and not flags.issuperset(_AVX512):
        found += f" (no {', '.join(f for f in _AVX512 if f not in flags)})"
    yield ok("CPU", found)


def check_convolutions(system: System) -> Iterator[Finding]:
    """Check whether MindSpore's convolutions are faster without AVX-512.

    With AVX-512, oneDNN may spend much more time at each launch on preparing a convolution than on computing it.
    """
    flags = set((system.search(r"^flags\s*:\s*(.+)$", "/proc/cpuinfo") or "").split())
    if system.version("mindspore") is None or not flags.issuperset(_AVX512):
        return
    variable, cap = of_user(system.environ)
    if variable:
        yield ok("convolutions", f"by instructions up to {cap} ({variable})")
        return
    try:
        times = system.convolutions()
    except NotMeasuredError as error:
        yield missing("convolutions", f"not measured: {error}")
        return
    remedy = f"kungfu-run caps its workers at {NARROW}; without kungfu-run, export {VARIABLE}={NARROW}"
    yield ok("convolutions", str(times), remedy if times.is_much_slower else "")


def check_cores(system: System) -> Iterator[Finding]:
    """Check how many cores the machine has, how many this process may use, and the control group's quota."""
    machine, allowed = system.cores()
    quota = cpu_quota(system.read)
    found = f"{allowed} of {machine} allowed by affinity"
    if quota is None:
        yield ok("cores", f"{found}, no quota")
    else:
        fit = (
            f"kungfu-run uses {within_quota(allowed, quota)} of them; without kungfu-run, use `taskset -c LIST "
            "python ...`"
        )
        remedy = f"on more cores, MindSpore's threads use up the quota by spinning: {fit}"
        yield ok("cores", f"{found}, a quota of {quota:g} by the control group", remedy if quota < allowed else "")


def check_shared_memory(system: System) -> Iterator[Finding]:
    """Check that the shared memory of a job with one worker per core can be created."""
    workers = min(max(2, system.cores()[1]), 256)
    outcome = system.run(_MAKE_SEGMENT, str(workers))
    if not outcome.error:
        size = outcome.value / (1 << 20)
        yield ok(
            "shared memory", f"memfd works: {size:.0f} MiB for {workers} workers; pages are allocated on first use"
        )
    elif _number(system.read("/proc/sys/vm/memfd_noexec")) == 2:
        yield wrong("shared memory", f"memfd: {outcome.error}", "as root: sysctl vm.memfd_noexec=1 (it is 2)")
    else:
        remedy = (
            "raise `ulimit -f` and `ulimit -v` if they are set; in a container, the seccomp profile must "
            "allow memfd_create"
        )
        yield wrong("shared memory", f"memfd: {outcome.error}", remedy)


def check_huge_pages(system: System) -> Iterator[Finding]:
    """Check whether the system uses huge pages for shared memory.

    The runtime doesn't request huge pages, but the system may use them for all shared memory.
    """
    path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled"
    chosen = system.search(r"\[(\w+)\]", path)
    if chosen is None:
        yield missing("huge pages", "not for shared memory on this kernel; ordinary pages are used")
    elif chosen in ("always", "within_size", "force"):
        yield ok("huge pages", f"of shared memory: {chosen}")
    else:
        remedy = f"they aren't required; to try them: `echo within_size > {path}` as root"
        yield missing("huge pages", f"of shared memory: {chosen}; ordinary pages are used", remedy)


def check_limits(system: System) -> Iterator[Finding]:
    """Check that RLIMIT_NOFILE allows a launcher with one worker per core. Show RLIMIT_AS and RLIMIT_FSIZE, too."""
    files, memory, size = (system.limit(name) for name in ("NOFILE", "AS", "FSIZE"))
    needed = max(_FEWEST_FILES, 64 + _FILES_PER_WORKER * system.cores()[1])
    shown = [f"{'no limit' if files is None else files} open files"]
    shown += [
        f"{what} {limit >> 20} MiB" for what, limit in (("memory", memory), ("file size", size)) if limit is not None
    ]
    if files is not None and files < needed:
        yield wrong("limits", ", ".join(shown), f"ulimit -n {needed}, which a job with one worker per core needs")
    else:
        yield ok("limits", ", ".join(shown))


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None
