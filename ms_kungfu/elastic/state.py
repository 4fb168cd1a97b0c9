"""The state that decides the next step of training, piece by piece, and how it reaches joining workers.

The pieces (a test trains on without each one and finds that it matters):

- ``parameters``: every MindSpore Parameter of the trained cells: weights, moments, global step, learning rate, the loss
  scale of a training cell. Broadcast straight into the joining worker's Parameters.
- ``buffers``: the tensors that cells have registered with ``register_buffer``.
- ``progress``: the step, epoch and call of training.
- ``dataset``: an ElasticDataset's epoch and seed, and the rest of the epoch.
- ``loss_scale``: the numbers of a loss scale manager that works on the host.
- ``learning_rate``: the size that an `lr_rule` counts from and the factor it has arrived at.
- ``param_groups``: the plain numbers in the groups of optimizers that have them (``mindspore.experimental.optim``), and
  of the program's own schedulers for these. Their other rates and counters are Parameters.
- ``random_mindspore``, ``random_python``, ``random_numpy``: the states of the global random generators. A joining
  worker continues with those of the source rank, or derives its own from them: see `randomness`.
- ``random_generators``: those of the ``mindspore.Generator`` objects that are attributes of the trained cells.

Not carried: what MindSpore's kernels keep for themselves (a compiled Dropout's own generator on CPU) and what a program
keeps in variables of its own; add the latter as a :class:`Component`.

Everything but the parameters and buffers travels as JSON, which restores integers and floats exactly and can't carry
code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from ms_kungfu.errors import KungFuError
from ms_kungfu.trained import inventory


@dataclass(frozen=True)
class Component:
    """One named piece of state on the host.

    A checkpoint keeps the pieces that are each worker's own of every worker. A joining worker gets that
    of the worker it gets its state from.

    Args:
        name: of the piece, unique in the program.
        capture: returns the state as JSON.
        restore: takes it at another worker.
        own: whether it differs between workers by nature.
        derive: called with another worker's state once it is restored here, to derive this worker's own
            from it.
    """

    name: str
    capture: Callable[[], Any]
    restore: Callable[[Any], None]
    own: bool = False
    """Whether it differs between workers by nature."""
    derive: Callable[[Any], None] | None = None
    """Called with another worker's state once it is restored here, to derive this worker's own from it."""


@dataclass(frozen=True)
class TrainingState:
    """All pieces of the training state.

    `buffers` are tensors by name. `averaged` are those of the parameters and buffers that differ
    between workers by nature, and are averaged over them at a change and before a checkpoint.
    """

    parameters: Sequence[Any]
    components: Sequence[Component]
    buffers: Mapping[str, Any] = field(default_factory=dict)
    averaged: Sequence[Any] = ()
    statistics: Sequence[Any] = ()
    """Moving statistics, whether averaged or not."""
    call: int = 0
    """Of training, in which it is; from 1."""


def attributes_component(name: str, owner: Any) -> Component:
    """Return the plain numbers among an object's attributes, as in a host-side loss scale manager."""

    def capture() -> Any:
        return {k: v for k, v in vars(owner).items() if isinstance(v, (bool, int, float))}

    return Component(name, capture, lambda state: vars(owner).update(state))


def groups_component(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Component:
    """Return the numbers of optimizers with ``param_groups`` and their schedulers.

    MindSpore's schedulers count in Parameters, and their numbers are the program's arguments.
    """
    own = [s for s in schedulers if not type(s).__module__.startswith("mindspore.")]

    def capture() -> Any:
        return {
            "groups": [inventory.numbers_of_groups(optimizer) for optimizer in optimizers],
            "schedulers": [{k: v for k, v in vars(s).items() if isinstance(v, (bool, int, float))} for s in own],
        }

    def restore(state: Any) -> None:
        for optimizer, groups in zip(optimizers, state["groups"]):
            for group, numbers in zip(optimizer.param_groups, groups):
                group.update(numbers)
        for scheduler, numbers in zip(own, state["schedulers"]):
            vars(scheduler).update(numbers)

    return Component("param_groups", capture, restore)


def restore_components(components: Sequence[Component], received: Mapping[str, Any]) -> None:
    """Restore each component. KungFuError, and nothing restored, if it is another program's state."""
    differing = set(received) ^ {c.name for c in components}
    if differing:
        raise KungFuError(f"{min(differing)!r} is state on one side only; start all workers with the same program")
    for component in components:
        _restore(component, received[component.name], of_another=True)


def _restore(component: Component, state: Any, of_another: bool) -> None:
    component.restore(state)
    if of_another and component.derive is not None:
        component.derive(state)


def resume_components(components: Sequence[Component], kept: Mapping[str, Any], of_another: bool = False) -> list[str]:
    """Restore from a checkpoint what it and the program both have; return the names that only one has.

    A program may watch its training in another way than the one that wrote the checkpoint.
    `of_another`: the checkpoint has nothing of this worker's own, and `kept` is another one's.
    """
    for component in components:
        if component.name in kept:
            _restore(component, kept[component.name], of_another)
    return sorted(set(kept) ^ {c.name for c in components})
