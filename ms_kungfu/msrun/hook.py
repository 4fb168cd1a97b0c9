"""Replace MindSpore's names in an unchanged program: when it imports MindSpore, before it binds names.

Each Python of the environment runs cmake/ms_kungfu_alias.pth, which lies beside the installed package, as it starts:
``python train.py``, ``python -m``, and a Python in a shell script. If ``KUNGFU_MSRUN_SIZE`` is set it puts a finder
before all others that asks `spec` for the one name. (A ``sitecustomize`` would replace another one, and a wrapper
around the command can't see into a shell script.)
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
    """Return the module spec for an import of ``mindspore``; None without one."""
    found = PathFinder.find_spec("mindspore", path, target)
    if found is not None and isinstance(found.loader, SourceFileLoader):
        found.loader = _Loader(found.loader.name, found.loader.path)
    return found
