"""Find the state that training changes in cells, optimizers and other objects with Parameters, and write to it."""

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
    """Return the Parameters of cells, lists and other objects in a stable order, without duplicates."""
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
            raise TypeError(f"expected cells, optimizers or Parameters, got {item!r}")
        return held

    return list({id(p): p for item in trained for p in of(item)}.values())


def collect_cells(trained: Iterable[Any]) -> dict[str, Any]:
    """Return each cell in `trained`, including nested cells, under a name that is the same on all workers."""
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
    """Return whether `cell` is an optimizer that keeps its learning rates in ``param_groups``.

    These are the optimizers of ``mindspore.experimental.optim`` and ``mindspore.mint.optim``, which aren't
    ``nn.Optimizer``s.
    """
    groups = getattr(cell, "param_groups", None)
    return isinstance(groups, list) and bool(groups) and all(isinstance(g, dict) and "params" in g for g in groups)


def parameters_of_groups(optimizer: Any) -> list[Any]:
    """Return the Parameters in the ``param_groups`` of an optimizer, except the trained Parameters.

    These Parameters are the learning rates, which a scheduler changes, and other state of the groups.
    """
    import mindspore as ms

    held = list(getattr(optimizer, "lrs", ()))
    for group in optimizer.param_groups:
        for key, value in group.items():
            if key != "params":
                held += value if isinstance(value, (list, tuple)) else [value]
    return list({id(p): p for p in held if isinstance(p, ms.Parameter)}.values())


def numbers_of_groups(optimizer: Any) -> list[dict[str, float]]:
    """Return, for each group, the numbers that aren't Parameters, such as a learning rate from the program."""
    return [{k: v for k, v in group.items() if isinstance(v, (bool, int, float))} for group in optimizer.param_groups]


def is_scheduler(item: Any) -> bool:
    """Return whether `item` is a scheduler, which sets the learning rates of an optimizer with ``param_groups``."""
    return is_grouped(getattr(item, "optimizer", None)) and callable(getattr(item, "step", None))


def collect_schedulers(trained: Iterable[Any], optimizers: Sequence[Any]) -> list[Any]:
    """Return the schedulers in `trained`, and this process's MindSpore schedulers for any of the `optimizers`.

    An optimizer has no reference to its schedulers, so this function searches all objects of the process. The returned
    order is the same on all workers.

    Several schedulers of the same class for one optimizer are returned only if they are in `trained`, because the
    function can't find out which of them corresponds to which scheduler on another worker.
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
    # A SequentialLR contains other schedulers in a fixed order.
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
                "misuse: check=schedulers schedulers=%d type=%s. These schedulers set one optimizer's learning rates, "
                "and a joining worker doesn't receive their state; pass them to ElasticTraining, in their order",
                len(several), name,
            )  # fmt: skip
    return [part for item in given for part in _parts(item)]


def _parts(scheduler: Any) -> list[Any]:
    return [scheduler, *(p for s in getattr(scheduler, "_schedulers", ()) for p in _parts(s))]


def collect_optimizers(trained: Iterable[Any]) -> list[Any]:
    """Return the MindSpore optimizers in `trained` and its cells, except optimizers inside other optimizers."""
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
    """Return the cells that reduce gradients or, with `left_to_shards`, that leave the reduction to a `ShardedStep`."""
    found = [cell for cell in collect_cells(trained).values() if getattr(cell, "reduces_gradients", False)]
    return [cell for cell in found if cell.left_to_shards == left_to_shards]


def synchronises(trained: Iterable[Any]) -> bool:
    """Return whether `trained` contains a cell of ms_kungfu that synchronises the workers' models."""
    from ms_kungfu.ops._base import Collective
    from ms_kungfu.ops._store import RequestModel

    cells = collect_cells(trained).values()
    held = [value for cell in cells for value in vars(cell).values()]
    kinds = (Collective, RequestModel)
    return any(getattr(cell, "reduces_gradients", False) for cell in cells) or any(isinstance(v, kinds) for v in held)


def check_reduced(trained: Iterable[Any], shards: int | None) -> None:
    """Raise ValueError if no reducer would reduce the gradients."""
    if shards is None and reducers(trained, left_to_shards=True):
        raise ValueError(
            "no gradient would be reduced: a ShardedStep has replaced this optimizer's own reduction, but the training "
            "has no shards; pass the dataset with shards (ElasticTraining(..., dataset=data)), or create a new "
            "optimizer"
        )


def check_sharded(trained: Iterable[Any]) -> None:
    """Raise ValueError if a result of a sharded step would depend on the number of workers."""
    if beside := reducers(trained, left_to_shards=False):
        raise ValueError(
            f"{type(beside[0]).__name__} reduces gradients over the workers, next to a ShardedStep that reduces over "
            "shards; use a ShardedStep for each optimizer, and pass the optimizer as update= or in trained="
        )
    for statistic in moving_statistics(trained):
        if statistics_of_shards.get(id(statistic)) is not statistic:
            raise ValueError(
                f"the moving statistic {statistic.name!r} would differ between workers: its network wasn't passed to "
                "a ShardedStep; pass ShardedStep(..., trained=net)"
            )


# id -> moving statistic (of BatchNorm, for example) that a ShardedStep keeps equal on all workers
statistics_of_shards: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

# The modules of mindspore.nn and mindspore.mint.nn that define cells with moving statistics.
_NORMALIZATION = ("mindspore.nn.layer.normalization", "mindspore.mint.nn.layer.normalization")


_STATISTICS = ("moving_mean", "moving_variance", "running_mean", "running_var")


def moving_statistics(trained: Iterable[Any]) -> list[Any]:
    """Return the moving means and variances of MindSpore's normalization cells, and of cells derived from these."""
    import mindspore as ms

    found = [
        getattr(cell, name, None)
        for cell in collect_cells(trained).values()
        if any(base.__module__ in _NORMALIZATION for base in type(cell).__mro__)
        for name in _STATISTICS
    ]
    return list({id(p): p for p in found if isinstance(p, ms.Parameter)}.values())


def check_averaged(averaged: Sequence[Any] | None) -> None:
    """Raise TypeError unless `averaged` is None or a list of floating-point tensors."""
    import mindspore as ms

    floats = (ms.float16, ms.bfloat16, ms.float32, ms.float64)
    if not isinstance(averaged, (list, tuple, type(None))):
        raise TypeError(f"`averaged` must be a list of Parameters, got {averaged!r}")
    for tensor in averaged or ():
        if not isinstance(tensor, ms.Tensor) or tensor.dtype not in floats:
            raise TypeError(f"`averaged` must contain only floating-point Parameters, got {tensor!r}")


def assign(tensor: Any, values: Array) -> None:
    """Write `values` into a Parameter or buffer in place, so that compiled graphs stay valid and use the new values."""
    import mindspore as ms

    tensor.copy_(ms.Tensor(values, dtype=tensor.dtype))  # ops.assign has no kernel for bfloat16


def fingerprint(parameters: Iterable[Any]) -> int:
    """Hash the names, shapes and dtypes of the parameters."""
    text = "\n".join(f"{p.name} {tuple(p.shape)} {p.dtype}" for p in parameters)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
