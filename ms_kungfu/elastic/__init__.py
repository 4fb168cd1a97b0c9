"""Training that goes on while workers come and go. What users touch loads on first use: the launcher needs neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ms_kungfu.elastic.state import Component
    from ms_kungfu.elastic.training import ElasticTraining

__all__ = ["Component", "ElasticTraining"]


def __getattr__(name: str) -> Any:
    if name == "ElasticTraining":
        from ms_kungfu.elastic.training import ElasticTraining

        return ElasticTraining
    if name == "Component":
        from ms_kungfu.elastic.state import Component

        return Component
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
