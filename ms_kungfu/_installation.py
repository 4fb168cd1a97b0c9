"""Find out how this package was installed, so that error messages can name the command that reinstalls it."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse


def _own() -> Distribution | None:
    try:
        return distribution("ms-kungfu")
    except PackageNotFoundError:  # the package is a copied folder
        return None


def _source(own: Distribution) -> tuple[str, bool]:
    """Return the path or URL from which pip installed the package, and whether it is a folder.

    The first value is "" if pip installed the package from an index.
    """
    given = json.loads(own.read_text("direct_url.json") or "{}")
    url = given.get("url", "")
    return unquote(urlparse(url).path) if url.startswith("file:") else url, "dir_info" in given


def checkout() -> str | None:
    """Return the source folder from which the package was installed; None if it wasn't installed from a folder."""
    own = _own()
    source, is_folder = _source(own) if own is not None else ("", False)
    return source if is_folder else None


def is_of_a_wheel() -> bool:
    """Return whether the package was installed from a prebuilt wheel, which this machine can't rebuild."""
    own = _own()
    return own is not None and not _source(own)[1]


def reinstall() -> str:
    """Return the command that repairs or rebuilds the installation, for a message."""
    own = _own()
    source, is_folder = _source(own) if own is not None else ("", False)
    if own is None or (is_folder and not Path(source).is_dir()):
        return "run ./install-kungfu.sh in the checkout, or `python -m pip install --no-deps --force-reinstall WHEEL`"
    script = Path(source, "install-kungfu.sh")
    if is_folder and script.is_file():
        return f"run {shlex.quote(str(script))}"
    options = "--no-deps --force-reinstall" + " --no-build-isolation" * is_folder
    return f"`python -m pip install {options} {shlex.quote(source or f'ms_kungfu=={own.version}')}`"


def damaged() -> list[str]:
    """Return the package's missing files and truncated libraries, as paths relative to the package's folder."""
    own = _own()
    files = (own.files if own is not None else None) or []
    ours = [file for file in files if file.parts[0] == "ms_kungfu" and file.suffix != ".pyc"]
    return [f.relative_to("ms_kungfu").as_posix() for f in ours if not _is_whole(Path(str(f.locate())), f.size)]


def _is_whole(path: Path, size: int | None) -> bool:
    # Don't compare the size of Python files, because a user may have edited these files.
    return path.is_file() and (path.suffix != ".so" or size in (None, path.stat().st_size))
