"""install-kungfu.sh refuses what can't work in one sentence, before it has done anything."""

from __future__ import annotations

import subprocess
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


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--vnev", "x"], "'--vnev'"),
        (["x"], "'x'"),
        (["--venv"], "--venv needs a value"),
        (["--venv="], "--venv needs a value"),
        (["--mindspore", "latest"], "'latest'"),
        (["--extras", "examples,everything"], "'everything'"),
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
