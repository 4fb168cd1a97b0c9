"""Train with elastic data parallelism on stock MindSpore.

::

    import ms_kungfu as kf
    optimizer = kf.optimizers.KungFuMomentum(net.trainable_params(), 0.01, 0.9)
    model.train(epochs, dataset, callbacks=[kf.callbacks.KungFuElasticCallback("100:2,200:4")])

Importing this package neither joins a cluster nor imports MindSpore. Submodules are imported on
first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._checkout import use_installed_build as _use_installed_build

_use_installed_build(globals())

from ._alias import register as _register_alias  # noqa: E402

_register_alias()

from ._version import VERSION as __version__  # noqa: E402
from .errors import (  # noqa: E402
    CollectiveAbortedError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    ConfigServerError,
    DeviceError,
    DivergenceError,
    InternalError,
    KungFuError,
    PeerLostError,
    ResizeError,
    StaleClusterError,
)

if TYPE_CHECKING:
    from . import callbacks, comm, dataset, elastic, fusion, monitoring, nn, ops, optimizers, ray
    from .runtime import *  # noqa: F403

_MODULES = ("callbacks", "comm", "dataset", "elastic", "fusion", "monitoring", "nn", "ops", "optimizers", "ray")
_RUNTIME = (
    "KungFuContext",
    "cluster_version",
    "current_cluster_size",
    "current_local_rank",
    "current_local_size",
    "current_rank",
    "detached",
    "finalize",
    "init",
    "keep_waiting",
    "last_error",
    "propose_new_size",
    "resize",
    "run_barrier",
    "uid",
    "using_kungfu",
)

__all__ = [
    "CollectiveAbortedError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "ConfigServerError",
    "DeviceError",
    "DivergenceError",
    "InternalError",
    "KungFuError",
    "PeerLostError",
    "ResizeError",
    "StaleClusterError",
    *_MODULES,
    *_RUNTIME,
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f".{name}", __name__)
    if name in _RUNTIME:
        return getattr(import_module(".runtime", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
