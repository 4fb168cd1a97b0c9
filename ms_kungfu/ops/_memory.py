"""Repair ``Parameter.set_data`` in PyNative mode for optimizers that use ms_kungfu's primitives.

``set_data`` gives a Parameter another memory. An optimizer's ``construct`` is jitted, and what was compiled at its
first call keeps the old one. From then on it silently updates numbers that aren't used. Programs written for the older
integration do so after each resize (``param.set_data(broadcast(param))`` for every parameter, the optimizer's moments
included). GRAPH mode isn't affected.

So the optimizer's class keeps the memory that the first call was compiled with. Before a later call, a Parameter that
has another one gets the old one back, with the new value in it.

It can't repair an optimizer inside a jitted function of the program's own, as it isn't called then.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import mindspore as ms
from mindspore import nn

# Optimizer -> (parameter, its memory as a tensor, the address) of all that its construct reads and writes.
_kept: weakref.WeakKeyDictionary[Any, list[tuple[Any, Any, int]]] = weakref.WeakKeyDictionary()


def keep(cls: type) -> None:
    """Repair the class, if it is an optimizer's and isn't repaired yet."""
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
            # Not a view: MindSpore 2.7.2's writes to one don't reach the memory.
            _kept[self] = [(p, ms.Tensor(p), p.data_ptr()) for p in self.get_parameters()]
        return result

    called.keeps_memory = True  # type: ignore[attr-defined]
    cls.__call__ = called  # type: ignore[method-assign]
