"""What decides the next step of training, named piece by piece, and how it reaches the workers that join.

The pieces (``CARRIED`` lists their names; a test trains on with each one missing and sees that it matters):

- ``parameters``: every MindSpore Parameter of the trained cells: weights, moments, global step, learning rate, the loss
  scale of a training cell. Broadcast straight into the joiner's Parameters.
- ``progress``: the step, epoch and call of training.
- ``dataset``: an ElasticDataset's epoch, position and seed.
- ``loss_scale``: the numbers of a loss scale manager that works on the host.
- ``random_mindspore``, ``random_python``, ``random_numpy``: the states of the global random generators. A joiner goes
  on with those of the worker it gets its state from.

Not carried: what MindSpore's kernels keep for themselves (a compiled Dropout's own generator on CPU) and what a program
keeps in variables of its own; add the latter as a :class:`Component`.

Everything but the parameters travels as JSON, which restores integers and floats exactly and can't carry code.
"""

from __future__ import annotations

import hashlib
import json
import random
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np

from ms_kungfu import comm, runtime
from ms_kungfu.elastic import membership
from ms_kungfu.errors import KungFuError

CARRIED = ("parameters", "progress", "dataset", "loss_scale", "random_mindspore", "random_python", "random_numpy")


@dataclass(frozen=True)
class Component:
    """One named piece of state on the host: `capture` returns JSON, `restore` takes it at another worker."""

    name: str
    capture: Callable[[], Any]
    restore: Callable[[Any], None]


def random_components() -> list[Component]:
    """The global random generators of Python, NumPy and MindSpore."""

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
        Component("random_mindspore", _capture_mindspore, _restore_mindspore),
        Component("random_python", random.getstate, restore_python),
        Component("random_numpy", capture_numpy, restore_numpy),
    ]


def _capture_mindspore() -> Any:
    import mindspore as ms

    return {"seed": ms.get_seed(), "generator": ms.get_rng_state().asnumpy().tolist()}


def _restore_mindspore(state: Any) -> None:
    import mindspore as ms

    if state["seed"] is not None and state["seed"] != ms.get_seed():
        ms.set_seed(state["seed"])
    ms.set_rng_state(ms.Tensor(np.array(state["generator"], dtype=np.uint8)))


def attributes_component(name: str, owner: Any) -> Component:
    """The plain numbers among an object's attributes, as in a host-side loss scale manager."""

    def capture() -> Any:
        return {k: v for k, v in vars(owner).items() if isinstance(v, (bool, int, float))}

    return Component(name, capture, lambda state: vars(owner).update(state))


def collect_parameters(trained: Iterable[Any]) -> list[Any]:
    """The Parameters of cells, of lists of Parameters and of objects that hold some, each once, in a stable order."""
    import mindspore as ms

    def of(item: Any) -> Iterable[Any]:
        if isinstance(item, ms.Parameter):
            return [item]
        if isinstance(item, ms.nn.Cell):
            return item.get_parameters()
        if isinstance(item, (list, tuple)):
            return [p for part in item for p in of(part)]
        held = [p for p in getattr(item, "__dict__", {}).values() if isinstance(p, ms.Parameter)]
        if not held:
            raise TypeError(f"expected cells, an optimizer or Parameters to keep the same on all workers, got {item!r}")
        return held

    return list({id(p): p for item in trained for p in of(item)}.values())


def fingerprint(parameters: Iterable[Any]) -> int:
    """A number that differs where names, shapes or dtypes differ."""
    text = "\n".join(f"{p.name} {tuple(p.shape)} {p.dtype}" for p in parameters)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


# Why a worker is at the meeting. The higher goes first where workers come for different things.
_FOR_PARAMETERS, _FOR_STATE = 1, 2


def _meet(purpose: int, lacking: bool, parameters: Sequence[Any]) -> tuple[bool, bool]:
    """Agree with all workers on what to share: (this one's turn, somebody lacks the state).

    A joiner runs its program from the start and may come to `sync_net_parameters` while the others are about to hand
    over the whole state: it then goes on without, as it is about to receive everything.
    """
    row = np.array([purpose, lacking, fingerprint(parameters)], dtype=np.int64)
    while True:
        rows = np.asarray(comm.all_gather(row, name="kungfu/state/meet")).reshape(-1, 3)
        if len(set(rows[:, 0])) == 1:
            break
        if purpose < rows[:, 0].max():
            return False, True
    if rows[:, 1].any() or purpose == _FOR_PARAMETERS:
        other = np.flatnonzero(rows[:, 2] != rows[0, 2])
        if other.size:
            raise KungFuError(
                f"rank {other[0]} trains other parameters than rank 0 (their names, shapes or dtypes differ); "
                "start all workers with the same program and arguments"
            )
    return True, bool(rows[:, 1].any())


_differing: weakref.WeakSet[Any] = weakref.WeakSet()


def let_differ(owner: Any) -> None:
    """The Parameters of this cell may be other ones at each worker, while its `replicas_differ` is true."""
    _differing.add(owner)


def _may_differ(parameters: Iterable[Any]) -> bool:
    own = {id(p) for owner in _differing if owner.replicas_differ for p in owner.get_parameters()}
    return any(id(p) in own for p in parameters)


def share_parameters(parameters: Sequence[Any], root: int = 0) -> None:
    """Collective: the root's values into everyone's `parameters`, in place. Returns at once at a joiner that is about
    to receive the whole state."""
    from ms_kungfu.ops._sync import broadcast_parameters

    runtime.init()
    turn, _ = _meet(_FOR_PARAMETERS, False, parameters)
    if turn:
        broadcast_parameters(list(parameters), root, "kungfu/state/parameters")
        membership.state_received()  # what such a program calls its state


def share_state(parameters: Sequence[Any], components: Sequence[Component]) -> bool:
    """Collective after a change of membership: whoever joined gets everything. True where this worker received it.

    Parameters reach every worker (they are the same already at those that stay, unless they differ by nature, as
    BatchNorm's moving averages do: all go on with those of the lowest rank that stayed). Where the workers' models are
    meant to differ (an optimizer that averages models), those that stay keep theirs. Components are restored at joiners
    only.
    """
    from ms_kungfu.ops._sync import broadcast_parameters

    joiner = membership.is_joiner()
    _, lacking = _meet(_FOR_STATE, joiner, parameters)
    if not lacking:
        return False
    root = membership.sync_root()
    at_root = runtime.current_rank() == root
    text = json.dumps({c.name: c.capture() for c in components}) if at_root else ""
    received = json.loads(_broadcast_text(text, root, at_root))
    keep = not joiner and _may_differ(parameters)
    broadcast_parameters(list(parameters), root, "kungfu/state/parameters", keep)
    if joiner:
        differing = set(received) ^ {c.name for c in components}
        if differing:
            raise KungFuError(f"{min(differing)!r} is state on one side only; start all workers with the same program")
        for component in components:
            component.restore(received[component.name])
        membership.state_received()
    return joiner


def _broadcast_text(text: str, root: int, at_root: bool) -> str:
    content = np.frombuffer(text.encode(), dtype=np.uint8)
    length = comm.broadcast(np.array([content.size], dtype=np.int64), root=root, name="kungfu/state/length")
    buffer = content if at_root else np.zeros(int(length[0]), dtype=np.uint8)
    return bytes(comm.broadcast(buffer, root=root, name="kungfu/state/host")).decode()
