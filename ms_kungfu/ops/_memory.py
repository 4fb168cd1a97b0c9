"""``Parameter.set_data`` in PyNative mode, a trap of MindSpore's, mended for optimizers that use our primitives.

``set_data`` gives a Parameter another memory. An optimizer's ``construct`` is jitted, and what was compiled at its
first call goes on with the old one: from then on it updates numbers that nobody sees, in silence. Programs written for
the older integration do so after each resize (``param.set_data(broadcast(param))`` for every parameter, the optimizer's
moments included). GRAPH mode isn't affected.

So the optimizer's class keeps hold of the memory that the first call was compiled with. Before a later call, a
Parameter that has another one gets the old one back, with the new value in it.

Not mended: an optimizer that is called inside a function of the program's own that is jitted, as it isn't called then.
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
    """Mend the class, where it is an optimizer's and isn't mended yet."""
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
            # Not a view: what MindSpore 2.7.2 writes into one stays out of the memory.
            _kept[self] = [(p, ms.Tensor(p), p.data_ptr()) for p in self.get_parameters()]
        return result

    called.keeps_memory = True  # type: ignore[attr-defined]
    cls.__call__ = called  # type: ignore[method-assign]
