"""Layers whose random numbers depend on the shard, not on the worker (docs/shards.md)."""

from ms_kungfu.nn.dropout import Dropout

__all__ = ["Dropout"]
