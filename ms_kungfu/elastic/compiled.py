"""Inspect the graphs into which MindSpore has compiled a cell in GRAPH mode."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import context, nn
from mindspore.train.mind_ir_pb2 import ModelProto

from ms_kungfu.ops._executor import EXECUTOR

PYTHON = "PyExecute"


def graph_mode() -> bool:
    """Return whether MindSpore is in GRAPH mode, which compiles cells.

    This function is faster than `ms.get_context`, which is as slow as some kernels.
    """
    return bool(context._get_mode() == ms.GRAPH_MODE)


def parameters(cell: nn.Cell) -> list[Any]:
    """Return the Parameters in all graphs of a cell, without duplicates. The result includes those in closures."""
    held = [p for phase in cell.compile_cache for p in EXECUTOR._graph_executor.get_params(phase).values()]
    return list({id(parameter): parameter for parameter in held}.values())


def effects(cell: nn.Cell) -> set[str]:
    """Return the primitives in a cell's graphs that have side effects other than writing Parameters.

    Such primitives print, record, raise, communicate, or draw random numbers from an internal state. The function also
    looks into branches and loops. The result contains `PYTHON` if a graph calls the Python interpreter, which may do
    anything.
    """
    found = set()
    for phase in cell.compile_cache:
        graph = ModelProto()
        try:
            graph.ParseFromString(EXECUTOR._graph_executor.get_func_graph_proto(phase, "mind_ir", True))
        except RuntimeError:  # MindSpore can't export a graph that calls the interpreter
            found.add(PYTHON)
            continue
        for primitive in graph.primitives:
            if any(attribute.name in ("side_effect_io", "side_effect_hidden") for attribute in primitive.attribute):
                found.add(primitive.op_type)
    return found
