"""What decides the next step of training, named piece by piece, and how it reaches the workers that join.

The pieces (``CARRIED`` lists their names; a test trains on with each one missing and sees that it matters):

- ``parameters``: every MindSpore Parameter of the trained cells: weights, moments, global step, learning rate, the loss
  scale of a training cell. Broadcast straight into the joiner's Parameters.
- ``buffers``: the tensors that cells have registered with ``register_buffer``.
- ``progress``: the step, epoch and call of training.
- ``dataset``: an ElasticDataset's epoch and seed, and what of the epoch is still to be trained.
- ``loss_scale``: the numbers of a loss scale manager that works on the host.
- ``learning_rate``: the size that an `lr_rule` counts from and the factor it has arrived at.
- ``random_mindspore``, ``random_python``, ``random_numpy``: the states of the global random generators. A joiner goes
  on with those of the worker it gets its state from.
- ``random_generators``: those of the ``mindspore.Generator`` objects that are attributes of the trained cells.

Not carried: what MindSpore's kernels keep for themselves (a compiled Dropout's own generator on CPU) and what a program
keeps in variables of its own; add the latter as a :class:`Component`.

Everything but the parameters and buffers travels as JSON, which restores integers and floats exactly and can't carry
code.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

import numpy as np

from ms_kungfu.elastic.inventory import collect_generators
from ms_kungfu.errors import KungFuError

CARRIED = (
    "parameters",
    "buffers",
    "progress",
    "dataset",
    "loss_scale",
    "learning_rate",
    "random_mindspore",
    "random_python",
    "random_numpy",
    "random_generators",
)


@dataclass(frozen=True)
class Component:
    """One named piece of state on the host: `capture` returns JSON, `restore` takes it at another worker.

    `own` says that it differs between workers by nature: a checkpoint keeps every worker's. A joiner gets that of the
    worker it gets its state from.
    """

    name: str
    capture: Callable[[], Any]
    restore: Callable[[Any], None]
    own: bool = False
    """Whether it differs between workers by nature."""


@dataclass(frozen=True)
class TrainingState:
    """All pieces. `buffers` are tensors by name; `averaged` are those of the parameters and buffers that differ between
    workers by nature and are averaged over them at a change and before a checkpoint."""

    parameters: Sequence[Any]
    components: Sequence[Component]
    buffers: Mapping[str, Any] = field(default_factory=dict)
    averaged: Sequence[Any] = ()
    statistics: Sequence[Any] = ()
    """Moving statistics, whether averaged or not."""


def random_components(trained: Iterable[Any] = ()) -> list[Component]:
    """The global random generators of Python, NumPy and MindSpore, and the generators that cells hold."""

    def restore_python(state: Any) -> None:
        version, numbers, gauss = state
        random.setstate((version, tuple(numbers), gauss))

    def capture_numpy() -> Any:
        kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
        return [kind, np.asarray(keys).tolist(), position, has_gauss, gauss]

    def restore_numpy(state: Any) -> None:
        kind, keys, *rest = state
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))

    return [
        # First: setting MindSpore's seed resets the other two as well.
        Component("random_mindspore", _capture_mindspore, _restore_mindspore, own=True),
        Component("random_python", random.getstate, restore_python, own=True),
        Component("random_numpy", capture_numpy, restore_numpy, own=True),
        _generators_component(collect_generators(trained)),
    ]


def _capture_mindspore() -> Any:
    import mindspore as ms

    return {"seed": ms.get_seed(), "generator": ms.get_rng_state().asnumpy().tolist()}


def _restore_mindspore(state: Any) -> None:
    import mindspore as ms

    if state["seed"] is not None and state["seed"] != ms.get_seed():
        ms.set_seed(state["seed"])
    ms.set_rng_state(ms.Tensor(np.array(state["generator"], dtype=np.uint8)))


def _generators_component(generators: Sequence[Any]) -> Component:
    import mindspore as ms

    def capture() -> Any:
        return [g.get_state().asnumpy().tolist() for g in generators]

    def restore(states: Any) -> None:
        for generator, state in zip(generators, states):
            generator.set_state(ms.Tensor(np.array(state, dtype=np.uint8)))

    return Component("random_generators", capture, restore, own=True)


def attributes_component(name: str, owner: Any) -> Component:
    """The plain numbers among an object's attributes, as in a host-side loss scale manager."""

    def capture() -> Any:
        return {k: v for k, v in vars(owner).items() if isinstance(v, (bool, int, float))}

    return Component(name, capture, lambda state: vars(owner).update(state))


def restore_components(components: Sequence[Component], received: Mapping[str, Any]) -> None:
    """Restore each component. KungFuError, and nothing restored, where it is another program's state."""
    differing = set(received) ^ {c.name for c in components}
    if differing:
        raise KungFuError(f"{min(differing)!r} is state on one side only; start all workers with the same program")
    for component in components:
        component.restore(received[component.name])


def resume_components(components: Sequence[Component], kept: Mapping[str, Any]) -> list[str]:
    """Restore from a checkpoint what it and the program both have: a program may watch its training in another way than
    the one that wrote the checkpoint. Returns the names that only one of them has."""
    for component in components:
        if component.name in kept:
            component.restore(kept[component.name])
    return sorted(set(kept) ^ {c.name for c in components})
