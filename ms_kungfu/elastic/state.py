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

import contextlib
import hashlib
import json
import logging
import random
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, TypeVar

import numpy as np

from ms_kungfu import comm, membership, runtime
from ms_kungfu.agreement import broadcast_text, gather_living, told_by_one
from ms_kungfu.comm import Array
from ms_kungfu.elastic import alike
from ms_kungfu.errors import KungFuError

_log = logging.getLogger(__name__)
Received = TypeVar("Received")

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


def collect_cells(trained: Iterable[Any]) -> dict[str, Any]:
    """The cells among `trained` and all cells in them, each once, by a name that is the same on all workers."""
    import mindspore as ms

    def of(item: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(item, ms.nn.Cell):
            for name, cell in item.cells_and_names():
                yield f"{path}.{name}" if name else path, cell
        elif isinstance(item, (list, tuple)):
            for i, part in enumerate(item):
                yield from of(part, f"{path}.{i}")

    found: dict[int, tuple[str, Any]] = {}
    for i, item in enumerate(trained):
        for name, cell in of(item, str(i)):
            found.setdefault(id(cell), (name, cell))
    return dict(found.values())


def collect_buffers(trained: Iterable[Any]) -> dict[str, Any]:
    """The tensors that cells have registered with ``register_buffer``, by name."""
    return {
        f"{path}.{name}": buffer
        for path, cell in collect_cells(trained).items()
        for name, buffer in cell.named_buffers(recurse=False)
    }


def collect_generators(trained: Iterable[Any]) -> list[Any]:
    """The ``mindspore.Generator`` objects that are attributes of cells."""
    import mindspore as ms

    held = [v for cell in collect_cells(trained).values() for v in vars(cell).values() if isinstance(v, ms.Generator)]
    return list({id(g): g for g in held}.values())


# Of the cells with moving statistics, in mindspore.nn and in mindspore.mint.nn.
_NORMALIZATION = ("mindspore.nn.layer.normalization", "mindspore.mint.nn.layer.normalization")
_STATISTICS = ("moving_mean", "moving_variance", "running_mean", "running_var")


def moving_statistics(trained: Iterable[Any]) -> list[Any]:
    """The moving means and variances of MindSpore's normalization cells, and of classes derived from them."""
    import mindspore as ms

    found = [
        getattr(cell, name, None)
        for cell in collect_cells(trained).values()
        if any(base.__module__ in _NORMALIZATION for base in type(cell).__mro__)
        for name in _STATISTICS
    ]
    return list({id(p): p for p in found if isinstance(p, ms.Parameter)}.values())


def check_averaged(averaged: Sequence[Any] | None) -> Sequence[Any] | None:
    """TypeError unless it is None or a list of floating-point tensors."""
    import mindspore as ms

    floats = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
    if averaged is None:
        return None
    if not isinstance(averaged, (list, tuple)):
        raise TypeError(f"averaged is a list of Parameters, got {averaged!r}")
    for tensor in averaged:
        if not isinstance(tensor, ms.Tensor) or tensor.dtype not in floats:
            raise TypeError(f"averaged is a list of Parameters with a mean, got {tensor!r} in it")
    return tuple(averaged)


def assign(tensor: Any, values: Array) -> None:
    """Write into a Parameter or buffer in place: compiled graphs stay valid and see the new values, in either mode."""
    import mindspore as ms

    tensor.copy_(ms.Tensor(values, dtype=tensor.dtype))  # ops.assign has no kernel for bfloat16


def collect_optimizers(trained: Iterable[Any]) -> list[Any]:
    """The optimizers of MindSpore among `trained` and in its cells, each once; not those inside of another one."""
    import mindspore as ms

    def of(item: Any) -> Iterable[Any]:
        if isinstance(item, ms.nn.Optimizer):
            return [item]
        if isinstance(item, ms.nn.Cell):
            return [found for cell in item.cells() for found in of(cell)]
        if isinstance(item, (list, tuple)):
            return [found for part in item for found in of(part)]
        return []

    return list({id(o): o for item in trained for o in of(item)}.values())


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
        rows = gather_living(row, "kungfu/state/meet")
        purposes = {int(each[0]) for each in rows.values()}
        if len(purposes) == 1:
            break
        if purpose < max(purposes):
            return False, True
    somebody_lacks = any(each[1] for each in rows.values())
    if somebody_lacks or purpose == _FOR_PARAMETERS:
        _check_programs({rank: int(each[2]) for rank, each in rows.items()})
    return True, somebody_lacks


_differing: weakref.WeakSet[Any] = weakref.WeakSet()


def let_differ(owner: Any) -> None:
    """The Parameters of this cell may be other ones at each worker, while its `replicas_differ` is true."""
    _differing.add(owner)


def _may_differ(parameters: Iterable[Any]) -> bool:
    own = _replicas()
    return any(id(p) in own for p in parameters)


def _replicas() -> set[int]:
    return {id(p) for owner in _differing if owner.replicas_differ for p in owner.get_parameters()}


def _that_may_differ(state: TrainingState) -> set[int]:
    """The tensors that differ between workers by nature."""
    return _replicas() | {id(t) for t in (*state.averaged, *state.statistics)}


def models_differ(trained: Iterable[Any]) -> bool:
    """Whether each worker trains a model of its own by design, as under an optimizer that averages models."""
    return _may_differ(collect_parameters(trained))


def share_parameters(parameters: Sequence[Any], root: int = 0) -> None:
    """Collective: the root's values into everyone's `parameters`, in place; where it has died, those of the lowest rank
    that lives. Returns at once at a joiner that is about to receive the whole state."""
    from ms_kungfu.ops._sync import broadcast_parameters

    runtime.init()
    turn, _ = _meet(_FOR_PARAMETERS, False, parameters)
    if turn:

        def receive(giver: int) -> None:
            with _whole_or_not_at_all(parameters):
                broadcast_parameters(list(parameters), giver, "kungfu/state/parameters")

        from_lowest_rank(receive, preferred=root)
        alike.mark(parameters)
        membership.state_received()  # what such a program calls its state


@contextlib.contextmanager
def _whole_or_not_at_all(tensors: Sequence[Any]) -> Iterator[None]:
    """Has their own values back where the worker dies whose values are being written into them: the next one to give
    its own must not give a mixture."""
    for tensor in tensors:
        if getattr(tensor, "has_init", False):
            tensor.init_data()
    before = [tensor.asnumpy().copy() for tensor in tensors]
    try:
        yield
    except Exception:
        for tensor, values in zip(tensors, before):
            assign(tensor, values)
        raise


def begin_alike(state: TrainingState) -> None:
    """Collective where training begins: where parameters or buffers differ between the workers, all take those of the
    lowest rank. What differs by nature (models that are meant to, moving statistics) is made the same once, when it is
    trained for the first time.
    """
    tensors = [*state.parameters, *state.buffers.values()]
    may = _that_may_differ(state)
    common = [t for t in tensors if id(t) not in may]
    own = [t for t in tensors if id(t) in may]
    row = np.array(
        [fingerprint(state.parameters), alike.content(common), alike.content(own), not all(map(alike.is_marked, own))]
    )
    rows = gather_living(row, "kungfu/state/begin")
    _check_programs({rank: int(each[0]) for rank, each in rows.items()})
    differ = [len({int(each[column]) for each in rows.values()}) > 1 for column in (1, 2)]
    if not any(each[3] for each in rows.values()):
        differ[1] = False
    if any(differ):
        sent = {id(t) for tensors, sends in ((common, differ[0]), (own, differ[1])) if sends for t in tensors}
        part = TrainingState(
            [p for p in state.parameters if id(p) in sent],
            (),
            {name: buffer for name, buffer in state.buffers.items() if id(buffer) in sent},
        )

        def receive(root: int) -> None:
            with _whole_or_not_at_all([*part.parameters, *part.buffers.values()]):
                broadcast_tensors(part, root)

        from_lowest_rank(receive)
        if runtime.current_rank() == min(rows):
            _log.info("the workers' parameters differed: training begins from this one's")
    alike.mark(tensors)


def _check_programs(fingerprints: Mapping[int, int]) -> None:
    first = min(fingerprints)
    for rank, each in fingerprints.items():
        if each != fingerprints[first]:
            raise KungFuError(
                f"rank {rank} trains other parameters than rank {first} (their names, shapes or dtypes differ); "
                "start all workers with the same program and arguments"
            )


def share_state(state: TrainingState) -> bool:
    """Collective after a change of membership: whoever joined gets everything. True where this worker received it.

    First the `averaged` tensors become the mean over those workers that have trained. Parameters reach every worker
    (they are the same already at those that stay); where the workers' models are meant to differ (an optimizer that
    averages models), those that stay keep theirs. Components are restored at joiners only.
    """
    joiner = membership.is_joiner()
    _, lacking = _meet(_FOR_STATE, joiner, state.parameters)
    average(state.averaged, counted=not joiner)
    if not lacking:
        return False

    def receive(root: int) -> Any:
        at_root = runtime.current_rank() == root
        text = json.dumps({c.name: c.capture() for c in state.components}) if at_root else ""
        received = json.loads(broadcast_text(text, root))
        broadcast_tensors(state, root, keep=not joiner and _may_differ(state.parameters))
        return received

    received = from_lowest_rank(receive, able=not joiner)
    if joiner:
        restore_components(state.components, received)
        alike.mark([*state.parameters, *state.buffers.values()])
        membership.state_received()
    return joiner


class StateLostError(KungFuError):
    """Nobody lives who could hand over what the others need."""


def from_lowest_rank(receive: Callable[[int], Received], able: bool = True, preferred: int | None = None) -> Received:
    """Collective: `receive` from the lowest living rank that is `able`, or from the `preferred` one among them; where
    it dies meanwhile, from the next one. StateLostError, at all of them, where none is able.
    """

    def choose(answers: Mapping[int, Array]) -> int:
        roots = [rank for rank, answer in answers.items() if answer]
        if not roots:
            raise StateLostError("every worker that had the training state has died")
        return preferred if preferred in roots else roots[0]

    return told_by_one(
        np.array(able), "kungfu/state/root", choose, lambda root, _: receive(root), "handed over the training state"
    )


def restore_components(components: Sequence[Component], received: Mapping[str, Any]) -> None:
    """Restore each component. KungFuError, and nothing restored, where it is another program's state."""
    differing = set(received) ^ {c.name for c in components}
    if differing:
        raise KungFuError(f"{min(differing)!r} is state on one side only; start all workers with the same program")
    for component in components:
        component.restore(received[component.name])


def average(tensors: Sequence[Any], counted: bool = True) -> None:
    """Collective: each tensor becomes its mean over the workers that are `counted`, in place, and the same everywhere.

    In float64, so that the mean of equal values is that value.
    """
    if not tensors or runtime.current_cluster_size() == 1:
        return
    values = [t.asnumpy().astype(np.float64).ravel() for t in tensors]
    row = np.concatenate([*values, [1.0]])
    # An uncounted one's may be anything, infinite too.
    total = comm.all_reduce(row if counted else np.zeros_like(row), name="kungfu/state/averages")
    if total[-1] == 0:
        return  # those with the training state have died, which the hand-over will say
    means = np.split(total[:-1] / total[-1], np.cumsum([v.size for v in values])[:-1])
    for tensor, mean in zip(tensors, means):
        assign(tensor, mean.reshape(tensor.shape))


def broadcast_tensors(state: TrainingState, root: int, keep: bool = False) -> None:
    """Collective: the root's parameters and buffers into everyone's, in place; with `keep` this worker's parameters
    stay as they are."""
    from ms_kungfu.ops._sync import broadcast_parameters

    broadcast_parameters(list(state.parameters), root, "kungfu/state/parameters", keep)
    for name, buffer in state.buffers.items():
        # Not by the kernel, which is for Parameters only: another tensor's memory may serve elsewhere.
        values = buffer.asnumpy()
        content = np.frombuffer(values.tobytes(), dtype=np.uint8)
        received = comm.broadcast(content, root=root, name=f"kungfu/state/buffer/{name}")
        if runtime.current_rank() != root:
            assign(buffer, np.frombuffer(received, dtype=values.dtype).reshape(values.shape))
