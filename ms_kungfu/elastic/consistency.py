"""Check during training whether values that must be equal on all workers are equal.

Each such value (a weight, a learning rate, ...) is called a piece, and is checked once every hundred steps. After each
step, a worker computes one hash of the pieces that are due. The agreement after the step (`membership.step`) compares
the workers' hashes. The workers exchange more data only if the hashes differ. `trained.claims` checks the initial
values.
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

PERIOD = 100  # each piece is checked once in this number of steps


@dataclass(frozen=True)
class Piece:
    """A value that must be equal on all workers, such as a weight, a learning rate or a loss scale."""

    what: str
    nbytes: int
    tensors: Sequence[Any] = ()
    # For a piece that consists of plain Python numbers instead of tensors: a function that returns these numbers.
    numbers: Callable[[], Any] | None = None
    counts: Callable[[], bool] = lambda: True  # whether the piece must currently be equal on all workers

    def word(self) -> int:
        if self.numbers is not None:
            return content_of(json.dumps(self.numbers(), sort_keys=True).encode())
        return content(self.tensors)

    def value(self) -> str:
        """Return the value as text for a message; "" if the piece is too large for a message."""
        if self.numbers is not None:
            return json.dumps(self.numbers())
        return f"{self.tensors[0].asnumpy().item():.6g}" if sum(t.size for t in self.tensors) == 1 else ""


def pieces_of(
    trained: Sequence[Any], loss_scale_manager: Any, without: set[int], all_parameters: bool = False
) -> list[Piece]:
    """Return the weights, learning rates and loss scales in the trained objects.

    Tensors whose `id` is in `without` are left out. With `all_parameters`, the result includes the Parameters that no
    optimizer trains. An optimizer's pieces aren't compared while the workers train different models with that
    optimizer.
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
            if name in found:  # e.g. the learning rates of two optimizers
                name += f" (number {sum(other.startswith(name) for other in found) + 1})"
            counts = (lambda: not owner.replicas_differ) if hasattr(owner, "replicas_differ") else (lambda: True)
            found[name] = Piece(name, tensor.nbytes, (tensor,), counts=counts)

    # If several pieces differ, the message names the piece that this function adds first. Rates and scales come before
    # weights, because different rates or scales make the weights differ.
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
    """Return the Parameters in `trained` whose gradients are reduced by a reducer of this process.

    A reducer that doesn't know its Parameters may reduce any gradients. In this case, the result includes the trainable
    Parameters of all cells that contain no optimizer.
    """
    import mindspore as ms

    serving = [reducer for reducer in claims.reducers if reducer.begins_alike and not reducer.left_to_shards]
    served = {id(p) for reducer in serving for p in reducer.planned_parameters}
    if any(not reducer.planned_parameters for reducer in serving):
        cells = [item for item in trained if isinstance(item, ms.nn.Cell)]
        served |= {id(p) for cell in cells if not inventory.collect_optimizers([cell]) for p in cell.trainable_params()}
    return [p for p in inventory.collect_parameters(trained) if id(p) in served]


def _parameters_of(rates: Any) -> list[Any]:
    """Return the Parameters that contain an optimizer's learning rates, in any form that MindSpore supports."""
    import mindspore as ms

    if isinstance(rates, (list, tuple)):
        return [p for rate in rates for p in _parameters_of(rate)]
    if isinstance(rates, ms.nn.Cell):
        return list(rates.get_parameters())
    return [rates] if isinstance(rates, ms.Parameter) else []


class ConsistencyCheck:
    """Check each piece once per `PERIOD` steps, and about the same number of bytes in each step."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = pieces
        self._due: list[list[Piece]] = [[] for _ in range(PERIOD)]
        load = [(0, slot) for slot in range(PERIOD)]
        # Assign the largest pieces to steps first. The order must be the same on all workers.
        for piece in sorted(pieces, key=lambda piece: (-piece.nbytes, piece.what)):
            nbytes, slot = heapq.heappop(load)
            self._due[slot].append(piece)
            heapq.heappush(load, (nbytes + piece.nbytes, slot))

    def word(self, step: int) -> int:
        """Return a hash of the pieces that are due after step `step`; 0 if no piece is due."""
        words = [piece.word() for piece in self._due[step % PERIOD] if piece.counts()]
        return content_of(repr(words).encode()) if words else 0

    def words(self) -> dict[str, tuple[int, str]]:
        """Return each piece's hash, and its value as text for a message. The text is "" if the value is too long."""
        return {piece.what: (piece.word(), piece.value()) for piece in self._pieces if piece.counts()}

    def check_all(self, step: int) -> None:
        """Check all pieces now, and raise DivergenceError if a piece differs (collective)."""
        word = content_of(repr([piece.word() for piece in self._pieces if piece.counts()]).encode())
        most, least = comm.all_reduce(np.array([word, -word]), op="max", name="kungfu/same_at_end")
        if most != -least:
            check(step, gather_json(self.words(), "kungfu/same"))


def check(step: int, everyones: Mapping[int, Mapping[str, Sequence[Any]]]) -> None:
    """Raise DivergenceError if a piece differs between ranks. `everyones` maps each rank to its `words`."""
    apart = differing({rank: {what: word for what, (word, _) in words.items()} for rank, words in everyones.items()})
    if not apart:
        return
    what, groups = next(iter(apart.items()))
    values = {word: everyones[ranks[0]].get(what, (None, ""))[1] for word, ranks in groups.items()}
    told = "; ".join(
        f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}{': ' if values[word] else ''}{values[word]}"
        for word, ranks in groups.items()
    )
    more = f", and {len(apart) - 1} more weights, rates or scales differ, too" if len(apart) > 1 else ""
    raise DivergenceError(
        f"step {step}: {what} must be equal on all workers, but it differs: {told}{more}. Some workers "
        "have changed it differently from the others. Possible causes: a callback that uses values of its own "
        "worker; code that depends on the rank; an update that isn't reduced; code after step_end in a loop, "
        "which a joining worker doesn't run; with shards, a forward pass that writes to it. Make the same change "
        "on all workers. If the parameter should differ between workers, pass it in averaged=[...]"
    )
