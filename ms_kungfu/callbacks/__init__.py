"""Callbacks for ``Model.train``. Loaded on first use, since they need MindSpore."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ms_kungfu.callbacks.broadcast import BroadcastCallback, sync_net_parameters
    from ms_kungfu.callbacks.elastic import KungFuElasticCallback
    from ms_kungfu.callbacks.monitor import MonitorCallback

__all__ = ["BroadcastCallback", "KungFuElasticCallback", "MonitorCallback", "sync_net_parameters"]


def __getattr__(name: str) -> Any:
    if name == "KungFuElasticCallback":
        from ms_kungfu.callbacks.elastic import KungFuElasticCallback

        return KungFuElasticCallback
    if name == "MonitorCallback":
        from ms_kungfu.callbacks.monitor import MonitorCallback

        return MonitorCallback
    if name in ("BroadcastCallback", "sync_net_parameters"):
        from ms_kungfu.callbacks import broadcast

        return getattr(broadcast, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
