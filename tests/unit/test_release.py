"""The programs of release/: what they find wrong with a wheel, and with a checkout that is about to be a release."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from fnmatch import fnmatch
from pathlib import Path

import pytest

from ms_kungfu._version import VERSION

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def program(monkeypatch):
    """A file of release/ as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "release"))

    def load(name):
        spec = importlib.util.spec_from_file_location(name, ROOT / "release" / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


FILES = [
    "ms_kungfu/libkungfu_runtime.so",
    "ms_kungfu/plugins/2.9.0/libkungfu_ms_cpu.so",
    "ms_kungfu/plugins/2.10.0/libkungfu_ms_cpu.so",
    *(f"ms_kungfu-1.dist-info/licenses/licenses/{path.name}" for path in (ROOT / "licenses").iterdir()),
]


@pytest.mark.parametrize(
    ("files", "wrong"),
    [
        (FILES, ""),
        (FILES[:2] + FILES[3:], "there is no plugin for MindSpore 2.10.0"),
        (FILES[1:], "the runtime is there as nothing"),
        ([*FILES, "ms_kungfu.libs/libkungfu_runtime-1234.so"], "a second runtime"),
        ([*FILES, "ms_kungfu.libs/libgomp-1234.so.1"], "libraries of others are in it: ms_kungfu.libs/libgomp"),
        (FILES[:-1], "isn't in it"),
    ],
)
def test_what_is_wrong_with_a_wheel(program, files, wrong):
    found = "; ".join(program("wheels").faults(files, ["2.9.0", "2.10.0"]))
    assert wrong in found.replace("the runtime is there as ms_kungfu/libkungfu_runtime.so, ", "a second runtime ")
    assert bool(found) == bool(wrong)


def test_versions_of_mindspore_are_in_their_order_and_within_the_packages_limits(program, monkeypatch):
    wheels = program("wheels")
    told = "Available versions: 2.11.0, 2.10.0, 2.9.0, 2.7.2, 2.7.1.post1, 2.7.1\n"
    monkeypatch.setattr(wheels, "run", lambda *words: told)
    assert wheels.accepted() == ["2.7.2", "2.9.0", "2.10.0"]
    matrix = program("matrix")
    monkeypatch.setattr(matrix, "published", wheels.published)
    monkeypatch.setattr(matrix, "accepted", wheels.accepted)
    assert matrix.newer() == ["2.11.0"]


def test_only_what_a_plugin_is_compiled_with_is_taken_of_mindspore(program, tmp_path):
    names = {
        "mindspore/version.py": True,
        "mindspore/include/mindspore/ops/kernel/cpu/cpu_kernel.h": True,
        "mindspore/lib/libmindspore_core.so": True,
        "mindspore/lib/plugin/libmindspore_ops_ascend.so": True,
        "mindspore/lib/plugin/libmindspore_gpu.so.11.6": False,
        "mindspore/lib/libdnnl.so.2": False,
        "mindspore/train/model.py": False,
    }
    with zipfile.ZipFile(tmp_path / "mindspore.whl", "w") as archive:
        for name in names:
            archive.writestr(name, "")
    program("wheels").unpack(tmp_path / "mindspore.whl", tmp_path / "out", program("wheels").WANTED)
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {name for name, taken in names.items() if taken}


@pytest.mark.parametrize("name", ["cc", "g++-12", "x86_64-linux-gnu-gcc-12", "clang-15", "c++", "ld.bfd"])
def test_a_compiler_is_known_by_its_name(program, name):
    assert program("matrix").is_compiler(name)
    for other in ("cat", "accept", "id", "ldd", "assert", "ldconfig"):
        assert not program("matrix").is_compiler(other)


def test_what_is_tried_is_the_newest_package_for_that_python_with_each_mindspore_that_has_a_wheel(
    program, tmp_path, monkeypatch
):
    matrix = program("matrix")
    monkeypatch.setattr(matrix, "version_of", lambda python: "3.9")
    monkeypatch.setattr(
        matrix, "mindspore_wheel", lambda python, version: None if version == "2.10.0" else Path(version)
    )
    names = ["ms_kungfu-1-cp39-cp39-a.whl", "ms_kungfu-2-cp39-cp39-a.whl", "ms_kungfu-1.tar.gz", "ms_kungfu-2.tar.gz"]
    for name in [*reversed(names), "ms_kungfu-3-cp311-cp311-a.whl"]:
        (tmp_path / name).touch()
    for time, name in enumerate(names):
        os.utime(tmp_path / name, (time, time))

    def tried(sdist):
        found = matrix.cells(["python"], ["2.9.0", "2.10.0"], tmp_path, sdist)
        return [(cell.package.name, cell.mindspore) for cell in found]

    assert tried(sdist=False) == [("ms_kungfu-2-cp39-cp39-a.whl", "2.9.0")]
    assert tried(sdist=True) == [("ms_kungfu-2.tar.gz", "2.9.0")]
    with pytest.raises(matrix.Failure, match="no wheel for Python 3.9; release/wheels.py --python python makes one"):
        matrix.fitting("python", tmp_path / "elsewhere")
    with pytest.raises(matrix.Failure, match="release/wheels.py --sdist makes one"):
        matrix.newest_sdist(tmp_path / "elsewhere")


def test_the_matrix_is_a_table(program):
    results = {("3.9", "2.9.0"): "5 passed", ("3.10", "2.9.0"): "failed", ("3.10", "2.10.0"): "5 passed"}
    assert program("matrix").table(results) == (
        "| | MindSpore 2.9.0 | MindSpore 2.10.0 |\n|---|---|---|\n"
        "| Python 3.9 | 5 passed | no MindSpore |\n| Python 3.10 | failed | 5 passed |"
    )


def checkout(folder, changelog, cited="1.2.0"):
    (folder / "ms_kungfu").mkdir(parents=True)
    (folder / "ms_kungfu" / "_version.py").write_text('VERSION = "1.2.0"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    (folder / "CITATION.cff").write_text(f"version: {cited}\n")
    return folder


@pytest.mark.parametrize(
    ("changelog", "cited", "tags", "left"),
    [
        ("## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n- It works.\n\n## [1.1.0] - 2025-01-31\n", "1.2.0", [], []),
        ("## [Unreleased]\n\n- It works.\n", "1.2.0", [], ["no section [1.2.0]", "under [Unreleased]"]),
        ("## [1.2.0]\n\n- It works.\n", "1.2.0", [], ["has no date"]),
        ("## [1.2.0] - 2026-01-31\n\n## [1.1.0]\n\n- It works.\n", "1.2.0", [], ["no section [1.2.0] with a text"]),
        ("## [1.2.0] - 2026-01-31\n\n- It works.\n", "1.1.0", ["v1.2.0"], ["CITATION.cff", "the tag v1.2.0"]),
    ],
)
def test_what_is_left_to_do_before_a_release(program, tmp_path, changelog, cited, tags, left):
    found = [*program("notes").obstacles(checkout(tmp_path, changelog, cited), tags)]
    assert len(found) == len(left)
    for sentence, word in zip(found, left):
        assert word in sentence


def test_the_notes_of_a_release_are_its_section(program):
    changelog = "## [Unreleased]\n\n## [1.2.0] - 2026-01-31\n\n### Added\n\n- It works.\n\n## [1.1.0]\n\n- No.\n"
    assert program("notes").section(changelog, "1.2.0") == ("2026-01-31", "### Added\n\n- It works.")
    assert program("notes").section(changelog, "1.2") == ("", "")


def test_the_version_is_the_packages(program):
    assert program("notes").version(ROOT) == VERSION


@pytest.mark.parametrize("name", ["wheels", "matrix", "demonstration", "notes"])
def test_help_says_what_each_does(name):
    done = subprocess.run([sys.executable, ROOT / "release" / f"{name}.py", "-h"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "usage: " in done.stdout


def test_an_image_gets_nothing_that_git_ignores():
    def rules(name):
        return [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]

    left_out = rules(".dockerignore")
    for rule in rules(".gitignore"):
        # Docker's begin at the root.
        path = rule.strip("/") if rule.startswith("/") else f"**/{rule.strip('/')}"
        assert any(fnmatch(path, pattern) for pattern in left_out), f".dockerignore lets {path} in"
