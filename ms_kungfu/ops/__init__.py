"""Collectives that are MindSpore primitives, for GRAPH and PyNative mode."""

from ms_kungfu.ops import _compile_cache as _compile_cache
from ms_kungfu.ops import _executor as _executor
from ms_kungfu.ops import _grad as _grad
from ms_kungfu.ops import _saving
from ms_kungfu.ops._place import barrier, cluster_size, rank
from ms_kungfu.ops._store import RequestModel, SaveModel
from ms_kungfu.ops._sync import wait_for_queue
from ms_kungfu.ops._variables import request_variable, save_variable
from ms_kungfu.ops.all_gather import KungFuAllGather
from ms_kungfu.ops.all_reduce import KungFuAllReduce
from ms_kungfu.ops.broadcast import KungFuBroadcast
from ms_kungfu.ops.reduce_op import ReduceOp
from ms_kungfu.ops.reduce_scatter import KungFuReduceScatter
from ms_kungfu.ops.resize import KungFuResize

_saving.install()

__all__ = [
    "KungFuAllGather",
    "KungFuAllReduce",
    "KungFuBroadcast",
    "KungFuReduceScatter",
    "KungFuResize",
    "ReduceOp",
    "RequestModel",
    "SaveModel",
    "barrier",
    "cluster_size",
    "rank",
    "request_variable",
    "save_variable",
    "wait_for_queue",
]
