"""MindSpore's executor of compiled cells in GRAPH mode. This module adds compilations to the process's trace."""

from __future__ import annotations

import functools
from typing import Any

from ms_kungfu import _core, env

try:
    from mindspore.graph.api import _cell_graph_executor
except ImportError:  # before MindSpore 2.9
    from mindspore.common.api import _cell_graph_executor

EXECUTOR: Any = _cell_graph_executor


def trace_compilations() -> None:
    """Add each later compilation of a cell to the process's trace."""
    compile_or_find = EXECUTOR.compile

    @functools.wraps(compile_or_find)
    def traced(*arguments: Any, **options: Any) -> Any:
        began_ns = _core.trace_now()
        phase, has_compiled = compile_or_find(*arguments, **options)
        if began_ns and has_compiled:
            _core.trace_span("compile", began_ns)
        return phase, has_compiled

    EXECUTOR.compile = traced


if env.TRACE.get() is not None:
    trace_compilations()
