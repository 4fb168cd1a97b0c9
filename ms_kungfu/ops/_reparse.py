"""Repair or reject optimizer classes whose gradients MindSpore would reduce twice.

MindSpore's optimizers have a jitted ``construct``. Suppose that a subclass overrides ``construct``, processes the
gradients and calls ``super().construct(gradients)``. In PyNative mode, the override runs in Python. It calls the jitted
base method, which then compiles *the object's* ``construct``: ``_JitExecutor.compile`` passes the object to the parser,
which looks up the method by name and finds the override again. So the body of the override runs twice, and gradients
that it sums over the ranks are silently summed twice.

If the override itself is jitted, the parser finds the intended method. Therefore, ms_kungfu jits the override when an
object of the class gets one of ms_kungfu's primitives as an attribute. If MindSpore compiles an override that isn't
jitted, ms_kungfu rejects the compilation.
"""

from __future__ import annotations

import inspect
import logging
import sys
from types import FrameType
from typing import Any

import mindspore
from mindspore import nn

from ms_kungfu.ops import _memory

_log = logging.getLogger(__name__)


def _is_jitted(function: Any) -> bool:
    return hasattr(function, "__wrapped_by_jit__")


def mend(cls: type) -> None:
    """Jit the class's own ``construct`` if it is a plain function that calls a base's jitted ``construct``.

    ms_kungfu calls this function for every class that uses its primitives. If the class is an optimizer, the function
    also calls `_memory.keep`.
    """
    _memory.keep(cls)
    definers = [base for base in cls.__mro__ if "construct" in vars(base)]
    if not definers or definers[0].__module__.partition(".")[0] == "mindspore":
        return
    construct = vars(definers[0])["construct"]
    if _is_jitted(construct) or not any(_is_jitted(vars(base)["construct"]) for base in definers[1:]):
        return
    if "construct" not in getattr(inspect.unwrap(construct), "__code__", construct).co_names:
        return  # the override never calls the base's construct
    _log.debug('jitted: class=%s reason="otherwise its construct would run twice"', definers[0].__qualname__)
    definers[0].construct = mindspore.jit(backend="ms_backend")(construct)  # type: ignore[attr-defined]


class Mended:
    """A base class that calls `mend` for each of its subclasses."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        mend(cls)


def mend_owner(frame: FrameType) -> None:
    """Call `mend` for the class of the cell whose ``__setattr__`` is running in this frame."""
    owner = frame.f_locals.get("self")
    if isinstance(owner, nn.Cell):
        mend(type(owner))


def refuse() -> None:
    """Raise RuntimeError if MindSpore compiles an override instead of the jitted base method that was called.

    Call this while MindSpore infers a primitive's shapes, that is, during the compilation.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        executor = frame.f_locals.get("self") if frame.f_code.co_name == "compile" else None
        if type(executor).__name__ == "_JitExecutor":
            _check(executor)
            return
        frame = frame.f_back


def _check(executor: Any) -> None:
    cell, called = executor.obj, executor.fn
    if cell is None:
        return
    meant = getattr(cell, called.__name__)
    meant = getattr(meant, "__func__", meant)
    while meant is not called:
        if not hasattr(meant, "__wrapped__"):
            raise RuntimeError(
                f"{type(cell).__qualname__}.{called.__name__} calls the jitted {called.__qualname__}, and in "
                "PyNative mode MindSpore would run this override and its collectives twice; decorate the override "
                'with @mindspore.jit(backend="ms_backend")'
            )
        meant = meant.__wrapped__
