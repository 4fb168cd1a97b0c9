"""Check GPUs with CUDA and NCCL, and Ascend devices with CANN and HCCL."""

from __future__ import annotations

from collections.abc import Iterator

from ms_kungfu import env
from ms_kungfu.devices import rank_table
from ms_kungfu.devices.libraries import ACL, CUDA_DRIVER, HCCL, MINDSPORE_GPU, NCCL, Library, candidates
from ms_kungfu.launcher.devices import ASCEND, GPU, DeviceListError, names_listed
from ms_kungfu.tools.doctor.finding import Finding, missing, ok, wrong
from ms_kungfu.tools.doctor.system import Outcome, System

_TOOLKIT = "/usr/local/Ascend/ascend-toolkit/latest"
_DRIVER_INFO = "/usr/local/Ascend/driver/version.info"

# This program opens a library, and returns NCCL's version, or 0 if the library isn't NCCL.
_OPEN = """
import ctypes
try:
    library = ctypes.CDLL(sys.argv[1])
except OSError as error:
    sys.exit(str(error))
version = ctypes.c_int(0)
if hasattr(library, "ncclGetVersion"):
    library.ncclGetVersion(ctypes.byref(version))
answer(version.value)
"""
# This program returns the CUDA version that the driver supports (12040 is 12.4), and the number of GPUs.
_ASK_DRIVER = """
import ctypes, os
os.environ.pop("CUDA_VISIBLE_DEVICES", None)
cuda, version, count = ctypes.CDLL(sys.argv[1]), ctypes.c_int(0), ctypes.c_int(0)
def call(name, *arguments):
    status = getattr(cuda, name)(*arguments)
    if status != 0:
        text = ctypes.c_char_p()
        known = cuda.cuGetErrorName(status, ctypes.byref(text)) == 0 and text.value
        sys.exit(f"{name}: {text.value.decode() if known else status}")
call("cuInit", 0)
call("cuDriverGetVersion", ctypes.byref(version))
call("cuDeviceGetCount", ctypes.byref(count))
answer([version.value, count.value])
"""


def check_gpu(system: System) -> Iterator[Finding]:
    """Check the GPUs and their driver."""
    nodes = GPU.count(system.names("/dev"))
    version = system.search(r"Kernel Module(?:\s+for\s+\S+)?\s+([\d.]+)", "/proc/driver/nvidia/version")
    driver = f"driver {version}" if version else "no driver version"
    if not nodes and version is None:
        yield missing("GPU", "none: no /dev/nvidia*, no driver")
    elif not nodes:  # a container without a GPU counts as a machine without a GPU
        remedy = "to use the host's GPUs in a container: start it with --gpus all (NVIDIA's container toolkit)"
        yield missing("GPU", f"{driver} is loaded, but there is no /dev/nvidia*", remedy)
    elif (outcome := _ask_driver(system)).error:
        remedy = "install the driver's libraries; in a container: start it with --gpus all (NVIDIA's container toolkit)"
        yield wrong("GPU", f"{nodes} in /dev, {driver}, but a program can't use the GPUs: {outcome.error}", remedy)
    else:
        cuda, count = outcome.value
        numbers = f"{count}" if count == nodes else f"{count} ({nodes} in /dev)"
        yield ok("GPU", f"{numbers}, {driver}, CUDA up to {cuda // 1000}.{cuda % 1000 // 10}")


def check_mindspore_gpu(system: System) -> Iterator[Finding]:
    """Check the CUDA libraries that MindSpore's own GPU plugin needs.

    Without these libraries, the device target GPU doesn't exist.
    """
    if system.version("mindspore") is None:
        return
    has_gpu = GPU.count(system.names("/dev")) > 0
    absent = [library.what for library in MINDSPORE_GPU if _first_that_opens(system, library) is None]
    libraries = f"the {len(MINDSPORE_GPU)} libraries that MindSpore's GPU plugin needs"
    nvcc = f"{system.environ.get('CUDA_HOME', '')}/bin/nvcc"
    if absent:
        remedy = (
            "pip install the nvidia-...-cu11 packages that contain them, and add their lib folders to LD_LIBRARY_PATH"
        )
        yield missing(
            "CUDA", f"not found: {', '.join(absent)}, needed by MindSpore's GPU plugin", remedy if has_gpu else ""
        )
    elif not system.is_file(nvcc):
        yield wrong(
            "CUDA",
            f"{libraries}, but MindSpore reads the CUDA version from the nvcc in CUDA_HOME, and there is "
            f"no file {nvcc}",
            "set CUDA_HOME to CUDA 11's folder; a script bin/nvcc that prints 'release 11.6, V11.6.124' is sufficient",
        )
    else:
        yield ok("CUDA", libraries)


def check_nccl(system: System) -> Iterator[Finding]:
    """Check which NCCL library a job would use, and whether the driver is new enough for that library."""
    has_gpu = GPU.count(system.names("/dev")) > 0
    opened = _open(system, NCCL)
    good = [(path, version) for path, error, version in opened if not error and version]
    if not good:
        files = [(path, error) for path, error, _ in opened if "/" in path]
        if files and has_gpu:
            yield wrong("NCCL", f"{files[0][0]} can't be opened: {files[0][1]}", "pip install nvidia-nccl-cu12")
        else:
            remedy = "pip install nvidia-nccl-cu12 (or -cu11, -cu13, as the driver allows)" if has_gpu else ""
            yield missing("NCCL", "no libnccl; GPUs would reduce through host memory", remedy)
        return
    path, code = good[0]
    text = f"{nccl_version(code)} in {path}"
    others = dict.fromkeys(nccl_version(other) for _, other in good if other != code)
    if others:
        text += f"; there is {', '.join(others)}, too"
    cuda = _cuda_of_nccl(system, path)
    outcome = _ask_driver(system) if has_gpu and cuda else Outcome(error="not asked")
    if cuda and not outcome.error and outcome.value[0] // 1000 < cuda:
        able = outcome.value[0] // 1000
        yield wrong(
            "NCCL",
            f"{text}: it is built for CUDA {cuda}, but the driver supports only CUDA {able}",
            f"install a newer driver, or pip uninstall nvidia-nccl-cu{cuda} and pip install nvidia-nccl-cu{able}",
        )
    else:
        yield ok("NCCL", text)


def _cuda_of_nccl(system: System, path: str) -> int | None:
    """Return the CUDA version for which an NCCL library from a Python package is built; None if this is unknown."""
    if "/nvidia/nccl/" not in path:
        return None
    return next((n for n in (11, 12, 13) if system.version(f"nvidia-nccl-cu{n}") is not None), None)


def check_ascend(system: System) -> Iterator[Finding]:
    """Check the Ascend devices and their driver."""
    nodes = ASCEND.count(system.names("/dev"))
    version = system.search(r"^Version=(.+)$", _DRIVER_INFO)
    if not nodes and version is None:
        yield missing("Ascend", "no device: no /dev/davinci*, no driver")
    elif not nodes:
        remedy = (
            "to use the host's devices in a container: start it with Ascend's docker runtime, or --device /dev/davinci0"
        )
        yield missing("Ascend", f"driver {version}, but no /dev/davinci*", remedy)
    elif version is None:
        remedy = "install the driver; in a container: mount /usr/local/Ascend/driver"
        yield wrong("Ascend", f"{nodes} devices, but no driver in {_DRIVER_INFO}", remedy)
    else:
        yield ok("Ascend", f"{nodes} devices, driver {version}")


def check_cann(system: System) -> Iterator[Finding]:
    """Check CANN, and whether a process finds CANN's libraries."""
    home = system.environ.get("ASCEND_TOOLKIT_HOME") or system.environ.get("ASCEND_HOME_PATH") or _TOOLKIT
    infos = (f"{home}/{name}/ascend_toolkit_install.info" for name in system.names(home) if name.endswith("-linux"))
    versions = (system.search(r"^version=(.+)$", info) for info in infos)
    has_devices = ASCEND.count(system.names("/dev")) > 0
    there = f"{next(filter(None, versions), 'unknown version')} in {home}"
    if _first_that_opens(system, ACL) is not None:
        yield ok("CANN", there if system.names(home) else "found by the loader")
    elif system.names(home):
        remedy = f"source {home.removesuffix('/latest')}/set_env.sh in the shell that starts the job"
        say = wrong if has_devices else missing
        yield say("CANN", f"{there}, but libascendcl.so can't be opened", remedy)
    else:
        remedy = "install CANN's toolkit as MindSpore's installation guide says" if has_devices else ""
        yield missing("CANN", f"not in {home}, no libascendcl.so", remedy)


def check_hccl(system: System) -> Iterator[Finding]:
    opened = _first_that_opens(system, HCCL)
    has_devices = ASCEND.count(system.names("/dev")) > 0
    if opened is not None:
        yield ok("HCCL", f"{opened} opens")
    else:
        remedy = "it comes with CANN; source its set_env.sh" if has_devices else ""
        yield missing("HCCL", "no libhccl.so; Ascend devices would reduce through host memory", remedy)


def check_settings(system: System) -> Iterator[Finding]:
    """Check the device lists and the rank table in the environment."""
    for kind in (GPU, ASCEND):
        name, topic = kind.variable.name, f"{kind.name.split()[0]} list"
        text = system.environ.get(name)
        if text is None:
            continue
        try:
            listed = names_listed(kind, text)
        except DeviceListError as error:
            yield wrong(topic, str(error), f"list devices by number, such as {name}=0,1, or unset it")
            continue
        count = kind.count(system.names("/dev"))
        beyond = [item for item in listed if item.isascii() and item.isdigit() and int(item) >= count]
        if beyond and count:
            found = f"{name}={text}: there is no {kind.name} {beyond[0]}, only 0 to {count - 1}"
            yield wrong(topic, found, f"shorten or unset {name}")
        else:
            yield ok(topic, f"{name}={text}: {len(listed) or 'none'} for the job")
    path = rank_table.path_from(system.environ)
    if path is None:
        return
    text = system.read(str(path))
    variable = env.HCCL_CONFIG_PATH if env.HCCL_CONFIG_PATH.get(system.environ) else env.RANK_TABLE_FILE
    if text is None:
        yield wrong("rank table", f"{path} can't be read", f"give {variable.name} another path, or unset it")
        return
    try:
        table = rank_table.parse(text, str(path))
    except rank_table.RankTableError as error:
        for mistake in error.mistakes:
            yield wrong(
                "rank table", f"{path}: {mistake}", "correct the file, or create it with MindSpore's hccl_tools"
            )
    else:
        yield ok("rank table", f"{path}: {table.size} ranks on {len(table.servers)} servers")


def nccl_version(code: int) -> str:
    """Return NCCL's version number as text.

    >>> nccl_version(21605), nccl_version(2708)
    ('2.16.5', '2.7.8')
    """
    scale = 10000 if code >= 10000 else 1000  # NCCL 2.9 changed the format of the number
    return f"{code // scale}.{code % scale // 100}.{code % 100}"


def _ask_driver(system: System) -> Outcome:
    return system.run(_ASK_DRIVER, *CUDA_DRIVER.names)


def _open(system: System, library: Library) -> list[tuple[str, str, int]]:
    """Open each candidate for a library. Return the path, the error and the version of each.

    Each candidate is opened in a separate process, because in one process the loader wouldn't open a second library of
    the same name.
    """
    paths = candidates(library, system.folders)
    outcomes = [(path, system.run(_OPEN, path)) for path in paths]
    return [(path, outcome.error, outcome.value or 0) for path, outcome in outcomes]


def _first_that_opens(system: System, library: Library) -> str | None:
    return next((path for path, error, _ in _open(system, library) if not error), None)
