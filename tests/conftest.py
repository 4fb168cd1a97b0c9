"""Which tests run (`tests/README.md`), and starting programs under kungfu-run: the one way in which the tests do it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Callable

import pytest
from hypothesis import settings

from ms_kungfu import _cpu_isa
from ms_kungfu.launcher import cpu_isa
from tests.multiprocess.launching import Program
from tests.ports import free_port


def examples(count: int) -> int:
    """Return how many examples a property is tried with: `count`, or what a campaign says in KUNGFU_EXAMPLES."""
    return int(os.environ.get("KUNGFU_EXAMPLES", count))


# The same examples each time, none kept from an earlier run; `python -m tests.campaigns properties` has random ones.
# An example's time is the machine's affair; a test that hangs has its own limit.
settings.register_profile("fixed", deadline=None, derandomize=True, database=None)
settings.register_profile("campaign", deadline=None, derandomize=False, database=None, max_examples=examples(100))
settings.load_profile("fixed")

Run = Callable[..., str]


def long(*values: object) -> object:
    """One of a test's parameters that only `--all` tries."""
    return pytest.param(*values, marks=pytest.mark.long)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also what takes long: the tests marked `long`")


def pytest_configure(config: pytest.Config) -> None:
    """Gives this process a runtime folder of its own: a test that asks for this user's jobs sees no other's.

    Caps the vector instructions of convolutions as kungfu-run does for its workers: many tests have no launcher, and
    would take hours.
    """
    isa = cpu_isa.of_host(cpu_isa.AUTO, os.environ)
    if isa is not None and isa.level != isa.native:
        os.environ[_cpu_isa.VARIABLE] = isa.level
    folder = tempfile.mkdtemp(prefix="kungfu-tests-")
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["XDG_RUNTIME_DIR"] = folder


# Side by side what takes longest begins first (a build, MindSpore's processes), so that no core is idle in the end.
LONGEST_FIRST = ["cpp", "examples", "devices", "mindspore", "fault", "hosts", "multiprocess", "unit"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what takes long, unless it is asked for: by `--all`, by a mark (`-m`) or by its own name."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        place = {Path(__file__).with_name(folder): number for number, folder in enumerate(LONGEST_FIRST)}
        items.sort(key=lambda item: min((place[at] for at in item.path.parents if at in place), default=0))
    if config.getoption("--all") or config.option.markexpr:
        return
    named = [arg for arg in config.args if "::" in arg]
    left_out = [
        item for item in items if item.get_closest_marker("long") and not any(item.nodeid.startswith(n) for n in named)
    ]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session")
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether all is to be tried, however long it takes."""
    return bool(request.config.getoption("--all"))


@contextlib.contextmanager
def one_at_a_time(name: str) -> Iterator[None]:
    """Holds off the other processes of this run, of this checkout, that do the same: builds in one folder."""
    folder = Path(__file__).resolve().parents[1] / "build"
    folder.mkdir(exist_ok=True)
    with (folder / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_cpp(*target: str) -> Path:
    """The folder with the C++ tests and the runtime that has fault points; with a target no more than that is built."""
    root = Path(__file__).resolve().parents[1]
    folder = root / "build" / "cpp-tests"
    # Most of a compilation is headers and the optimizer: eight files are one, at -O1, but for the reductions' -O3. That
    # takes 90 s of a processor instead of 230.
    options = ["-DKUNGFU_BUILD_TESTS=ON", "-DKUNGFU_BUILD_PYTHON=OFF"]
    options += ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DCMAKE_UNITY_BUILD=ON"]
    with one_at_a_time("cpp-tests"):
        for command in (
            ["cmake", "-G", "Ninja", "-S", root, "-B", folder, *options],
            ["cmake", "--build", folder, "--parallel", os.cpu_count() or 1, *(["--target", *target] if target else [])],
        ):
            words = [str(word) for word in command]
            done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}"
    return folder


def _busy_cores(seconds: float = 1.0) -> float:
    """How many cores the machine's processes take at present, by the kernel's count."""

    def used() -> int:
        user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
        return user + nice + system + irq + softirq + steal

    before, begin = used(), time.monotonic()
    time.sleep(seconds)
    return (used() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - begin)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("timing") is None:
        return
    # A test before this one may still be on its way out.
    for _ in range(5):
        busy, cores = _busy_cores(), len(os.sched_getaffinity(0))
        if busy < 0.25 * cores:
            return
    pytest.skip(f"other processes take {busy:.1f} of {cores} cores: no time to measure times")


def launcher() -> str:
    found = shutil.which("kungfu-run", path=str(Path(sys.executable).parent)) or shutil.which("kungfu-run")
    assert found is not None, "kungfu-run is not installed"
    return found


@pytest.fixture
def start_module(tmp_path):
    """Starts ``python -m MODULE ARGUMENTS`` in the test's folder; whatever is left of it is killed after the test."""
    started = []

    def run(module, *arguments, **options):
        started.append(Program(module, arguments, tmp_path, **options))
        return started[-1]

    yield run
    for program in started:
        program.kill_all()


@pytest.fixture
def kungfu_run(start_module):
    """Starts ``kungfu-run ARGUMENTS``."""

    def run(*arguments, **options):
        return start_module("ms_kungfu.launcher", *arguments, **options)

    return run


@pytest.fixture
def run_program(tmp_path: Path) -> Run:
    """``run(program, *args, np=2, watch=False, flags=(), status=0)`` runs a Python program under kungfu-run (np=0:
    without) and returns all it printed; another exit status than `status` fails the test."""

    def run(
        program: Path,
        *args: object,
        np: int = 2,
        watch: bool = False,
        flags: Sequence[str] = (),
        status: int = 0,
        timeout_s: float = 240,
    ) -> str:
        command = [sys.executable, str(program), *map(str, args)]
        if watch:
            port = free_port()
            flags = [*flags, "-w", "-builtin-config-port", str(port)]
            flags += ["-config-server", f"http://127.0.0.1:{port}/config"]
        if np:
            command = [launcher(), "-q", "-np", str(np), *flags, *command]
        # In a folder of its own: MindSpore writes its analysis of a failed compilation into the current one.
        done = subprocess.run(
            command,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
        )
        assert done.returncode == status, f"{' '.join(command)} exited {done.returncode}:\n{done.stdout[-6000:]}"
        return done.stdout

    return run
