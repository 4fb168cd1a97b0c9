"""Modules that have moved: their old names go on working, and say so once.

A finder, asked after all others, answers for an old name with the module itself, so that there are never two of it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    "ms_kungfu.dataset.dealing": "ms_kungfu.dataset.sharding",
    "ms_kungfu.elastic.cluster": "ms_kungfu.cluster",
    "ms_kungfu.elastic.gathering": "ms_kungfu.agreement",
    "ms_kungfu.elastic.membership": "ms_kungfu.membership",
    "ms_kungfu.elastic.model_store": "ms_kungfu.membership.model_store",
    "ms_kungfu.elastic.steering": "ms_kungfu.elastic.policy_runner",
    "ms_kungfu.elastic.rendezvous": "ms_kungfu.broker_protocol",
}


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        warnings.warn(f"{old} is called {MOVED[old]} now", FutureWarning, stacklevel=2)
        sys.modules[old] = import_module(MOVED[old])  # what an import returns is what it finds here afterwards


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Loader()) if fullname in MOVED else None


def register() -> None:
    """Make the old names importable; idempotent, and imports nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
