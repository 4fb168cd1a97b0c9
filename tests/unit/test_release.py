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


PLUGINS = [f"ms_kungfu/plugins/2.7.2/libkungfu_ms_{device}.so" for device in ("cpu", "gpu")]
PLUGINS += [f"ms_kungfu/plugins/2.10.0/libkungfu_ms_{device}.so" for device in ("cpu", "gpu", "ascend")]
# A file each that is missing in turn; the rest of the package comes from the checkout.
FILES = [
    "ms_kungfu/libkungfu_runtime.so",
    "ms_kungfu/_core.cpython-311-x86_64-linux-gnu.so",
    "ms_kungfu/_core.pyi",
    "ms_kungfu/__init__.py",
    "ms_kungfu/launcher/cli.py",
    "ms_kungfu/py.typed",
    "ms_kungfu/cmake/ms_kungfuConfig.cmake",
    "ms_kungfu/include/kungfu/c_api.h",
    "ms_kungfu_alias.pth",
    "ms_kungfu_names.py",
    "ms_kungfu-1.dist-info/licenses/LICENSE",
    *(f"ms_kungfu-1.dist-info/licenses/licenses/{path.name}" for path in (ROOT / "licenses").iterdir()),
]
WHOLE = [*PLUGINS, *FILES]
WHOLE += [path.relative_to(ROOT).as_posix() for path in (ROOT / "ms_kungfu").rglob("*.py")]
WHOLE += [f"ms_kungfu/include/kungfu/{path.name}" for path in (ROOT / "ops_src/include/kungfu").iterdir()]


def wrong_with(program, files, gpu=True):
    return "; ".join(program("wheels").faults(files, ["2.7.2", "2.10.0"], gpu))


@pytest.mark.parametrize("missing", [*PLUGINS, *FILES])
def test_a_wheel_lacks_no_file(program, missing):
    assert wrong_with(program, WHOLE) == ""
    found = wrong_with(program, [name for name in WHOLE if name != missing])
    if missing in PLUGINS:
        _, _, version, library = missing.split("/")
        device = library[len("libkungfu_ms_") : -len(".so")]
        assert found == f"there is no {device} plugin for MindSpore {version}"
    elif "runtime" in missing:
        assert found == "the runtime is there as nothing"
    else:
        assert found.startswith("no ")
        assert len(found.split("; ")) == 1


def test_plugins_for_gpus_are_demanded_where_cudas_headers_were_there(program):
    assert wrong_with(program, [name for name in WHOLE if "ms_gpu" not in name], gpu=False) == ""


@pytest.mark.parametrize(
    ("more", "wrong"),
    [
        (
            "ms_kungfu.libs/libkungfu_runtime-1234.so",
            "the runtime is there as ms_kungfu/libkungfu_runtime.so, ms_kungfu.l",
        ),
        ("ms_kungfu.libs/libgomp-1234.so.1", "libraries of others are in it: ms_kungfu.libs/libgomp"),
    ],
)
def test_a_wheel_has_nothing_of_others(program, more, wrong):
    assert wrong_with(program, [*WHOLE, more]).startswith(wrong)


def test_a_library_that_tells_where_it_was_built_is_named(program, tmp_path):
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("ms_kungfu/a.so", b"\0ops_src/base/error.h\0mindspore/include/ir/anf.h\0")
        archive.writestr("ms_kungfu/b.so", b"\0/home/me/mindspore/include/ir/anf.h\0")
    with zipfile.ZipFile(tmp_path / "a.whl") as archive:
        found = [*program("wheels").traces(archive, [ROOT, Path("/home/me/mindspore")])]
    assert found == ["ms_kungfu/b.so has the path /home/me/mindspore in it"]


def index(published):
    """`run` for an index with these versions for each Python; for another one there is no index."""

    def run(*words):
        assert words[2:5] == ("pip", "index", "versions")
        python = words[words.index("--python-version") + 1]
        if python not in published:
            raise sys.modules["wheels"].Failure("ERROR: No matching distribution found for mindspore")
        return f"Available versions: {', '.join(published[python])}\n"

    return run


PUBLISHED = {
    "3.9": ["2.9.0", "2.7.2", "2.7.1.post1", "2.7.1"],
    "3.10": ["2.10.0", "2.9.0", "2.7.2"],
    "3.11": ["2.11.0", "2.10.0", "2.9.0", "2.7.2"],
    "3.12": ["2.11.0", "2.10.0", "2.9.0", "2.7.2"],
}


def test_mindspore_versions_of_each_python_are_ordered_and_within_limits(program, monkeypatch):
    wheels = program("wheels")
    monkeypatch.setattr(wheels, "run", index(PUBLISHED))
    assert wheels.accepted("3.9") == ["2.7.2", "2.9.0"]
    assert wheels.accepted("3.12") == ["2.7.2", "2.9.0", "2.10.0"]
    matrix = program("matrix")
    assert matrix.newer("3.12") == ["2.11.0"]
    assert matrix.newer("3.9") == []


def test_mindspore_without_a_wheel_for_this_python_is_no_failure(program, tmp_path, monkeypatch):
    wheels = program("wheels")
    monkeypatch.setattr(wheels, "DOWNLOADS", tmp_path)
    monkeypatch.setattr(wheels, "run", index(PUBLISHED))
    assert wheels.mindspore_for("3.9", "2.10.0") is None
    with pytest.raises(wheels.Failure, match=r"MindSpore 2\.99\.0 isn't published; for Python 3\.9 are 2\.7\.1, "):
        wheels.mindspore_for("3.9", "2.99.0")
    wheels.published.cache_clear()
    monkeypatch.setattr(wheels, "run", index({}))
    with pytest.raises(wheels.Failure, match=r"no MindSpore for Python 3\.9, or not its index"):
        wheels.mindspore_for("3.9", "2.10.0")
    (tmp_path / "2.9.0-cp39" / "mindspore").mkdir(parents=True)
    assert wheels.mindspore_for("3.9", "2.9.0") is not None  # without the index


def test_the_interpreter_may_be_relative_and_one_that_is_not_there_is_said(program, tmp_path, monkeypatch):
    wheels = program("wheels")
    (tmp_path / "python").symlink_to(sys.executable)
    monkeypatch.chdir(tmp_path)
    assert wheels.interpreter("./python") == str(tmp_path / "python")
    assert wheels.version_of(wheels.interpreter("./python")) == f"3.{sys.version_info.minor}"
    for name in ("wheels", "matrix", "demonstration"):
        command = [sys.executable, ROOT / "release" / f"{name}.py", "--python", "./python3.99"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (1, f"release/{name}.py: there is no Python ./python3.99\n")
    (tmp_path / "text").write_text("no program")
    (tmp_path / "text").chmod(0o755)
    with pytest.raises(wheels.Failure, match="can't be run: Exec format error"):
        wheels.version_of(tmp_path / "text")


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
    program("wheels").unpack([tmp_path / "mindspore.whl"], tmp_path / "out", program("wheels").WANTED)
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {name for name, taken in names.items() if taken}


def test_headers_of_cuda_are_there_wholly_or_not_at_all(program, tmp_path, monkeypatch):
    wheels = program("wheels")
    monkeypatch.setattr(wheels, "DOWNLOADS", tmp_path / "downloads")
    monkeypatch.setattr(wheels.platform, "machine", lambda: "x86_64")
    with zipfile.ZipFile(tmp_path / "nvcc.whl", "w") as archive:
        archive.writestr("nvidia/cuda_nvcc/include/crt/host_defines.h", "")
    (tmp_path / "broken.whl").write_text("half of it")
    files = [tmp_path / "nvcc.whl", tmp_path / "broken.whl"]
    monkeypatch.setattr(wheels, "download", lambda *words, python: files)
    with pytest.raises(zipfile.BadZipFile):
        wheels.cuda_headers("3.11")
    assert not (tmp_path / "downloads" / "cuda").exists()
    files.pop()
    assert wheels.cuda_headers("3.11") == [tmp_path / "downloads/cuda/nvidia/cuda_nvcc/include"]
    monkeypatch.setattr(wheels.platform, "machine", lambda: "aarch64")
    assert wheels.cuda_headers("3.11") == []


def test_an_environment_has_each_tool_once_where_links_lead_nowhere(program, tmp_path, monkeypatch):
    matrix = program("matrix")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tool").touch()
    (tmp_path / "bin" / "dangling").symlink_to("nowhere")
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(matrix, "TOOLS", (tmp_path / "bin", tmp_path / "bin"))
    monkeypatch.setattr(matrix, "run", lambda *words, environ: "")
    matrix.Environment(tmp_path / "empty", "python")
    assert sorted(path.name for path in (tmp_path / "empty" / "tools").iterdir()) == ["dangling", "tool"]


@pytest.mark.parametrize("name", ["cc", "g++-12", "x86_64-linux-gnu-gcc-12", "clang-15", "c++", "ld.bfd"])
def test_a_compiler_is_known_by_its_name(program, name):
    assert program("matrix").is_compiler(name)
    for other in ("cat", "accept", "id", "ldd", "assert", "ldconfig"):
        assert not program("matrix").is_compiler(other)


def test_newest_package_is_tried_with_each_mindspore_that_has_a_wheel(program, tmp_path, monkeypatch):
    matrix = program("matrix")
    monkeypatch.setattr(matrix, "version_of", lambda python: "3.9")
    monkeypatch.setattr(matrix, "accepted", lambda python: ["2.9.0", "2.10.0"])
    monkeypatch.setattr(
        matrix, "mindspore_wheel", lambda python, version: None if version == "2.10.0" else Path(version)
    )
    names = ["ms_kungfu-1-cp39-cp39-a.whl", "ms_kungfu-2-cp39-cp39-a.whl", "ms_kungfu-1.tar.gz", "ms_kungfu-2.tar.gz"]
    for name in [*reversed(names), "ms_kungfu-3-cp311-cp311-a.whl"]:
        (tmp_path / name).touch()
    for time, name in enumerate(names):
        os.utime(tmp_path / name, (time, time))

    def tried(sdist):
        found = matrix.cells(["python"], [], tmp_path, sdist)
        return [(cell.package.name, cell.mindspore) for cell in found]

    assert tried(sdist=False) == [("ms_kungfu-2-cp39-cp39-a.whl", "2.9.0")]
    assert tried(sdist=True) == [("ms_kungfu-2.tar.gz", "2.9.0")]
    with pytest.raises(matrix.Failure, match="no MindSpore 2.10.0 has a wheel for Python 3.9"):
        [*matrix.cells(["python"], ["2.10.0"], tmp_path)]
    with pytest.raises(matrix.Failure, match="MindSpore 2.10.0 has a wheel for none of these Pythons"):
        [*matrix.cells(["python"], ["2.9.0", "2.10.0"], tmp_path)]
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


def checkout(folder, changelog, cited="1.2.0", minor="1.2"):
    (folder / "ms_kungfu").mkdir(parents=True)
    (folder / "ms_kungfu" / "_version.py").write_text('VERSION = "1.2.0"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    (folder / "CITATION.cff").write_text(f"version: {cited}\n")
    example = folder / "examples" / "cpp-all-reduce"
    example.mkdir(parents=True)
    (example / "CMakeLists.txt").write_text(f"find_package(ms_kungfu {minor} REQUIRED CONFIG)\n")
    (example / "README.md").write_text(f"version ({minor}.x)\n")
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
def test_obstacles_to_a_release_are_listed(program, tmp_path, changelog, cited, tags, left):
    found = [*program("notes").obstacles(checkout(tmp_path, changelog, cited), tags)]
    assert len(found) == len(left)
    for sentence, word in zip(found, left):
        assert word in sentence


def test_an_example_for_another_minor_version_is_an_obstacle(program, tmp_path):
    changelog = "## [1.2.0] - 2026-01-31\n\n- It works.\n"
    found = [*program("notes").obstacles(checkout(tmp_path, changelog, minor="1.1"), [])]
    names = [each.split()[0] for each in found]
    assert names == ["examples/cpp-all-reduce/CMakeLists.txt", "examples/cpp-all-reduce/README.md"]


def test_this_checkout_has_one_version(program):
    found = [*program("notes").obstacles(ROOT, [])]
    assert [each for each in found if not each.startswith("CHANGELOG.md")] == []


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
