"""Older names of modules, which go on working: a finder of our own, asked after all others, answers for them.

``mindspore.ops.operations.kungfu_comm_ops`` is where KungFu's source-tree integration of MindSpore had its primitives.
Programs written for it import that module. Nothing of MindSpore is changed: they get a module that hands out the
classes and functions of this package. For a module of ours that has moved they get the module itself, so that there are
never two of it, and are told once.

A program that imports the former before this package, or without it, is served by cmake/ms_kungfu_alias.pth, which
lies beside the installed package: Python runs its one line at each start (80 us of some 45 ms), and that imports
nothing until a program asks.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

NAME = "mindspore.ops.operations.kungfu_comm_ops"

MOVED = {
    "ms_kungfu.bench.shapes": "ms_kungfu.fusion.shapes",
    "ms_kungfu.dataset.dealing": "ms_kungfu.dataset.sharding",
    "ms_kungfu.elastic.cluster": "ms_kungfu.cluster",
    "ms_kungfu.elastic.gathering": "ms_kungfu.agreement",
    "ms_kungfu.elastic.membership": "ms_kungfu.membership",
    "ms_kungfu.elastic.model_store": "ms_kungfu.membership.model_store",
    "ms_kungfu.elastic.steering": "ms_kungfu.elastic.policy_runner",
    "ms_kungfu.elastic.rendezvous": "ms_kungfu.broker_protocol",
    "ms_kungfu.monitoring.optimizers": "ms_kungfu.optimizers.monitored",
}

# What that integration called its bindings.
_OLD_NAMES = {
    "kungfu_init": "init",
    "kungfu_finalize": "finalize",
    "kungfu_current_rank": "current_rank",
    "kungfu_current_cluster_size": "current_cluster_size",
}


def _later(name: str) -> Any:
    """What is only looked up when a program asks for it, because it imports more."""
    for module in ("optimizers", "callbacks"):
        found = getattr(import_module(f"ms_kungfu.{module}"), name, None)
        if found is not None:
            return found
    raise AttributeError(f"module {NAME!r} has no attribute {name!r}")


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        if old in MOVED:
            warnings.warn(f"{old} is called {MOVED[old]} now", FutureWarning, stacklevel=2)
            sys.modules[old] = import_module(MOVED[old])  # what an import returns is what it finds here afterwards
            return
        package, ops = import_module("ms_kungfu"), import_module("ms_kungfu.ops")
        members: dict[str, Any] = {name: getattr(ops, name) for name in ops.__all__}
        members.update((name, getattr(package, name)) for name in package._RUNTIME)
        members.update((older, getattr(package, name)) for older, name in _OLD_NAMES.items())
        vars(module).update(members, __doc__=__doc__, __all__=sorted(members), __getattr__=_later)


def spec() -> ModuleSpec:
    """What an import of the integration's name is answered with."""
    return ModuleSpec(NAME, _Loader())


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Loader()) if fullname == NAME or fullname in MOVED else None


def register() -> None:
    """Make the older names importable; idempotent, and imports nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
