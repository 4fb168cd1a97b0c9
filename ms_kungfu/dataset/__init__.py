"""Datasets that adapt to the cluster.

:class:`ElasticDataset` partitions the samples again whenever the cluster changes. :func:`indexed`
numbers a dataset's samples. Both names are imported on first use, because they need MindSpore.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ms_kungfu.dataset.elastic import ElasticDataset
    from ms_kungfu.dataset.indexing import indexed

__all__ = ["ElasticDataset", "indexed"]


def __getattr__(name: str) -> Any:
    if name == "ElasticDataset":
        from ms_kungfu.dataset.elastic import ElasticDataset

        return ElasticDataset
    if name == "indexed":
        from ms_kungfu.dataset.indexing import indexed

        return indexed
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
