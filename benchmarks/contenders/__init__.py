"""The baselines: the runtime's own interfaces, and other libraries. Each module imports its library late."""

from __future__ import annotations

from importlib import import_module

from benchmarks.contenders.base import REMEDY as REMEDY
from benchmarks.contenders.base import Contender as Contender

_KNOWN = {
    "kungfu": "benchmarks.contenders.kungfu:KungFu",
    "kungfu-python": "benchmarks.contenders.kungfu:KungFuPython",
    "kungfu-primitive": "benchmarks.contenders.primitive:KungFuPrimitive",
    "kungfu-kernel": "benchmarks.contenders.primitive:KungFuKernel",
    "gloo": "benchmarks.contenders.gloo:Gloo",
    "mpi": "benchmarks.contenders.mpi:Mpi",
    "mindspore": "benchmarks.contenders.mindspore_builtin:MindSpore",
    "memcpy": "benchmarks.contenders.kungfu:Memcpy",
}
THROUGH = {"native": "kungfu", "python": "kungfu-python", "primitive": "kungfu-primitive", "kernel": "kungfu-kernel"}
PEERS = tuple(name for name in _KNOWN if name not in THROUGH.values())


def find(name: str) -> type[Contender]:
    """Return the baseline of this name, or a user's ``module:Class``. Raise ValueError if there is none."""
    module, separator, cls = _KNOWN.get(name, name).partition(":")
    if not separator:
        raise ValueError(f"no contender {name!r}; there are {', '.join(PEERS)}, and module:Class for one of your own")
    try:
        found = getattr(import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"no contender {name!r}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, Contender)):
        raise ValueError(f"{name!r} is not a Contender")
    return found
