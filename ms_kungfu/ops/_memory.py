"""Make ``Parameter.set_data`` work in PyNative mode with optimizers that use ms_kungfu's primitives.

``set_data`` moves a Parameter to different memory. An optimizer's ``construct`` is jitted, and the graph that its first
call compiled continues to use the old memory. After ``set_data``, that graph silently updates only the old memory.
Programs that were written for KungFu's integration call ``set_data`` after each resize
(``param.set_data(broadcast(param))`` for every parameter, including the optimizer's moments). GRAPH mode isn't
affected.

Therefore, the optimizer's class records the Parameters' memory in the first call. If a Parameter has different memory
in a later call, its new value is copied into the old memory, and the Parameter gets the old memory back.

This doesn't work for an optimizer that runs inside a jitted function of the program, because then Python doesn't call
the optimizer.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import mindspore as ms
from mindspore import nn

# optimizer -> a tuple (Parameter, its memory as a tensor, its address) for each Parameter that `construct` uses
_kept: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any, int]]] = weakref.WeakKeyDictionary()


def keep(cls: type) -> None:
    """Make ``set_data`` work with the optimizers of class `cls`. Ignore other classes. Idempotent."""
    call = getattr(cls, "__call__", None)  # noqa: B004  # the function is wanted
    if not issubclass(cls, nn.Optimizer) or hasattr(call, "keeps_memory"):
        return

    @functools.wraps(call)  # type: ignore[arg-type]
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        if ms.get_context("mode") != ms.PYNATIVE_MODE:
            return call(self, *args, **kwargs)  # type: ignore[misc]
        for param, memory, address in _kept.get(self, ()):
            if param.data_ptr() != address:
                memory.copy_(param)
                param.set_data(memory)
        result = call(self, *args, **kwargs)  # type: ignore[misc]
        if self not in _kept:
            # Don't use a view: in MindSpore 2.7.2, writes to a view don't reach the memory.
            _kept[self] = [(p, ms.Tensor(p), p.data_ptr()) for p in self.get_parameters()]
        return result

    called.keeps_memory = True  # type: ignore[attr-defined]
    cls.__call__ = called  # type: ignore[method-assign]
