"""Let `import ms_kungfu` work in a checkout's root, where the source folder hides the installed package.

The source folder has no compiled runtime, so importing this folder alone fails. The first lines of
``ms_kungfu/__init__.py`` pass the package's globals to :func:`use_installed_build`, which makes the package load the
installed modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any


def _has_build(folder: Path) -> bool:
    return any((folder / f"_core{suffix}").is_file() for suffix in EXTENSION_SUFFIXES)


def find_build(searched: Iterable[str]) -> Path | None:
    """Return the first folder with the compiled runtime: a folder in `searched`, or an installed package."""
    return next((Path(f) for folders in (searched, _installed()) for f in folders if _has_build(Path(f))), None)


def _installed() -> Iterator[str]:
    from importlib.metadata import distributions  # slower to import than the rest of the package

    yield from (str(found.locate_file("ms_kungfu")) for found in distributions(name="ms-kungfu"))


def use_installed_build(package: MutableMapping[str, Any]) -> None:
    """Make the package load its modules from the folder that contains the compiled runtime.

    Do nothing for an installed package or an editable install, whose search path already contains the runtime.
    `package` contains the package's globals.
    """
    path: list[str] = package["__path__"]
    build = find_build(path)
    if build is None:
        script = Path(path[0]).parent / "install-kungfu.sh"
        if script.is_file():
            raise ImportError(
                f"{path[0]} holds the sources of ms_kungfu but no build of it, and no build is installed for this "
                f"Python: run {script}"
            )
        from ._installation import reinstall

        raise ImportError(f"{path[0]} lacks ms_kungfu._core: the installation is damaged; {reinstall()}")
    if str(build) not in path:
        # Change the list in place, because the import system also uses this list object.
        path[:] = [str(build)]
        package["__file__"] = str(build / "__init__.py")
