"""Layers whose random state belongs to a shard of a step instead of a kernel: docs/shards.md."""

from ms_kungfu.nn.dropout import Dropout

__all__ = ["Dropout"]
