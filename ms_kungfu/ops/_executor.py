"""Measure the compilations by MindSpore's executor of cells in GRAPH mode."""

from __future__ import annotations

import functools
from typing import Any

from ms_kungfu import _core, membership

try:
    from mindspore.graph.api import _cell_graph_executor
except ImportError:  # before MindSpore 2.9
    from mindspore.common.api import _cell_graph_executor

EXECUTOR: Any = _cell_graph_executor


def _measure_compilations() -> None:
    """Count the time of each later compilation of a cell, and add the compilation to the process's trace.

    The compilations of functions with ``mindspore.jit``, which have another executor, aren't counted.
    """
    compile_or_find = EXECUTOR.compile

    @functools.wraps(compile_or_find)
    def measured(*arguments: Any, **options: Any) -> Any:
        began, began_ns = membership.monotonic(), _core.trace_now()
        phase, has_compiled = compile_or_find(*arguments, **options)
        if has_compiled:
            membership.count_spent("compilation", membership.monotonic() - began)
            if began_ns:
                _core.trace_span("compile", began_ns)
        return phase, has_compiled

    EXECUTOR.compile = measured


_measure_compilations()
