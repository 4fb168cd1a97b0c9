"""`import ms_kungfu` finds the compiled runtime from any folder, the checkout's root included."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHIM = "from ._checkout import use_installed_build\nuse_installed_build(globals())\n"
SHOW = "import ms_kungfu, ms_kungfu.part; print(ms_kungfu.__file__); print(ms_kungfu.part.WHO)"


def python(*arguments: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    if path:
        environ["PYTHONPATH"] = str(path)
    # Without the environment's own packages where others are given: an editable installation there comes first.
    command = [sys.executable, "-B", *(["-S"] if path else []), *arguments]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=60, check=False)


def make_package(parent: Path, who: str, built: bool) -> None:
    package = parent / "ms_kungfu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(SHIM)
    for name in ("_checkout.py", "_installation.py"):
        (package / name).write_text((ROOT / "ms_kungfu" / name).read_text())
    (package / "part.py").write_text(f"WHO = {who!r}\nif __name__ == '__main__':\n    print(WHO)\n")
    if built:
        (package / f"_core{EXTENSION_SUFFIXES[0]}").touch()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    make_package(tmp_path / "check out", "sources", built=False)
    (tmp_path / "check out" / "install-kungfu.sh").touch()
    return tmp_path / "check out"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    make_package(tmp_path / "site", "build", built=True)
    info = tmp_path / "site" / "ms_kungfu-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ms-kungfu\nVersion: 0.1.0\n")
    return tmp_path / "site"


def test_the_checkout_root_uses_the_installed_build(checkout: Path, site: Path) -> None:
    done = python("-c", SHOW, cwd=checkout, path=site)
    assert done.stdout.splitlines() == [str(site / "ms_kungfu" / "__init__.py"), "build"], done.stderr


def test_dash_m_from_the_checkout_root_runs_the_installed_module(checkout: Path, site: Path) -> None:
    done = python("-m", "ms_kungfu.part", cwd=checkout, path=site)
    assert done.stdout == "build\n", done.stderr


def test_another_folder_is_not_affected(tmp_path: Path, site: Path) -> None:
    done = python("-c", SHOW, cwd=tmp_path, path=site)
    assert done.stdout.splitlines() == [str(site / "ms_kungfu" / "__init__.py"), "build"], done.stderr


def test_a_build_in_the_source_folder_is_left_alone(tmp_path: Path, site: Path) -> None:
    make_package(tmp_path / "inplace", "in place", built=True)
    done = python("-c", SHOW, cwd=tmp_path / "inplace", path=site)
    assert done.stdout.splitlines()[1] == "in place", done.stderr


def test_without_a_build_one_sentence_names_the_folder_and_the_remedy(checkout: Path) -> None:
    done = python("-S", "-c", "import ms_kungfu", cwd=checkout)  # -S: none of this interpreter's packages
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith(f"ImportError: {checkout / 'ms_kungfu'} ")
    assert last.endswith(f"{checkout / 'install-kungfu.sh'}")


def test_an_installation_without_its_compiled_part_is_damaged(tmp_path: Path, site: Path) -> None:
    for file in (site / "ms_kungfu").glob("_core*"):
        file.unlink()
    done = python("-c", "import ms_kungfu", cwd=tmp_path, path=site)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {site / 'ms_kungfu'} lacks ms_kungfu._core: the installation is damaged; "
        "`python -m pip install --no-deps --force-reinstall ms_kungfu==0.1.0`"
    )


ISOLATED = ["-I"] if sys.version_info < (3, 11) else ["-P", "-I"]


@pytest.mark.parametrize("flags", [[], *([f] for f in ISOLATED)], ids=lambda f: " ".join(f) or "plain")
@pytest.mark.parametrize("folder", [ROOT, Path("/")], ids=["checkout", "elsewhere"])
def test_the_real_package_imports_its_runtime(folder: Path, flags: list[str]) -> None:
    show = "import ms_kungfu, ms_kungfu._core as c, ms_kungfu.env; print(c.__file__)"
    done = python(*flags, "-c", show, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "_core" in Path(done.stdout.strip()).name
    assert python(*flags, "-m", "ms_kungfu.env", cwd=folder).stdout.startswith("# Environment variables")


def test_importing_the_package_loads_neither_mindspore_nor_numpy() -> None:
    show = "import sys, ms_kungfu; print(sorted({'mindspore', 'numpy', 'aiohttp'} & set(sys.modules)))"
    assert python("-c", show, cwd=Path("/")).stdout == "[]\n"
