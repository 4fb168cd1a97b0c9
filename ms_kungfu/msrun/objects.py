"""Transfer objects that have Parameters but aren't cells, in a program with its own training loop.

An example is ``@ms.jit_class class Accumulator``. A joining worker receives the values of such objects from the rank
that sends the training state. Workers don't compare these values, which may differ by design: for example, an object
may contain a sum of gradients that haven't been reduced.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

import mindspore as ms
from mindspore import nn

from ms_kungfu.callbacks.codec import pack, unpack
from ms_kungfu.elastic.state import Component


def component(cells: Iterable[Any]) -> Component:
    """Return the state component for the objects that exist now, without the Parameters of `cells`."""
    own = _parameters({id(parameter) for cell in cells for parameter in cell.get_parameters()})

    def restore(packed: Any) -> None:
        for name, values in unpack(packed).items():
            if name in own and own[name].shape == values.shape:
                own[name].copy_(values)

    return Component("objects", lambda: pack(own), restore, own=True)


def _parameters(known: set[int]) -> dict[str, Any]:
    """Return the objects' Parameters that aren't in `known`, by the object's class, attribute and Parameter's name.

    If two Parameters have the same key, other workers can't distinguish them, so the result contains neither.
    """
    found: dict[str, dict[int, Any]] = {}
    for each in gc.get_objects():
        if getattr(type(each), "__ms_class__", False) and not isinstance(each, nn.Cell):
            for attribute, value in vars(each).items():
                for parameter in _parameters_in(value):
                    if id(parameter) not in known:
                        name = f"{type(each).__name__}.{attribute} {parameter.name}"
                        found.setdefault(name, {})[id(parameter)] = parameter
    return {name: next(iter(those.values())) for name, those in sorted(found.items()) if len(those) == 1}


def _parameters_in(value: Any) -> Iterator[Any]:
    if isinstance(value, ms.Parameter):
        yield value
    elif isinstance(value, (tuple, list)):
        yield from (each for each in value if isinstance(each, ms.Parameter))
