#!/usr/bin/env python3
"""Try wheels as a user does: each in an empty environment without a compiler, with each MindSpore.

    release/matrix.py --python python3.9 --python python3.12    # the wheels of dist/, all MindSpore that they accept
    release/matrix.py --mindspore 2.9.0                         # with one version
    release/matrix.py --sdist --mindspore 2.9.0                 # the sdist of dist/, with this machine's compiler
    release/matrix.py --next                                    # a MindSpore newer than those, if there is one

In each environment pip installs MindSpore and ms_kungfu. Then python -m ms_kungfu.doctor must find no problem, two
workers must sum a tensor through MindSpore (ms_kungfu.tools.smoke), and the tests in TESTS must pass. The tests are
copied, so that they test the wheel and not the checkout. A table is printed at the end. The exit status is 1 if
anything failed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from wheels import ROOT, Failure, accepted, build, interpreter, key, limits, mindspore_wheel, published, run, version_of

# Loading and rejection, the kernels against NumPy in both modes, the optimizers across a resize.
TESTS = (
    "tests/mindspore/test_loading_and_arguments.py",
    "tests/mindspore/test_primitives_and_optimizers.py",
    "tests/mindspore/test_updates.py",
)
FOR_TESTS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis")
TOOLS = (Path("/bin"), Path("/usr/bin"))
COMPILERS = ("cc", "c++", "c89", "c99", "cpp", "gcc", "g++", "clang", "ld", "as", "cmake", "make", "ninja")


@dataclass(frozen=True)
class Cell:
    python: str  # the version
    mindspore: str
    interpreter: str
    package: Path  # a wheel of ms_kungfu, or its sdist
    archive: Path  # MindSpore's wheel


class Environment:
    """A virtual environment in an empty folder with only the machine's tools, by default without a compiler."""

    def __init__(self, folder: Path, python: str, compiler: bool = False) -> None:
        self.folder = folder
        tools = folder / "tools"
        tools.mkdir()
        for place in TOOLS:
            for tool in place.iterdir():
                wanted = "python" not in tool.name and (compiler or not is_compiler(tool.name))
                # lexists: both folders may be the same, and may contain dangling links.
                if wanted and not os.path.lexists(tools / tool.name):
                    (tools / tool.name).symlink_to(tool)
        self.environ = {"HOME": str(folder), "PATH": f"{folder}/venv/bin:{tools}", **settings_of_the_machine()}
        run(python, "-m", "venv", folder / "venv", environ=self.environ)
        for name in () if compiler else COMPILERS:
            if found := shutil.which(name, path=self.environ["PATH"]):
                raise Failure(f"the environment must have no compiler, but has {found}")

    def run(self, *command: object) -> str:
        return run(self.folder / "venv" / "bin" / str(command[0]), *command[1:], environ=self.environ)

    def pip_install(self, *what: object) -> str:
        return self.run("python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what)


def is_compiler(name: str) -> bool:
    """Return whether a file name is a compiler's, even with a version or a target in it."""
    parts = name.replace(".", "-").split("-")
    return any(part in COMPILERS for part in parts)


def settings_of_the_machine() -> dict[str, str]:
    """Return the environment variables to keep: package sources, proxies, and the processor's fast instructions."""
    names = ("PIP_CONFIG_FILE", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "ONEDNN_MAX_CPU_ISA")
    return {
        name: value
        for name, value in os.environ.items()
        if name in names or name.lower().endswith("_proxy") or name.startswith("PIP_")
    }


def tried(cell: Cell, folder: Path) -> str:
    """Return a short text with the results. Raise Failure if something failed."""
    environment = Environment(folder, cell.interpreter, compiler=is_sdist(cell.package))
    environment.pip_install(cell.archive, "numpy<2")
    begun = time.monotonic()
    # Packages only: pip complains about a MindSpore that the wheel doesn't accept yet, which is expected.
    environment.pip_install("--no-deps", cell.package)
    environment.pip_install(*required(environment), *FOR_TESTS)
    installed_s = time.monotonic() - begun
    environment.run("python", "-m", "ms_kungfu.doctor")
    environment.run("kungfu-run", "-q", "-timeout", "5m", "-np", "2", "python", "-m", "ms_kungfu.tools.smoke")
    copy = folder / "copy"
    shutil.copytree(ROOT / "tests", copy / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", copy)
    files = [copy / name for name in TESTS]
    told = environment.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", copy, *files)
    return f"{told.splitlines()[-1].strip('= ')}; installed in {installed_s:.0f} s"


def required(environment: Environment) -> list[str]:
    """Return what ms_kungfu needs besides MindSpore."""
    told = environment.run(
        "python", "-c", "from importlib.metadata import requires; print(*requires('ms_kungfu'), sep='\\n')"
    )
    return [need for need in told.splitlines() if "extra ==" not in need and not need.startswith("mindspore")]


def cells(pythons: Sequence[str], versions: Sequence[str], folder: Path, sdist: bool = False) -> Iterator[Cell]:
    """Return the combinations of Python and MindSpore that have a wheel, for these or all accepted versions.

    Raise Failure if a Python or a version has no combination.
    """
    untried = {*versions}
    for python in pythons:
        number, package = version_of(python), newest_sdist(folder) if sdist else fitting(python, folder)
        found = {version: mindspore_wheel(number, version) for version in versions or accepted(number)}
        there = {version: archive for version, archive in found.items() if archive is not None}
        if not there:
            raise Failure(f"no MindSpore {', '.join(found)} has a wheel for Python {number}")
        untried -= {*there}
        for version, archive in there.items():
            yield Cell(number, version, python, package, archive)
    if untried:
        raise Failure(f"MindSpore {', '.join(sorted(untried, key=key))} has a wheel for none of these Pythons")


def fitting(python: str, wheels: Path) -> Path:
    """Return the newest wheel of that folder for this Python."""
    number = version_of(python)
    there = sorted(wheels.glob(f"ms_kungfu-*-cp{number.replace('.', '')}-*.whl"), key=lambda p: p.stat().st_mtime)
    if not there:
        raise Failure(f"{wheels} has no wheel for Python {number}; release/wheels.py --python {python} makes one")
    return there[-1]


def newest_sdist(folder: Path) -> Path:
    there = sorted(filter(is_sdist, folder.glob("ms_kungfu-*")), key=lambda p: p.stat().st_mtime)
    if not there:
        raise Failure(f"{folder} has no sdist; release/wheels.py --sdist makes one")
    return there[-1]


def is_sdist(package: Path) -> bool:
    return package.name.endswith(".tar.gz")


def table(results: Mapping[tuple[str, str], str]) -> str:
    """Return a table: rows are Pythons, columns versions of MindSpore."""
    versions = sorted({version for _, version in results}, key=key)
    lines = [
        "| | " + " | ".join(f"MindSpore {version}" for version in versions) + " |",
        "|---" * (len(versions) + 1) + "|",
    ]
    for python in sorted({python for python, _ in results}, key=key):
        row = [results.get((python, version), "no MindSpore") for version in versions]
        lines.append(f"| Python {python} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def newer(python: str) -> list[str]:
    """Return the published MindSpore versions for this Python that are newer than all accepted ones."""
    _, limit = limits()
    return [version for version in published(python) if key(version) >= limit]


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--python", action="append", help="an interpreter; may be given several times (default: this one)"
    )
    several = "may be given several times (default: all that are accepted)"
    parser.add_argument("--mindspore", action="append", metavar="VERSION", help=several)
    parser.add_argument("--wheels", type=Path, default=ROOT / "dist", help="the folder with the wheels (default: dist)")
    parser.add_argument("--sdist", action="store_true", help="test the source distribution instead of the wheels")
    parser.add_argument(
        "--next",
        action="store_true",
        help="build for a published MindSpore newer than the accepted ones, and test that",
    )
    asked = parser.parse_args(words)
    results: dict[tuple[str, str], str] = {}
    try:
        pythons = [interpreter(python) for python in asked.python or [sys.executable]]
        versions, wheels = asked.mindspore or [], asked.wheels.resolve()
        if asked.next:
            after = {python: newer(version_of(python)) for python in pythons}
            pythons, wheels = [python for python in pythons if after[python]], ROOT / "build" / "next"
            versions = sorted({version for each in after.values() for version in each}, key=key)
            if not versions:
                print(f"no MindSpore after those is published for Python {', '.join(map(version_of, after))}")
                return
            for python in pythons:
                build(python, after[python], wheels)
        # Get all of them first: a missing one should fail before hours of tests.
        for cell in [*cells(pythons, versions, wheels, asked.sdist)]:
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                try:
                    said = tried(cell, Path(folder))
                    results[cell.python, cell.mindspore] = said.partition(" in ")[0]
                except Failure as failure:
                    said = f"FAILED\n{failure}"
                    results[cell.python, cell.mindspore] = "failed"
            took = time.monotonic() - begun
            print(f"Python {cell.python}, MindSpore {cell.mindspore} ({took:.0f} s): {said}", flush=True)
    except Failure as failure:
        sys.exit(f"release/matrix.py: {failure}")
    print(table(results))
    sys.exit("failed" in results.values())


if __name__ == "__main__":
    main()
