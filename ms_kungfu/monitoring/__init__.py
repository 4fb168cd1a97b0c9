"""Measure training while it runs; see docs/monitoring.md.

::

    monitor = Monitor(jsonl="training.jsonl")
    callback = KungFuElasticCallback(monitor=monitor)  # or MonitorCallback(monitor)
    model.train(..., callbacks=[callback])

Importing this package doesn't import MindSpore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ms_kungfu.monitoring.endpoint import MetricsEndpoint
    from ms_kungfu.monitoring.monitor import Monitor
    from ms_kungfu.monitoring.noise_scale import NoiseScaleEstimator
    from ms_kungfu.monitoring.record import StepRecord
    from ms_kungfu.optimizers.monitored import MonitorGradientNoiseScaleOptimizer, MonitorGradientVarianceOptimizer

_WHERE = {
    "MetricsEndpoint": "monitoring.endpoint",
    "Monitor": "monitoring.monitor",
    "MonitorGradientNoiseScaleOptimizer": "optimizers.monitored",
    "MonitorGradientVarianceOptimizer": "optimizers.monitored",
    "NoiseScaleEstimator": "monitoring.noise_scale",
    "StepRecord": "monitoring.record",
}

__all__ = [
    "MetricsEndpoint",
    "Monitor",
    "MonitorGradientNoiseScaleOptimizer",
    "MonitorGradientVarianceOptimizer",
    "NoiseScaleEstimator",
    "StepRecord",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        from importlib import import_module

        return getattr(import_module(f"ms_kungfu.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
