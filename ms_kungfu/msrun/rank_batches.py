"""Call the program's gradient functions separately for each virtual rank's batch.

If there are fewer than V workers, a worker does the work of several virtual ranks. Its loop receives one batch, in
which the batches of these ranks follow one another. The program processes this batch once, as if it were the batch of
one rank, except that gradients are computed separately for each rank. A function from ``ms.value_and_grad``,
``ms.grad`` or ``ops.GradOperation`` is called once for each rank. If a tensor has as many rows as the batch, each call
gets only the rows of its rank. The result is the mean of the ranks' gradients. The reducer averages the results over
the workers, weighted by the number of samples. So a step has the same result as a step under msrun, even if the loss
isn't a mean over samples (for example, a sum, or a loss with a factor like ``batch_size * rank_size``). If the cluster
changes, no graph is compiled again.

1. A step is *divided* if at least one of its members does the work of several ranks. Such a step is divided on all
   workers, so all of them run the program's own collectives in the same way, in Python or in a graph.
2. In a divided step, a jitted function or a cell in GRAPH mode runs as Python if it uses a gradient function. Python
   then calls the gradient function, which is itself a graph, once per rank. If `ms_kungfu.msrun.gradient_search` finds
   no gradient function in a jitted function or cell, the function or cell runs as a graph, and invariant 3 applies.
3. In the first divided steps, this module checks how gradients are computed. Training ends with an error if the weights
   were updated without gradients that were computed separately for each rank.
4. Before each rank's batch, the moving statistics (for example of BatchNorm) are reset to their values at the beginning
   of the step. After all ranks' batches, the statistics are set to the average of the results.
5. A tensor with as many rows as the batch is divided by rows if it comes from the step's iterator or was created during
   the step. A tensor that existed before the step is passed undivided to each rank, because it doesn't contain the
   batch unless the program has copied the batch into it. This module can't know which new tensors are computed from the
   batch. So it logs each decision about a tensor that isn't a column of the batch as a WARNING, once per shape.
"""

from __future__ import annotations

import functools
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.ops import composite
from numpy.typing import NDArray

from ms_kungfu.callbacks.sharded import _ForwardBackward
from ms_kungfu.msrun import cells, world
from ms_kungfu.msrun.communication import refused
from ms_kungfu.msrun.gradient_search import MARK, differentiates
from ms_kungfu.msrun.reducers import DistributedGradReducer
from ms_kungfu.ops import wait_for_queue
from ms_kungfu.trained import inventory

_log = logging.getLogger(__name__)
_REMEDY = (
    "call the gradient function (the result of ms.value_and_grad, ms.grad or ops.GradOperation) from "
    "Python or from the jitted step, with tensors whose first dimension is the number of samples in the "
    "dataset's batch; or start with -np {size} (the -msrun-size) and without flags that change the cluster"
)


class _Step:
    """The state of the current training step."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # number of samples for each rank whose work this worker does; [] between steps
        self.is_divided = False
        self.gradients = 0  # how many gradient functions were called once per rank
        self.is_inside = False  # whether a gradient function is running
        self.graphs = 0  # how many jitted functions are running as Python
        self.proven_for: tuple[int, ...] = ()  # the members of the last step known to compute gradients per rank
        self.members: tuple[int, ...] = ()
        self.updates = (0, 0)  # `cells.updates` and `cells.trained_by_groups` when the step began
        self.columns: list[Any] = []  # tensors that the step's iterator has yielded
        self.made: list[Any] = []  # tensors that were created in the step and passed to its gradient functions
        self.older: weakref.WeakValueDictionary[int, Any] = (
            weakref.WeakValueDictionary()
        )  # id -> tensor that existed before the step
        self.looked_with: tuple[int, ...] = ()  # the members at the last search of all tensors in the process
        self.told: set[tuple[str, Any]] = set()
        self.before: list[NDArray[Any]] = []  # the moving statistics (e.g. of BatchNorm) when the step began
        self.statistics: list[Any] = []

    @property
    def divides(self) -> bool:
        """Return whether a gradient function that is called now must run once per rank."""
        return self.is_divided and not self.is_inside

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Mark the block as a running gradient function, in which functions are called with one rank's batch."""
        self.is_inside = True
        try:
            yield
        finally:
            self.is_inside = False

    @contextmanager
    def as_python(self) -> Iterator[None]:
        """Mark the block as a function that runs as Python, although it would run as a graph in an undivided step."""
        self.graphs += 1
        try:
            yield
        finally:
            self.graphs -= 1


_step = _Step()


def begin(sizes: Sequence[int], members: tuple[int, ...]) -> None:
    """Begin a step. `sizes`: the number of samples for each rank whose work this worker does in the step."""
    _step.sizes, _step.members = list(sizes), members
    _step.is_divided = len(members) < world.size()
    _step.gradients, _step.is_inside = 0, False
    _note_older()
    if not _step.is_divided:
        return
    if _step.proven_for != members:
        _step.updates = cells.updates(), cells.trained_by_groups()
        _step.statistics = inventory.moving_statistics(cells.living())
    if _step.statistics:
        wait_for_queue()
        _step.before = [parameter.asnumpy().copy() for parameter in _step.statistics]


def _note_older() -> None:
    """Record the tensors that exist before a divided step.

    Before the first step with new members, record all tensors in the process. Before later steps, add the tensors that
    the gradient functions have used since then.
    """
    met, _step.columns, _step.made = [*_step.columns, *_step.made], [], []
    if not _step.is_divided:
        _step.looked_with = ()
        return
    if _step.looked_with != _step.members:
        _step.looked_with = _step.members
        met += [each for each in gc.get_objects() if issubclass(type(each), ms.Tensor)]
    _step.older.update((id(each), each) for each in met)


def hand_out(batch: Any) -> None:
    """Record the tensors of the batch that the program receives."""
    if _step.is_divided:
        _step.columns = _leaves(batch)


def end() -> None:
    """End the step.

    Raises:
        RuntimeError: the gradients were computed from several ranks' batches at once.
    """
    sizes, _step.sizes = _step.sizes, []
    was_divided, _step.is_divided = _step.is_divided, False
    if not was_divided or not sizes or _step.proven_for == _step.members:
        return
    if _step.gradients:
        _step.proven_for = _step.members
    elif not cells.has_optimizers() or (cells.updates(), cells.trained_by_groups()) != _step.updates:
        raise refused(
            "with fewer workers than ranks, training with gradients that aren't computed separately for each rank",
            f"this worker does the work of {len(sizes)} of {world.size()} ranks, but its update didn't use a gradient "
            "function that can be called once per rank (as under msrun), so its gradients may have "
            "another scale; " + _REMEDY.format(size=world.size()),
        )


# -- gradient functions ----------------------------------------------------------------------------------------------

_weighted = composite.MultitypeFuncGraph("weighted")
_weighted_sum = composite.MultitypeFuncGraph("weighted_sum")


@_weighted.register("Tensor", "Tensor")
def _times(weight, gradient):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return gradient * ops.cast(weight, gradient.dtype)


@_weighted_sum.register("Tensor", "Tensor", "Tensor")
def _plus_times(weight, total, gradient):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return total + gradient * ops.cast(weight, gradient.dtype)


_map = composite.HyperMap()


@ms.jit(backend="ms_backend")
def _begin_sum(weight, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return _map(ops.partial(_weighted, weight), gradients)


@ms.jit(backend="ms_backend")
def _go_on_with_sum(weight, total, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
    return _map(ops.partial(_weighted_sum, weight), total, gradients)


class _Mean:
    """The mean of the ranks' tensors, weighted by the number of samples."""

    def __init__(self) -> None:
        self.value: tuple[Any, ...] = ()

    def add(self, share: float, tensors: tuple[Any, ...]) -> None:
        weight = ms.Tensor(share, ms.float32)
        if tensors and self.value:
            self.value = _go_on_with_sum(weight, ms.mutable(self.value), ms.mutable(tensors))
        elif tensors:
            self.value = _begin_sum(weight, ms.mutable(tensors))


def _leaves(tree: Any) -> list[Any]:
    """Return the tensors in a nested structure of tuples, lists and dictionaries."""
    if isinstance(tree, ms.Tensor):
        return [tree]
    inner = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, (tuple, list)) else ()
    return [leaf for each in inner for leaf in _leaves(each)]


def _replaced(tree: Any, leaves: Iterator[Any]) -> Any:
    """Return a copy of a nested structure, in which `leaves` replace the tensors."""
    if isinstance(tree, ms.Tensor):
        return next(leaves)
    if isinstance(tree, dict):
        return {key: _replaced(each, leaves) for key, each in tree.items()}
    if type(tree) in (tuple, list):
        return type(tree)(_replaced(each, leaves) for each in tree)
    return tree


def _rows(tensor: Any) -> int:
    return int(tensor.shape[0]) if tensor.ndim else 0


def _cut(tree: Any, sizes: Sequence[int]) -> list[Any]:
    """Return the gradient function's arguments for each rank.

    Raises:
        RuntimeError: no tensor in `tree` contains the batch.
    """
    leaves, samples = _leaves(tree), sum(sizes)
    is_batch = _are_batch(leaves, samples, len(sizes))
    if not any(is_batch):
        raise refused(
            "a gradient function that isn't called with the batch",
            f"this worker does the work of {len(sizes)} of {world.size()} ranks, whose batches have {samples} samples "
            "together, but no tensor of this step in the call has as many rows (shapes "
            f"{[tuple(leaf.shape) for leaf in leaves]}); " + _REMEDY.format(size=world.size()),
        )
    cut, first = [], 0
    for size in sizes:
        rows = slice(first, first + size)
        cut.append(_replaced(tree, iter([leaf[rows] if is_cut else leaf for leaf, is_cut in zip(leaves, is_batch)])))
        first += size
    return cut


def _are_batch(leaves: Sequence[Any], samples: int, ranks: int) -> list[bool]:
    """Return, for each tensor, whether it contains the batch (invariant 5)."""
    columns = set(map(id, _step.columns))
    free = [leaf for leaf in leaves if id(leaf) not in columns and not isinstance(leaf, ms.Parameter)]
    older = [leaf for leaf in free if _step.older.get(id(leaf)) is leaf]
    is_older = set(map(id, older))
    made = [leaf for leaf in free if id(leaf) not in is_older]
    _step.made += made
    _tell(
        "existed before the step and have as many rows as this worker's batch: each of the worker's ranks gets all "
        "rows; if such a tensor contains the batch, create it in each step",
        [leaf for leaf in older if _rows(leaf) == samples], samples, ranks,
    )  # fmt: skip
    _tell(
        "were created in the step and have as many rows as this worker's batch: they are divided among the worker's "
        "ranks; if such a tensor isn't computed from the batch's rows, the gradients are wrong: create it before the "
        "loop",
        [leaf for leaf in made if _rows(leaf) == samples], samples, ranks,
    )  # fmt: skip
    _tell(
        "were created in the step and have the batch's samples in a dimension other than the first: each of the "
        "worker's ranks gets the whole tensor; if such a tensor contains the batch, use the first dimension",
        [leaf for leaf in made if _rows(leaf) != samples and samples in leaf.shape[1:]], samples, ranks,
    )  # fmt: skip
    batch = columns | set(map(id, made))
    return [_rows(leaf) == samples and id(leaf) in batch for leaf in leaves]


def _tell(what: str, tensors: Sequence[Any], samples: int, ranks: int) -> None:
    """Log a warning about these tensors, unless it was already logged for these shapes with any batch size."""
    if not tensors:
        return
    shapes = [tuple(each.shape) for each in tensors]
    key = what, tuple(tuple("batch" if n == samples else n for n in shape) for shape in shapes)
    if key not in _step.told:
        _step.told.add(key)
        _log.warning(
            'misuse: check=msrun shapes="%s" rows=%d ranks=%d. A gradient function is called with these '
            "tensors, which aren't columns of the dataset. They %s",
            shapes, samples, ranks, what,
        )  # fmt: skip


def _joined(found: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Combine the ranks' results, except for the gradients of weights.

    Rows are concatenated. Floats are averaged, weighted by the number of samples. Integers, which are counts, are
    summed.
    """
    first = found[0]
    if isinstance(first, ms.Tensor):
        if all(_rows(each) == size for each, size in zip(found, sizes)):
            return ops.concat(tuple(found), 0)
        if first.is_floating_point():
            mean = _Mean()
            for each, size in zip(found, sizes):
                mean.add(size / sum(sizes), (each,))
            return mean.value[0]
        if first.dtype != ms.bool_:
            return functools.reduce(ops.add, found)
    elif isinstance(first, dict):
        return {key: _joined([each[key] for each in found], sizes) for key in first}
    elif type(first) in (tuple, list):
        return type(first)(_joined(each, sizes) for each in zip(*found))
    elif all(each == first for each in found):
        return first
    raise refused(
        f"a gradient function that returns {first!r} in addition to the gradients",
        f"this worker does the work of {len(sizes)} ranks, and it is unknown how to combine {len(sizes)} such values; "
        "return tensors with the rows of the batch, floats (which are averaged) or integers (which are summed)",
    )


def _separate(out: Any, kind: Any) -> tuple[Any, Any]:
    """Split the result of a gradient function. Return (all other values, the gradients of weights).

    `kind`: the object with the gradient function's options, such as a `GradOperation`.
    """
    has_value, has_aux = getattr(kind, "get_value", False), getattr(kind, "has_aux", False)
    value, gradients = out if has_value else (None, out)
    if has_aux and not has_value:
        gradients, value = out
    if not kind.get_by_list:
        return (value, gradients), ()
    if kind.get_all or getattr(kind, "get_by_position", False):
        return (value, gradients[0]), gradients[1]
    return (value, None), gradients


def _together(out: Any, others: Any, weights: Any, kind: Any) -> Any:
    """Combine the two values that `_separate` returned into a gradient function's result, given its options `kind`."""
    value, positions = others
    gradients = positions if not kind.get_by_list else weights if positions is None else (positions, weights)
    if getattr(kind, "get_value", False):
        return value, gradients
    return (gradients, value) if getattr(kind, "has_aux", False) else gradients


class _Statistics:
    """Reset and average the moving statistics while a gradient function is called once per rank (invariant 4)."""

    def __init__(self, has_value: bool) -> None:
        self._parameters = _step.statistics
        self._before: list[NDArray[Any]] = []
        self._sums: list[NDArray[Any]] = []
        if self._parameters:
            wait_for_queue()
            # A cell that computes the loss before the gradients (TrainOneStepCell) has already changed the statistics.
            is_first = _step.gradients == 1 and not has_value
            self._before = _step.before if is_first else [p.asnumpy().copy() for p in self._parameters]
            self._sums = [np.zeros(array.shape, np.float64) for array in self._before]

    def begin(self) -> None:
        """Reset the statistics before a rank's batch."""
        for parameter, before in zip(self._parameters, self._before):
            parameter.asnumpy()[...] = before

    def end(self, share: float) -> None:
        if self._parameters:
            wait_for_queue()
        for total, parameter in zip(self._sums, self._parameters):
            total += share * parameter.asnumpy().astype(np.float64)

    def average(self) -> None:
        """Set the statistics to their average over the ranks."""
        for total, parameter in zip(self._sums, self._parameters):
            parameter.asnumpy()[...] = total


def _rank_by_rank(function: Callable[..., Any], kind: Any, arguments: Any, named: Any) -> Any:
    _step.gradients += 1
    sizes = _step.sizes
    with _step.inside():
        mean, found, out, weights = _Mean(), [], None, None
        statistics = _Statistics(getattr(kind, "get_value", False))
        for size, (own, own_named) in zip(sizes, _cut((arguments, named), sizes)):
            statistics.begin()
            out = function(*own, **own_named)
            others, weights = _separate(out, kind)
            statistics.end(size / sum(sizes))
            mean.add(size / sum(sizes), tuple(_leaves(weights)))
            found.append(others)
        statistics.average()
        return _together(out, _joined(found, sizes), _replaced(weights, iter(mean.value)), kind)


_stock_jit = ms.jit


def answer_for_gradients(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement for ``GradOperation.__call__``, or for ``__call__`` of the class behind ``ms.grad``."""

    @functools.wraps(method)
    def __call__(self: Any, *arguments: Any, **named: Any) -> Any:
        made = method(self, *arguments, **named)
        if self.pynative_:  # this is a gradient function inside another gradient function
            return made
        known = vars(made).get("kungfu_by_rank")
        if known is None:
            known = made.kungfu_by_rank = _by_rank(made, self)
        return known

    return __call__


def _by_rank(made: Callable[..., Any], kind: Any) -> Callable[..., Any]:
    @functools.cache
    def as_graph() -> Callable[..., Any]:
        return made if ms.get_context("mode") == ms.GRAPH_MODE else _stock_jit(made)

    @functools.wraps(made)  # in a graph, MindSpore's parser finds the original function in `__wrapped__`
    def gradient(*arguments: Any, **named: Any) -> Any:
        if not _step.divides:
            return made(*arguments, **named)
        return _rank_by_rank(as_graph() if _step.graphs else made, kind, arguments, named)

    vars(gradient)[MARK] = True
    return gradient


# -- jitted functions and cells --------------------------------------------------------------------------------------


def answer_for_jit(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement for ``ms.jit``."""

    @functools.wraps(stock)
    def jit(function: Any = None, **options: Any) -> Any:
        if function is None:
            return lambda function: jit(function, **options)
        compiled = stock(function, **options)
        if not isinstance(function, (FunctionType, MethodType)):
            return compiled  # `function` is a cell, which `answer_for_cells` handles

        @functools.wraps(compiled)
        def call(*arguments: Any, **named: Any) -> Any:
            if not _step.divides or not differentiates(function, *arguments):
                return compiled(*arguments, **named)
            with _step.as_python():
                return function(*arguments, **named)

        return call

    return jit


def answer_for_cells(compile_and_run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement for ``nn.Cell.compile_and_run``, which MindSpore calls for a cell in GRAPH mode."""

    @functools.wraps(compile_and_run)
    def run(self: Any, *arguments: Any, **named: Any) -> Any:
        if _step.divides and differentiates(self):
            with _step.as_python():
                return self.construct(*arguments, **named)
        reduces = isinstance(self, DistributedGradReducer)
        if reduces or (_step.graphs and not _step.is_inside):
            # If Python calls a graph, the graph treats a tensor in a tuple as a constant. MindSpore would compile the
            # graph again for each new value.
            arguments = tuple(map(_changing, arguments))
            if not reduces and next(iter(self.get_parameters()), None) is None:
                return self.construct(*arguments, **named)  # this may call many other cells (e.g. for clipping)
        return compile_and_run(self, *arguments, **named)

    return run


def _changing(argument: Any) -> Any:
    """Return the argument, marked so that a graph treats its tensors as variables."""
    tensors = type(argument) in (tuple, list) and len(argument) > 0
    if tensors and all(isinstance(each, ms.Tensor) and not isinstance(each, ms.Parameter) for each in argument):
        return ms.mutable(argument)
    return argument


class _Kind:
    """The options of a gradient function that returns a loss and the gradients of weights."""

    get_value, get_by_list, get_all, has_aux = True, True, False, False


_forward_backward: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def answer_for_train_cells(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Return the replacement for ``nn.TrainOneStepCell.__call__``.

    MindSpore's cell computes the loss separately from the gradients. The structure of this cell is known, so the
    replacement computes the loss rank by rank, too.
    """

    @functools.wraps(stock)
    def __call__(self: Any, *columns: Any) -> Any:
        if not _step.divides or type(self) is not nn.TrainOneStepCell or self.return_grad:
            return stock(self, *columns)
        if self not in _forward_backward:
            _forward_backward[self] = _ForwardBackward(self)
        loss, gradients = _rank_by_rank(_forward_backward[self], _Kind, columns, {})
        self.optimizer(self.grad_reducer(gradients))
        return loss

    return __call__
