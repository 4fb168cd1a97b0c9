"""Define the training state, that is, everything that determines the next training step.

The training state consists of the following pieces. For each piece, a test shows that training
without this piece yields different results:

- ``parameters``: every MindSpore Parameter of the trained cells, such as weights, moments, the
  global step, the learning rate, and the loss scale of a training cell. Their values are broadcast
  directly into the joining worker's Parameters.
- ``buffers``: the tensors that cells have registered with ``register_buffer``.
- ``progress``: the current step, epoch and training call.
- ``dataset``: an ElasticDataset's epoch and seed, and which samples of the epoch remain.
- ``loss_scale``: the numbers of a loss scale manager that is a plain Python object.
- ``learning_rate``: the initial size of an `lr_rule`, and the current factor.
- ``param_groups``: the plain numbers in the groups of an optimizer with ``param_groups``
  (``mindspore.experimental.optim``), and the numbers of the program's own schedulers for that
  optimizer. The optimizer's other rates and counters are Parameters (the first piece).
- ``random_mindspore``, ``random_python``, ``random_numpy``: the states of the global random
  generators. A joining worker continues with the source rank's states, or derives its own states
  from them: see `randomness`.
- ``random_generators``: the states of ``mindspore.Generator`` objects that are attributes of the
  trained cells.

The state doesn't include data inside MindSpore's kernels, such as the generator of a compiled Dropout
on CPU. It also doesn't include the program's own variables; add these as a :class:`Component`.

All pieces except the parameters and buffers are sent as JSON, which restores integers and floats
exactly and can't contain code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable

from ms_kungfu.errors import KungFuError
from ms_kungfu.trained import inventory


@dataclass(frozen=True)
class Component:
    """A named piece of the training state that consists of plain Python values.

    If each worker has its own state (`own`), a checkpoint contains the state of every worker. A joining
    worker receives the state of its source rank.

    Args:
        name: the name of the component, unique in the program.
        capture: a function that returns the state as JSON.
        restore: a function that restores a captured state on another worker.
        own: whether the state differs between workers by design.
        derive: a function that derives this worker's own state. It is called with the state of another
            worker, after that state has been restored.
    """

    name: str
    capture: Callable[[], Any]
    restore: Callable[[Any], None]
    own: bool = False
    """Whether the state differs between workers by design."""
    derive: Callable[[Any], None] | None = None
    """A function that derives this worker's own state after another worker's state has been restored."""


@dataclass(frozen=True)
class TrainingState:
    """All pieces of the training state.

    `buffers` maps names to tensors. `averaged` contains the parameters and buffers that differ between
    workers by design. They are averaged over the workers when the cluster changes, and before a
    checkpoint.
    """

    parameters: Sequence[Any]
    components: Sequence[Component]
    buffers: Mapping[str, Any] = field(default_factory=dict)
    averaged: Sequence[Any] = ()
    statistics: Sequence[Any] = ()
    """All moving statistics, including those that are not averaged."""
    call: int = 0
    """The number of the current training call, counted from 1."""


def attributes_component(name: str, owner: Any) -> Component:
    """Return a component with the numbers in an object's attributes, e.g. those of a loss scale manager."""

    def capture() -> Any:
        return {k: v for k, v in vars(owner).items() if isinstance(v, (bool, int, float))}

    return Component(name, capture, lambda state: vars(owner).update(state))


def groups_component(optimizers: Sequence[Any], schedulers: Sequence[Any]) -> Component:
    """Return a component with the numbers in the optimizers' ``param_groups`` and in the optimizers' schedulers.

    MindSpore's own schedulers are excluded: their counters are Parameters, and their other numbers are
    arguments that the program passes.
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
    """Restore each component. If the received components have other names, raise KungFuError without any change."""
    differing = set(received) ^ {c.name for c in components}
    if differing:
        raise KungFuError(
            f"only some workers have the state {min(differing)!r}; start all workers with the same program"
        )
    for component in components:
        _restore(component, received[component.name], of_another=True)


def _restore(component: Component, state: Any, of_another: bool) -> None:
    component.restore(state)
    if of_another and component.derive is not None:
        component.derive(state)


def resume_components(components: Sequence[Component], kept: Mapping[str, Any], of_another: bool = False) -> list[str]:
    """Restore the components that both a checkpoint and the program have. Return the names that only one of them has.

    The names may differ, e.g. because the program that wrote the checkpoint used no monitor.
    `of_another`: whether `kept` is the state of another worker, because the checkpoint has no state
    for this worker.
    """
    for component in components:
        if component.name in kept:
            _restore(component, kept[component.name], of_another)
    return sorted(set(kept) ^ {c.name for c in components})
