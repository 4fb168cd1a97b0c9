"""Training that goes on while workers come and go. What users touch loads on first use: the launcher needs neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ms_kungfu.elastic.policy import Decision, Metrics, Policies, Policy

if TYPE_CHECKING:
    from ms_kungfu.elastic.differences import consensus
    from ms_kungfu.elastic.policies import (
        NoiseScaleLearningRate,
        NoiseScalePolicy,
        SchedulePolicy,
        StragglerPolicy,
        ThroughputPolicy,
    )
    from ms_kungfu.elastic.sharded_step import ShardedStep
    from ms_kungfu.elastic.state import Component
    from ms_kungfu.elastic.training import ElasticTraining
    from ms_kungfu.membership import evict

__all__ = [
    "Component",
    "Decision",
    "ElasticTraining",
    "NoiseScaleLearningRate",
    "NoiseScalePolicy",
    "Policies",
    "Policy",
    "Metrics",
    "SchedulePolicy",
    "ShardedStep",
    "StragglerPolicy",
    "ThroughputPolicy",
    "consensus",
    "evict",
]


def __getattr__(name: str) -> Any:
    if name == "ElasticTraining":
        from ms_kungfu.elastic.training import ElasticTraining

        return ElasticTraining
    if name == "ShardedStep":
        from ms_kungfu.elastic.sharded_step import ShardedStep

        return ShardedStep
    if name == "consensus":
        from ms_kungfu.elastic.differences import consensus

        return consensus
    if name == "evict":
        from ms_kungfu.membership import evict

        return evict
    if name == "Component":
        from ms_kungfu.elastic.state import Component

        return Component
    if name in __all__:
        from ms_kungfu.elastic import policies

        return getattr(policies, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
