"""What is trained, in cells, optimizers and other holders of Parameters; and how to write to it."""

from __future__ import annotations

import gc
import hashlib
import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ms_kungfu.comm import Array

_log = logging.getLogger(__name__)


def collect_parameters(trained: Iterable[Any]) -> list[Any]:
    """Return the Parameters of cells, of lists and of objects that hold some, each once, in a stable order."""
    import mindspore as ms

    def of(item: Any) -> Iterable[Any]:
        if isinstance(item, ms.Parameter):
            return [item]
        if isinstance(item, ms.nn.Cell):
            grouped = [cell for _, cell in item.cells_and_names() if is_grouped(cell)]
            return [*item.get_parameters(), *(p for cell in grouped for p in parameters_of_groups(cell))]
        if isinstance(item, (list, tuple)):
            return [p for part in item for p in of(part)]
        held = [p for p in getattr(item, "__dict__", {}).values() if isinstance(p, ms.Parameter)]
        if not held and not is_scheduler(item):
            raise TypeError(f"expected cells, an optimizer or Parameters to keep the same on all workers, got {item!r}")
        return held

    return list({id(p): p for item in trained for p in of(item)}.values())


def collect_cells(trained: Iterable[Any]) -> dict[str, Any]:
    """Return the cells among `trained` and all cells in them, each once, by a name that is the same on all workers."""
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
    """Return the tensors that cells have registered with ``register_buffer``, by name."""
    return {
        f"{path}.{name}": buffer
        for path, cell in collect_cells(trained).items()
        for name, buffer in cell.named_buffers(recurse=False)
    }


def collect_generators(trained: Iterable[Any]) -> list[Any]:
    """Return the ``mindspore.Generator`` objects that are attributes of cells."""
    import mindspore as ms

    held = [v for cell in collect_cells(trained).values() for v in vars(cell).values() if isinstance(v, ms.Generator)]
    return list({id(g): g for g in held}.values())


def is_grouped(cell: Any) -> bool:
    """Return whether it is an optimizer that keeps its rates in ``param_groups``.

    Those of ``mindspore.experimental.optim`` and ``mindspore.mint.optim`` do; they are no ``nn.Optimizer``.
    """
    groups = getattr(cell, "param_groups", None)
    return isinstance(groups, list) and bool(groups) and all(isinstance(g, dict) and "params" in g for g in groups)


def parameters_of_groups(optimizer: Any) -> list[Any]:
    """Return what such an optimizer changes besides the Parameters of the cell.

    That is its learning rates, which a scheduler writes to, and what it keeps in a group, such as a maximum.
    """
    import mindspore as ms

    held = list(getattr(optimizer, "lrs", ()))
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                held += value if isinstance(value, (list, tuple)) else [value]
    return list({id(p): p for p in held if isinstance(p, ms.Parameter)}.values())


def numbers_of_groups(optimizer: Any) -> list[dict[str, float]]:
    """Return the plain numbers of each group: a rate or a weight decay that the program has set."""
    return [{k: v for k, v in group.items() if isinstance(v, (bool, int, float))} for group in optimizer.param_groups]


def is_scheduler(item: Any) -> bool:
    """Return whether it sets the rates of an optimizer."""
    return is_grouped(getattr(item, "optimizer", None)) and callable(getattr(item, "step", None))


def collect_schedulers(trained: Iterable[Any], optimizers: Sequence[Any]) -> list[Any]:
    """Return the schedulers among `trained`, and MindSpore's of this process for one of the `optimizers`.

    No optimizer knows its schedulers. The order is the same on all workers.

    Several of one class for one optimizer aren't found, since nothing says which of them is another worker's.
    """
    given = [item for item in trained if is_scheduler(item)]
    if not any(map(is_grouped, optimizers)):
        return given
    try:
        from mindspore.experimental.optim import lr_scheduler
    except ImportError:
        return given
    kinds = tuple(
        kind for name in ("LRScheduler", "SequentialLR", "ReduceLROnPlateau") if (kind := vars(lr_scheduler).get(name))
    )
    inner = {id(getattr(optimizer, "optimizer", optimizer)): i for i, optimizer in enumerate(optimizers)}
    made = [o for o in gc.get_objects() if issubclass(type(o), kinds) and id(vars(o).get("optimizer")) in inner]
    # A SequentialLR has others, in their order.
    nested = {id(part) for scheduler in made for part in _parts(scheduler)[1:]}
    by_place: dict[tuple[int, str], list[Any]] = {}
    for scheduler in made:
        if id(scheduler) not in nested:
            place = inner[id(scheduler.optimizer)], type(scheduler).__qualname__
            by_place.setdefault(place, []).append(scheduler)
    known = {id(part) for item in given for part in _parts(item)}
    for (_, name), several in sorted(by_place.items()):
        several = [scheduler for scheduler in several if id(scheduler) not in known]
        if len(several) == 1:
            given.append(several[0])
        elif several:
            _log.warning(
                "misuse: check=schedulers schedulers=%d type=%s. They set the rates of one optimizer, and "
                "joining workers receive the state of none: give them to ElasticTraining, in their order",
                len(several), name,
            )  # fmt: skip
    return [part for item in given for part in _parts(item)]


def _parts(scheduler: Any) -> list[Any]:
    return [scheduler, *(p for s in getattr(scheduler, "_schedulers", ()) for p in _parts(s))]


def collect_optimizers(trained: Iterable[Any]) -> list[Any]:
    """Return MindSpore's optimizers among `trained` and in its cells, each once, but none inside another one."""
    import mindspore as ms

    def of(item: Any) -> Iterable[Any]:
        if isinstance(item, ms.nn.Optimizer) or (isinstance(item, ms.nn.Cell) and is_grouped(item)):
            return [item]
        if isinstance(item, ms.nn.Cell):
            return [found for cell in item.cells() for found in of(cell)]
        if isinstance(item, (list, tuple)):
            return [found for part in item for found in of(part)]
        return []

    return list({id(o): o for item in trained for o in of(item)}.values())


def reducers(trained: Iterable[Any], *, left_to_shards: bool) -> list[Any]:
    """Return the cells that reduce gradients, or, with `left_to_shards`, those that leave that to a `ShardedStep`."""
    found = [cell for cell in collect_cells(trained).values() if getattr(cell, "reduces_gradients", False)]
    return [cell for cell in found if cell.left_to_shards == left_to_shards]


def synchronises(trained: Iterable[Any]) -> bool:
    """Return whether something of ms_kungfu's in `trained` keeps the workers' models together."""
    from ms_kungfu.ops._base import Collective
    from ms_kungfu.ops._store import RequestModel

    cells = collect_cells(trained).values()
    held = [value for cell in cells for value in vars(cell).values()]
    kinds = (Collective, RequestModel)
    return any(getattr(cell, "reduces_gradients", False) for cell in cells) or any(isinstance(v, kinds) for v in held)


def check_reduced(trained: Iterable[Any], shards: int | None) -> None:
    """Raise ValueError if no reducer would reduce gradients."""
    if shards is None and reducers(trained, left_to_shards=True):
        raise ValueError(
            "this optimizer is trained by a ShardedStep, whose sums take the place of its own reduction, and this "
            "training has no shards: give it the dataset with shards (ElasticTraining(..., dataset=data)), or make a "
            "new optimizer"
        )


def check_sharded(trained: Iterable[Any]) -> None:
    """Raise ValueError if something would depend on the cluster although steps are partitioned into shards."""
    if beside := reducers(trained, left_to_shards=False):
        raise ValueError(
            f"{type(beside[0]).__name__} reduces gradients beside a ShardedStep, of one shard a worker: train all of "
            "them by ShardedSteps, each with what it updates as update= or trained="
        )
    for statistic in moving_statistics(trained):
        if statistics_of_shards.get(id(statistic)) is not statistic:
            raise ValueError(
                f"no ShardedStep keeps {statistic.name!r} alike, since none has its network: give "
                "ShardedStep(..., trained=net)"
            )


# Moving statistics that ShardedSteps of this process keep alike, by ID.
statistics_of_shards: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

# Modules of the cells with moving statistics, in mindspore.nn and in mindspore.mint.nn.
_NORMALIZATION = ("mindspore.nn.layer.normalization", "mindspore.mint.nn.layer.normalization")


_STATISTICS = ("moving_mean", "moving_variance", "running_mean", "running_var")


def moving_statistics(trained: Iterable[Any]) -> list[Any]:
    """Return the moving means and variances of MindSpore's normalization cells, and of classes derived from them."""
    import mindspore as ms

    found = [
        getattr(cell, name, None)
        for cell in collect_cells(trained).values()
        if any(base.__module__ in _NORMALIZATION for base in type(cell).__mro__)
        for name in _STATISTICS
    ]
    return list({id(p): p for p in found if isinstance(p, ms.Parameter)}.values())


def check_averaged(averaged: Sequence[Any] | None) -> None:
    """Raise TypeError unless it is None or a list of floating-point tensors."""
    import mindspore as ms

    floats = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
    if not isinstance(averaged, (list, tuple, type(None))):
        raise TypeError(f"averaged is a list of Parameters, got {averaged!r}")
    for tensor in averaged or ():
        if not isinstance(tensor, ms.Tensor) or tensor.dtype not in floats:
            raise TypeError(f"averaged is a list of Parameters with a mean, got {tensor!r} in it")


def assign(tensor: Any, values: Array) -> None:
    """Write into a Parameter or buffer in place: compiled graphs stay valid and get the new values, in either mode."""
    import mindspore as ms

    tensor.copy_(ms.Tensor(values, dtype=tensor.dtype))  # ops.assign has no kernel for bfloat16


def fingerprint(parameters: Iterable[Any]) -> int:
    """Return a number that differs if names, shapes or dtypes differ."""
    text = "\n".join(f"{p.name} {tuple(p.shape)} {p.dtype}" for p in parameters)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
