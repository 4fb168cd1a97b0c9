"""Replace MindSpore's names in an unchanged program when it imports MindSpore, before it uses the names.

When a Python interpreter of the environment starts, it runs cmake/ms_kungfu_alias.pth, which is installed next to the
package. This works for ``python train.py``, ``python -m``, and Python in a shell script. If ``KUNGFU_MSRUN_SIZE`` is
set, that file inserts a finder before all others. The finder calls `spec` when ``mindspore`` is imported. (A
``sitecustomize`` module would replace an existing one, and a wrapper of the command has no effect inside a shell
script.)
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
