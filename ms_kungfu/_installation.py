"""Find out how this package was installed, so that messages can name the right command to repair it."""

from __future__ import annotations

import json
import shlex
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlparse


def _own() -> Distribution | None:
    try:
        return distribution("ms-kungfu")
    except PackageNotFoundError:  # a copied folder
        return None


def _source(own: Distribution) -> tuple[str, bool]:
    """Return the source that pip installed from ("" for an index), and whether it is a folder."""
    given = json.loads(own.read_text("direct_url.json") or "{}")
    url = given.get("url", "")
    return unquote(urlparse(url).path) if url.startswith("file:") else url, "dir_info" in given


def checkout() -> str | None:
    """Return the folder that the package was installed from, if any."""
    own = _own()
    source, is_folder = _source(own) if own is not None else ("", False)
    return source if is_folder else None


def is_of_a_wheel() -> bool:
    """Return whether a prebuilt wheel was installed. This machine can't rebuild such a wheel."""
    own = _own()
    return own is not None and not _source(own)[1]


def reinstall() -> str:
    """Return the command with which a user repairs or rebuilds the installation."""
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
    """Return missing files and truncated libraries of the package, as paths relative to its folder."""
    own = _own()
    files = (own.files if own is not None else None) or []
    ours = [file for file in files if file.parts[0] == "ms_kungfu" and file.suffix != ".pyc"]
    return [f.relative_to("ms_kungfu").as_posix() for f in ours if not _is_whole(Path(str(f.locate())), f.size)]


def _is_whole(path: Path, size: int | None) -> bool:
    # An edited Python file isn't damaged.
    return path.is_file() and (path.suffix != ".so" or size in (None, path.stat().st_size))
