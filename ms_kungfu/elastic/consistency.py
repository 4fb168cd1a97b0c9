"""The consistency check: what has to be equal on all workers stays so.

Each piece is checked once in a hundred steps. A step's share of the pieces becomes one word, which travels in the
workers' agreement after the step (`membership.step`). Only if the words differ do the workers exchange more. How they
begin: `trained.claims`.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ms_kungfu import comm
from ms_kungfu.agreement import gather_json
from ms_kungfu.elastic import state
from ms_kungfu.elastic.differences import differing
from ms_kungfu.errors import DivergenceError
from ms_kungfu.trained import claims, inventory
from ms_kungfu.trained.claims import content, content_of

PERIOD = 100  # steps in which each piece is checked once


@dataclass(frozen=True)
class Piece:
    """A weight, a learning rate or a loss scale."""

    what: str
    nbytes: int
    tensors: Sequence[Any] = ()
    numbers: Callable[[], Any] | None = None  # instead of tensors: numbers on the host, as JSON
    counts: Callable[[], bool] = lambda: True  # whether it has to be equal at present

    def word(self) -> int:
        if self.numbers is not None:
            return content_of(json.dumps(self.numbers(), sort_keys=True).encode())
        return content(self.tensors)

    def value(self) -> str:
        """Return the value of a single number for a message."""
        if self.numbers is not None:
            return json.dumps(self.numbers())
        return f"{self.tensors[0].asnumpy().item():.6g}" if sum(t.size for t in self.tensors) == 1 else ""


def pieces_of(
    trained: Sequence[Any], loss_scale_manager: Any, without: set[int], all_parameters: bool = False
) -> list[Piece]:
    """Return the weights, learning rates and loss scales among what is trained.

    Not those in `without` (IDs), and not those of optimizers whose workers' models differ at present. `all_parameters`:
    what no optimizer trains, too.
    """
    import mindspore as ms
    from mindspore import nn

    found: dict[str, Piece] = {}
    taken = set(without)

    def add(what: str, tensors: Iterable[Any], owner: Any = None) -> None:
        for tensor in tensors:
            if id(tensor) in taken:
                continue
            taken.add(id(tensor))
            name = f"{what} {tensor.name!r}"
            if name in found:  # two optimizers have a learning rate each
                name += f" (number {sum(other.startswith(name) for other in found) + 1})"
            counts = (lambda: not owner.replicas_differ) if hasattr(owner, "replicas_differ") else (lambda: True)
            found[name] = Piece(name, tensor.nbytes, (tensor,), counts=counts)

    # The message names them in this order if several differ: different rates or scales make the weights differ.
    optimizers = inventory.collect_optimizers(trained)
    for optimizer in optimizers:
        if inventory.is_grouped(optimizer):
            add("the learning rate", getattr(optimizer, "lrs", ()), optimizer)
            add("the Parameter of a group", inventory.parameters_of_groups(optimizer), optimizer)
            name = f"the numbers in param_groups of {type(optimizer).__name__}"
            name += f" (number {sum(other.startswith(name) for other in found) + 1})" if name in found else ""
            found[name] = Piece(name, 0, numbers=partial(inventory.numbers_of_groups, optimizer))
        else:
            add("the learning rate", _parameters_of(optimizer.learning_rate), optimizer)
    scales = (nn.TrainOneStepWithLossScaleCell, nn.DynamicLossScaleUpdateCell, nn.FixedLossScaleUpdateCell)
    for cell in inventory.collect_cells(trained).values():
        if isinstance(cell, scales):
            add("the loss scale", cell.get_parameters(expand=False))
    for item in trained:
        if inventory.is_scheduler(item):
            add("the scheduler's", inventory.collect_parameters([item]))
        elif not isinstance(item, (ms.nn.Cell, ms.Parameter, list, tuple)):  # such as a DynamicLossScaler
            add("the loss scale", inventory.collect_parameters([item]))
    if loss_scale_manager is not None:
        numbers = state.attributes_component("loss_scale", loss_scale_manager).capture
        name = "the loss scale of the loss_scale_manager"
        found[name] = Piece(name, 0, numbers=numbers)
    for optimizer in optimizers:
        add("the weight", optimizer.parameters, optimizer)
    add("the weight", _served(trained))
    if all_parameters:
        add(
            "the Parameter",
            inventory.collect_parameters(t for t in trained if isinstance(t, (ms.nn.Cell, list, tuple))),
        )
    return list(found.values())


def _served(trained: Sequence[Any]) -> list[Any]:
    """Return the Parameters among `trained` whose gradients a reducer of this process reduces.

    A reducer that doesn't know its Parameters may have any.
    """
    import mindspore as ms

    serving = [reducer for reducer in claims.reducers if reducer.begins_alike and not reducer.left_to_shards]
    served = {id(p) for reducer in serving for p in reducer.planned_parameters}
    if any(not reducer.planned_parameters for reducer in serving):
        cells = [item for item in trained if isinstance(item, ms.nn.Cell)]
        served |= {id(p) for cell in cells if not inventory.collect_optimizers([cell]) for p in cell.trainable_params()}
    return [p for p in inventory.collect_parameters(trained) if id(p) in served]


def _parameters_of(rates: Any) -> list[Any]:
    """Return the Parameters of an optimizer's learning rate, in whichever form MindSpore keeps it."""
    import mindspore as ms

    if isinstance(rates, (list, tuple)):
        return [p for rate in rates for p in _parameters_of(rate)]
    if isinstance(rates, ms.nn.Cell):
        return list(rates.get_parameters())
    return [rates] if isinstance(rates, ms.Parameter) else []


class ConsistencyCheck:
    """The pieces, distributed over the steps of a period so that each has about as many bytes to check."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._due: list[list[Piece]] = [[] for _ in range(PERIOD)]
        load = [(0, slot) for slot in range(PERIOD)]
        # Sorted by what all workers know alike; the largest first.
        for piece in sorted(pieces, key=lambda piece: (-piece.nbytes, piece.what)):
            nbytes, slot = heapq.heappop(load)
            self._due[slot].append(piece)
            heapq.heappush(load, (nbytes + piece.nbytes, slot))

    def word(self, step: int) -> int:
        """Return a number for the pieces due after this step, which differs if one of them does; 0 if none is due."""
        words = [piece.word() for piece in self._due[step % PERIOD] if piece.counts()]
        return content_of(repr(words).encode()) if words else 0

    def words(self) -> dict[str, tuple[int, str]]:
        """Return all pieces, to find which of them differ: a number likewise, and a value to show, if it is short."""
        return {piece.what: (piece.word(), piece.value()) for piece in self._pieces if piece.counts()}

    def check_all(self, step: int) -> None:
        """Raise DivergenceError if any piece differs, whenever it was checked last; collective."""
        word = content_of(repr([piece.word() for piece in self._pieces if piece.counts()]).encode())
        most, least = comm.all_reduce(np.array([word, -word]), op="max", name="kungfu/same_at_end")
        if most != -least:
            check(step, gather_json(self.words(), "kungfu/same"))


def check(step: int, everyones: Mapping[int, Mapping[str, Sequence[Any]]]) -> None:
    """Raise DivergenceError if the ranks' words, by rank, differ in a piece."""
    apart = differing({rank: {what: word for what, (word, _) in words.items()} for rank, words in everyones.items()})
    if not apart:
        return
    what, groups = next(iter(apart.items()))
    values = {word: everyones[ranks[0]].get(what, (None, ""))[1] for word, ranks in groups.items()}
    told = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}{': ' if values[word] else ''}{values[word]}"
        for word, ranks in groups.items()
    )
    more = f", and so do {len(apart) - 1} more weights, rates or scales" if len(apart) > 1 else ""
    raise DivergenceError(
        f"step {step}: {what} has to be equal on all workers and differs: {told}{more}. Something that only some "
        "workers did has changed it: a callback with numbers of its own; a condition on the rank; an update that isn't "
        "reduced; code behind step_end in a loop, which a joining worker misses; with shards, a forward pass that "
        "writes to it. Do it on all workers alike. If the parameter is meant to differ, name it in averaged=[...]"
    )
