"""How the package was installed decides what a user is told to do about it, and what is missing is found."""

from __future__ import annotations

import json
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path
from typing import Callable

import pytest

from ms_kungfu import _installation

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs a package in an empty folder, from there."""

    def made(**origin: object) -> Path:
        info = tmp_path / "ms_kungfu-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ms-kungfu\nVersion: 1.2\n")
        if origin:
            (info / "direct_url.json").write_text(json.dumps(origin))
        files = ("__init__.py", "py.typed", "plugins/2.9.0/libkungfu_ms_cpu.so")
        for name in files:
            (tmp_path / "ms_kungfu" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "ms_kungfu" / name).write_text("text")
        record = [
            *(f"ms_kungfu/{name},sha256=x,4" for name in files),
            "ms_kungfu/__pycache__/a.pyc,,",
            "../bin/run,x,1",
        ]
        (info / "RECORD").write_text("\n".join(record))
        monkeypatch.setattr(_installation, "distribution", lambda name: Distribution.at(info))
        return tmp_path / "ms_kungfu"

    return made


def test_a_wheel_from_an_index_comes_from_there_again(install: Install) -> None:
    install()
    assert _installation.is_of_a_wheel()
    assert _installation.reinstall() == "`python -m pip install --no-deps --force-reinstall ms_kungfu==1.2`"


def test_a_wheels_file_is_named(install: Install) -> None:
    install(url="file:///my%20wheels/a.whl", archive_info={})
    assert _installation.is_of_a_wheel()
    assert _installation.reinstall() == "`python -m pip install --no-deps --force-reinstall '/my wheels/a.whl'`"


def test_a_checkout_builds_it_anew(install: Install, tmp_path: Path) -> None:
    install(url=(tmp_path / "check out").as_uri(), dir_info={"editable": True})
    assert not _installation.is_of_a_wheel()
    # It is gone, as in an image.
    assert _installation.reinstall().startswith("run ./install-kungfu.sh in the checkout, or ")
    (tmp_path / "check out").mkdir()
    assert _installation.reinstall() == (
        f"`python -m pip install --no-deps --force-reinstall --no-build-isolation '{tmp_path}/check out'`"
    )
    (tmp_path / "check out" / "install-kungfu.sh").touch()
    assert _installation.reinstall() == f"run '{tmp_path}/check out/install-kungfu.sh'"


def test_a_copy_of_the_folder_is_of_no_wheel_and_lacks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(_installation, "distribution", none)
    assert not _installation.is_of_a_wheel()
    assert _installation.damaged() == []
    assert "install-kungfu.sh" in _installation.reinstall()


def test_missing_files_and_truncated_libraries_are_damage(install: Install) -> None:
    package = install()
    assert _installation.damaged() == []
    (package / "__init__.py").write_text("edited by its user")
    assert _installation.damaged() == []
    (package / "py.typed").unlink()
    (package / "plugins/2.9.0/libkungfu_ms_cpu.so").write_text("te")
    assert _installation.damaged() == ["py.typed", "plugins/2.9.0/libkungfu_ms_cpu.so"]
