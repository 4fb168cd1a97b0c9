"""install-kungfu.sh refuses what can't work in one sentence, before it has done anything, and does what is left to do.

Nothing is downloaded or compiled here: where it would, it meets a stand-in for pip.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def install(*arguments: object, cwd: Path = Path("/")) -> subprocess.CompletedProcess[str]:
    # An empty environment: no HOME, no PATH, no active virtual environment.
    command = ["/usr/bin/env", "-i", str(ROOT / "install-kungfu.sh"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_names_every_option(flag: str) -> None:
    done = install(flag)
    assert done.returncode == 0
    for option in ("--venv", "--python", "--mindspore", "--extras", "--apt"):
        assert option in done.stdout
    assert "examples, metrics, top, ray, test, bench, browser, release, docs, lint, dev" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--vnev", "x"], "'--vnev'"),
        (["x"], "'x'"),
        (["--venv"], "--venv needs a value"),
        (["--venv="], "--venv needs a value"),
        (["--mindspore", "latest"], "'latest'"),
        (["--extras", "examples,everything"], "'everything'"),
        # Keys of pyproject.toml that are no extras, and no pattern.
        (["--extras", "classifiers"], "'classifiers' is none of examples, metrics, top, ray, "),
        (["--extras", "te.t"], "'te.t'"),
        (["--extras", "*"], "'*'"),
    ],
)
def test_misuse_exits_2_and_names_it(arguments: list[str], named: str) -> None:
    done = install(*arguments)
    assert done.returncode == 2
    assert named in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("version", ["2.7.1", "2.11.0", "1.10.1"])
def test_a_mindspore_that_the_package_does_not_accept_is_refused(version: str) -> None:
    done = install("--mindspore", version)
    assert done.returncode == 1
    assert version in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("version", ["3.8", "3.13"])
def test_a_wrong_python_is_named_with_what_is_needed(tmp_path: Path, version: str) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {version}\n")
    python.chmod(0o755)
    done = install("--venv", tmp_path / "new venv", "--python", python)
    assert done.returncode == 1
    assert f"{python} ({version})" in done.stderr
    assert "needs Python 3.10 to 3.12" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "new venv").exists()


def test_a_folder_that_is_no_virtual_environment_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("words")
    done = install("--venv", ".", cwd=tmp_path)
    assert done.returncode == 1
    assert str(tmp_path) in done.stderr
    assert (tmp_path / "thesis.txt").read_text() == "words"


# Installs "." as pip does: files, and their list. `text` is what is in the library.
PACKAGE = """
import hashlib, pathlib, sys

def install(site, text):
    info = site / "ms_kungfu-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (site / "ms_kungfu").mkdir(exist_ok=True)
    (site / "ms_kungfu" / "library.so").write_text(text)
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: ms-kungfu\\nVersion: 0.1.0\\n")
    digest = hashlib.sha256(text.encode()).hexdigest()
    (info / "RECORD").write_text(
        f"ms_kungfu/library.so,sha256={digest},{len(text)}\\nms_kungfu/__pycache__/a.pyc,,\\n"
        "ms_kungfu-0.1.0.dist-info/METADATA,,\\nms_kungfu-0.1.0.dist-info/RECORD,,\\n"
    )
"""
PIP = f"""{PACKAGE}
if "." in sys.argv:
    install(pathlib.Path(__file__).parents[1], "built here")
"""


class Checkout:
    """One whose sources aren't compiled, with an environment that has a MindSpore."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("cmake", "ops_src", "kernels", "ms_kungfu"):
            (root / folder).mkdir(parents=True)
        (root / "CMakeLists.txt").touch()
        for name in ("install-kungfu.sh", "pyproject.toml"):
            shutil.copy(ROOT / name, root)
        venv.create(root / ".venv", symlinks=True)
        version = f"python3.{sys.version_info.minor}"
        self.site = root / ".venv" / "lib" / version / "site-packages"
        info = self.site / "mindspore-2.9.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mindspore\nVersion: 2.9.0\n")
        (self.site / "pip").mkdir()
        (self.site / "pip" / "__main__.py").write_text(PIP)
        test = root / ".venv" / "bin" / "kungfu-run"
        test.write_text("#!/bin/sh\n")
        test.chmod(0o755)
        self.library = self.site / "ms_kungfu" / "library.so"

    def start(self) -> subprocess.Popen[str]:
        command = ["/usr/bin/env", "-i", str(self.root / "install-kungfu.sh")]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def install(self) -> str:
        process = self.start()
        said, _ = process.communicate(timeout=60)
        assert process.returncode == 0, said
        return said


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path / "check out")


def another(checkout: Checkout) -> None:
    scope: dict[str, Callable[[Path, str], None]] = {}
    exec(PACKAGE, scope)
    scope["install"](checkout.site, "built there")


@pytest.mark.parametrize(
    "happens",
    [
        another,
        lambda checkout: checkout.library.unlink(),
        lambda checkout: os.truncate(checkout.library, 3),
        lambda checkout: (checkout.root / "ops_src" / "new.cc").touch(),
    ],
    ids=["another package", "a file is gone", "a file is cut", "a source is new"],
)
def test_a_second_run_does_nothing_unless_something_happened_since(
    checkout: Checkout, happens: Callable[[Checkout], object]
) -> None:
    assert "is installed in" in checkout.install()
    assert "is installed and up to date" in checkout.install()
    happens(checkout)
    assert "up to date" not in checkout.install()
    assert checkout.library.read_text() == "built here"
    assert "is installed and up to date" in checkout.install()


@pytest.mark.skipif(shutil.which("flock") is None, reason="no flock")
def test_a_second_run_at_a_time_waits_for_the_first(checkout: Checkout) -> None:
    (checkout.root / "build").mkdir()
    with (checkout.root / "build" / "install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = checkout.start()
        assert second.stdout is not None
        assert second.stdout.readline().startswith("Waiting for another install-kungfu.sh in ")
        assert not checkout.library.exists()
    said, _ = second.communicate(timeout=60)
    assert second.returncode == 0, said
    assert "is installed in" in said
    assert checkout.library.exists()
