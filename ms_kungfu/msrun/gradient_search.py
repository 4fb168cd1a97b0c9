"""Find out whether a function or cell in the program computes gradients."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.ops.composite.base import GradOperation, _Grad
from mindspore.ops.function.grad import grad_func

MARK = "kungfu_gradient"
"""An attribute that marks the gradient functions that `ms_kungfu.msrun.rank_batches` has replaced."""
# A function in the program is assumed to compute gradients if it uses one of these objects or names.
_MAKERS = {id(maker) for maker in (GradOperation, _Grad, grad_func.grad, grad_func.value_and_grad)}
_NAMES = {"value_and_grad", "GradOperation"}
_known: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()


def differentiates(function: Any, *arguments: Any) -> bool:
    """Return whether a function or cell uses a gradient function, judging by its objects and names."""
    function = getattr(function, "__func__", function)
    if function not in _known:
        held = [each for each in arguments if not isinstance(each, (ms.Tensor, int, float, tuple, list, dict))]
        _known[function] = any(map(_Search().reaches, [function, *held]))
    return _known[function]


class _Search:
    """A search for gradient functions among the objects and names in a function or cell."""

    _MOST = 100_000  # the search ends after this many objects

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no new object reuses an id

    def reaches(self, thing: Any) -> bool:
        if id(thing) in _MAKERS or isinstance(thing, (GradOperation, _Grad)) or self._is_gradient(thing):
            return True
        if id(thing) in self._seen or len(self._seen) > self._MOST:
            return False
        self._seen[id(thing)] = thing
        return any(map(self.reaches, self._held_by(thing)))

    @staticmethod
    def _is_gradient(thing: Any) -> bool:
        return isinstance(thing, FunctionType) and MARK in vars(thing)

    def _held_by(self, thing: Any) -> list[Any]:
        if isinstance(thing, (ms.Tensor, type, str, bytes, int, float, np.ndarray)) or inspect.ismodule(thing):
            return []
        if isinstance(thing, functools.partial):
            return [thing.func, *thing.args, *thing.keywords.values()]
        if isinstance(thing, MethodType):
            return [thing.__func__, thing.__self__]
        if isinstance(thing, FunctionType):
            return self._named_by(thing)
        if isinstance(thing, dict):
            return list(thing.values())
        if isinstance(thing, (tuple, list)):
            return list(thing)
        own = type(thing).__module__.partition(".")[0] not in ("mindspore", "ms_kungfu", "builtins")
        if isinstance(thing, nn.Cell):
            return [*vars(thing).values(), *thing.cells(), *([type(thing).construct] if own else [])]
        return [*getattr(thing, "__dict__", {}).values(), *([type(thing).__call__] if own else [])]

    @staticmethod
    def _named_by(function: FunctionType) -> list[Any]:
        function = inspect.unwrap(function)
        if not isinstance(function, FunctionType) or function.__module__.partition(".")[0] == "mindspore":
            return []
        held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        for cell in function.__closure__ or ():
            try:
                held.append(cell.cell_contents)
            except ValueError:  # the closure cell is still empty
                continue
        names = set(names_in(function.__code__))
        held += [function.__globals__[name] for name in names if name in function.__globals__]
        return [*held, *([GradOperation] if names & _NAMES else [])]


def names_in(code: CodeType) -> Iterator[str]:
    """Return the global names, attributes and free variables that the code uses."""
    yield from (*code.co_names, *code.co_freevars)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)
