"""Replace MindSpore's names if MindSpore isn't installed, so that derived classes can be imported and documented.

Sphinx's own mocks are objects, not classes, but ms_kungfu calls `issubclass(cls, nn.Optimizer)` during its import.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any

NAME = "mindspore"


def named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Names(name, (Name,), {"__module__": NAME})


class Names(type):
    """Classes whose attributes are also such classes. Used as a decorator, a class returns the decorated function."""

    def __getattr__(cls, name: str) -> Any:
        return named(name)

    def __call__(cls, *arguments: Any, **named_arguments: Any) -> Any:
        if cls.__module__ == NAME:
            if len(arguments) == 1 and not named_arguments and isinstance(arguments[0], FunctionType):
                return arguments[0]
            return object.__new__(cls)
        return super().__call__(*arguments, **named_arguments)


class Name(metaclass=Names):
    def __getattr__(self, name: str) -> Any:
        return named(name)

    def __call__(self, *arguments: Any, **named_arguments: Any) -> Any:
        return arguments[0] if len(arguments) == 1 and isinstance(arguments[0], FunctionType) else self


class Module(ModuleType):
    __path__: list[str] = []
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        return named(name)


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] == NAME else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    sys.meta_path.append(Finder())
    # The real module rejects a MindSpore version for which it has no kernels.
    sys.modules["ms_kungfu.ops._plugin"] = Module("ms_kungfu.ops._plugin")
