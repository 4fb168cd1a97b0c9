"""What has to be equal on all workers: what has been made so, and that it stays so.

What an optimizer is about to train and nothing has made equal is a part of its first reduction (`claim`). Later each
piece is looked at once in a hundred steps: a step's share of the pieces becomes one word, which travels in the
agreement that the workers come to after the step anyway (`membership.step`). Only where the words differ do the workers
tell each other more.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ms_kungfu import comm, membership
from ms_kungfu.agreement import gather_json
from ms_kungfu.comm import Array
from ms_kungfu.elastic import inventory, state
from ms_kungfu.elastic.differences import differing
from ms_kungfu.errors import DivergenceError

_ROW_BYTES = 2048
PERIOD = 100  # steps in which all pieces come once

# Short: what differs otherwise comes behind it, in a message with an end.
_REMEDY = "all begin alike by KungFuElasticCallback, ElasticTraining or sync_net_parameters"

_reducers: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process
_alike: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_claims: list[tuple[Sequence[Any], int]] = []  # of this process: parameters, and what they were when it began


def content(tensors: Iterable[Any]) -> int:
    """A number below 2**63 that differs, in all likelihood, where one bit of one of the tensors does."""
    sums = []
    for tensor in tensors:
        if getattr(tensor, "has_init", False):
            tensor.init_data()
        sums.append(_sums(tensor.asnumpy()))
    return content_of(b"".join(sums))


def content_of(data: bytes) -> int:
    """The same of these bytes."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


def _sums(values: Array) -> bytes:
    """The bits as a table of 64-bit words, added up by its rows and by its columns, and hashed: at about the memory's
    speed, which no hash has. Two words that differ by opposite numbers are in another row, or another column."""
    content = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    table = content[: content.size // _ROW_BYTES * _ROW_BYTES].view(np.uint64).reshape(-1, _ROW_BYTES // 8)
    digest = hashlib.blake2b(digest_size=8)
    for part in (table.sum(axis=0), table.sum(axis=1), content[table.nbytes :]):
        digest.update(part.tobytes())
    return digest.digest()


def mark(tensors: Iterable[Any]) -> None:
    """These have been made the same on all workers, at all of them."""
    _alike.update((id(tensor), tensor) for tensor in tensors)
    _claims[:] = [claim for claim in _claims if not all(map(is_marked, claim[0]))]
    _tell()


def is_marked(tensor: Any) -> bool:
    return _alike.get(id(tensor)) is tensor


def claim(parameters: Iterable[Any]) -> None:
    """An optimizer that keeps these equal is about to train them for the first time.

    Where nothing has made them the same on all workers, their content becomes a part of what the gradient reductions
    say of themselves. So the first of them fails at every rank, with this as its reason, where the ranks have begun
    with different parameters; otherwise it costs nothing, and no rank waits for another that doesn't come here.
    """
    mine = [p for p in parameters if not is_marked(p)]
    # Whoever joins later begins in the midst: with those who were there before it has nothing to compare.
    if mine and membership.size() > 1 and membership.is_first_cluster():
        _claims.append((mine, content(mine)))
        _tell()


@contextlib.contextmanager
def claiming(claim: str) -> Iterator[None]:
    """The reductions in it say this of themselves, too: where ranks say different things, all of them fail."""
    core = membership.current().core
    core.set_claim(claim + _claim())
    try:
        yield
    finally:
        core.set_claim(_claim())


def _tell() -> None:
    membership.current().core.set_claim(_claim())


def _claim() -> str:
    whole = hashlib.blake2b(repr([value for _, value in _claims]).encode(), digest_size=4).hexdigest()
    return f"on parameters {whole} ({_REMEDY}), " if _claims else ""


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
        """For a message: of a single number, what it is."""
        if self.numbers is not None:
            return json.dumps(self.numbers())
        return f"{self.tensors[0].asnumpy().item():.6g}" if sum(t.size for t in self.tensors) == 1 else ""


def pieces_of(
    trained: Sequence[Any], loss_scale_manager: Any, without: set[int], all_parameters: bool = False
) -> list[Piece]:
    """The weights, learning rates and loss scales among what is trained, but for the tensors in `without` (IDs) and
    those of optimizers whose workers' models differ at present. `all_parameters`: what no optimizer trains, too."""
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

    # In this order they are named where several differ: a rate or scale that does makes the weights differ.
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


def serves(reducer: Any) -> None:
    """This cell reduces gradients over the workers; with Parameters as `planned_parameters` it says of which."""
    _reducers.add(reducer)


def _served(trained: Sequence[Any]) -> list[Any]:
    """Of the Parameters among `trained` those whose gradients a reducer of this process reduces. One that isn't told
    which they are may have any."""
    import mindspore as ms

    serving = [reducer for reducer in _reducers if reducer.begins_alike and not reducer.left_to_shards]
    served = {id(p) for reducer in serving for p in reducer.planned_parameters}
    if any(not reducer.planned_parameters for reducer in serving):
        cells = [item for item in trained if isinstance(item, ms.nn.Cell)]
        served |= {id(p) for cell in cells if not inventory.collect_optimizers([cell]) for p in cell.trainable_params()}
    return [p for p in inventory.collect_parameters(trained) if id(p) in served]


def _parameters_of(rates: Any) -> list[Any]:
    """Of an optimizer's learning rate, in whatever form MindSpore keeps it."""
    import mindspore as ms

    if isinstance(rates, (list, tuple)):
        return [p for rate in rates for p in _parameters_of(rate)]
    if isinstance(rates, ms.nn.Cell):
        return list(rates.get_parameters())
    return [rates] if isinstance(rates, ms.Parameter) else []


class Sameness:
    """The pieces, dealt to the steps of a period so that each has about as many bytes to look at."""

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
        """Of the pieces that are due after this step: a number that differs where one of them does; 0 if none is."""
        words = [piece.word() for piece in self._due[step % PERIOD] if piece.counts()]
        return content_of(repr(words).encode()) if words else 0

    def words(self) -> dict[str, tuple[int, str]]:
        """All pieces, for finding out which of them differ: a number likewise, and a value to show, if it is short."""
        return {piece.what: (piece.word(), piece.value()) for piece in self._pieces if piece.counts()}

    def check_all(self, step: int) -> None:
        """Collective: DivergenceError where any piece differs, whenever it was looked at last."""
        word = content_of(repr([piece.word() for piece in self._pieces if piece.counts()]).encode())
        most, least = comm.all_reduce(np.array([word, -word]), op="max", name="kungfu/same_at_end")
        if most != -least:
            check(step, gather_json(self.words(), "kungfu/same"))


def check(step: int, everyones: Mapping[int, Mapping[str, Sequence[Any]]]) -> None:
    """DivergenceError where the ranks' words, by rank, differ in a piece."""
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
        "workers did has changed it (a callback with numbers of its own, a condition on the rank, an update that isn't "
        "reduced, what stands behind step_end in a loop and a worker that joins there misses, with shards also a "
        "forward pass that writes to it); do it on all alike. Parameters that are meant to "
        "differ are named by averaged=[...]"
    )
