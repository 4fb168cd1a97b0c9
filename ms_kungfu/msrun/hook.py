"""Replace MindSpore's functions in an unchanged program as soon as the program imports MindSpore.

The file cmake/ms_kungfu_alias.pth is installed next to the package. Each Python interpreter that uses this installation
runs that file at its start, even inside a shell script. If ``KUNGFU_MSRUN_SIZE`` is set, the file's code installs,
before all other finders, an import finder that calls `spec` when the program imports ``mindspore``.

Two other methods have disadvantages. A ``sitecustomize`` module would replace the user's own module of that name. A
wrapper around the command has no effect on Python inside a shell script.
"""

from __future__ import annotations

from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        import_module("ms_kungfu.msrun.answers").give()


def spec(path: Any = None, target: Any = None) -> ModuleSpec | None:
    """Return the module spec for an import of ``mindspore``; None if MindSpore isn't installed."""
    found = PathFinder.find_spec("mindspore", path, target)
    if found is not None and isinstance(found.loader, SourceFileLoader):
        found.loader = _Loader(found.loader.name, found.loader.path)
    return found
