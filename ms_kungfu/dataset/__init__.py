"""Data that follows the cluster: :class:`ElasticDataset`.

It loads on first use, since it needs MindSpore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ms_kungfu.dataset.elastic import ElasticDataset

__all__ = ["ElasticDataset"]


def __getattr__(name: str) -> Any:
    if name == "ElasticDataset":
        from ms_kungfu.dataset.elastic import ElasticDataset

        return ElasticDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
