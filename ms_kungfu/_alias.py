"""Support programs that import KungFu's names from MindSpore's modules.

KungFu's modified MindSpore has KungFu's primitives in ``mindspore.ops.operations.kungfu_comm_ops``, its optimizers in
``mindspore.nn.optim.kungfu`` and ``mindspore.nn``, its callbacks in ``mindspore.train.callback._kungfu``, and its
bindings in ``mindspore._c_expression``. Programs for the modified MindSpore import these modules. This package makes
these imports work with stock MindSpore, without changing MindSpore's files. An import finder, which comes after all
other finders, provides these modules, with this package's classes and functions. MindSpore's own modules resolve
KungFu's names, too. If a name has no counterpart in this package, using the name raises an error that names the
alternative.

cmake/ms_kungfu_alias.pth and ms_kungfu_names.py, which are installed next to the package, are for programs that import
MindSpore before this package, or that don't import this package. Python runs the .pth file whenever an interpreter
starts. If the program imports MindSpore, the .pth file's code imports ms_kungfu_names. If the program uses one of
KungFu's names, ms_kungfu_names imports this package.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importing importlib.abc would take longer than importing the rest of this package

NAME = "mindspore.ops.operations.kungfu_comm_ops"
_OPTIMIZERS = "mindspore.nn.optim.kungfu"
_CALLBACKS = "mindspore.train.callback._kungfu"
MADE = (NAME, _OPTIMIZERS, _CALLBACKS)
"""The modules that only KungFu's modified MindSpore has."""

# KungFu's names for its bindings -> the names in this package.
_OLD_NAMES = {
    "kungfu_init": "init",
    "kungfu_finalize": "finalize",
    "kungfu_current_rank": "current_rank",
    "kungfu_current_cluster_size": "current_cluster_size",
}


# KungFu's names without a counterpart in this package -> the alternative.
_REFUSED = {
    "kungfu_nccl_init": "NCCL is used automatically on GPUs; remove it, or use ms_kungfu.KungFuContext(device='GPU')",
    "kungfu_nccl_finalize": "NCCL closes when the process leaves the cluster; remove it, or use ms_kungfu.finalize()",
    "KungFuSubsetAllReduce": "collectives always include all workers; use ms_kungfu.ops.KungFuAllReduce",
    "KungFuLogTensor": "use mindspore.ops.Print, or a ms_kungfu.monitoring.Monitor",
    "KungFuSummaryCallback": "use MindSpore's SummaryCollector, or a ms_kungfu.monitoring.Monitor",
}
_SUMMED = ("KungFuMomentum", "KungFuSGD")


def _later(module: str, name: str, places: Sequence[str]) -> Any:
    """Resolve one of KungFu's names. Call this only when the program uses the name, because it imports modules."""
    if name in _REFUSED:
        # Don't raise an AttributeError, because `from ... import` would replace its message.
        raise ImportError(f"ms_kungfu has no counterpart of KungFu's {name}: {_REFUSED[name]}")
    if name in _OLD_NAMES:
        return getattr(import_module("ms_kungfu"), _OLD_NAMES[name])
    for place in places:
        source = import_module(f"ms_kungfu.{place}")
        if name in source.__all__:
            if name in _SUMMED and module != NAME:
                warnings.warn(
                    f"{module}.{name} is ms_kungfu.optimizers.{name}, which averages gradients over the workers; "
                    "KungFu's MindSpore summed them; use gradients_mean=False to sum",
                    FutureWarning,
                    stacklevel=2 if module in MADE else 4,
                )
            return getattr(source, name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def of_mindspore(module: str, name: str) -> Any:
    """Return this package's object for KungFu's name `name` in a MindSpore module; None if there is none."""
    try:
        return _later(module, name, () if module == "mindspore._c_expression" else ("optimizers",))
    except AttributeError:
        return None


class _Loader(Loader):
    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        if old != NAME:
            place = "optimizers" if old == _OPTIMIZERS else "callbacks"
            vars(module).update(__doc__=__doc__, __getattr__=partial(_later, old, places=(place,)))
            return
        package, ops = import_module("ms_kungfu"), import_module("ms_kungfu.ops")
        members: dict[str, Any] = {name: getattr(ops, name) for name in ops.__all__}
        members.update((name, getattr(package, name)) for name in package._RUNTIME)
        members.update((older, getattr(package, name)) for older, name in _OLD_NAMES.items())
        find = partial(_later, NAME, places=("optimizers", "callbacks"))
        vars(module).update(members, __doc__=__doc__, __all__=sorted(members), __getattr__=find)


def spec(name: str) -> ModuleSpec:
    """Return the import spec of one of the modules in `MADE`."""
    return ModuleSpec(name, _Loader())


class _Finder:
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return spec(fullname) if fullname in MADE else None


def register() -> None:
    """Make KungFu's names importable, without importing anything yet. Idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
