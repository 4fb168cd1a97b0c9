"""A loop of the program's own over a dataset that it has sharded for V ranks.

    for image, label in dataset:
        loss, gradients = gradient(image, label)
        optimizer(reducer(gradients))

Nothing says there where a step ends and what is trained. So a step ends where the loop asks for the next batch, and all
cells that the program has made by its first batch are kept the same at all workers. The sharded dataset that it reads
first, once it has a reducer, is the one that it trains; another one is an evaluation, which sees all samples at each
worker.

A worker that joins runs the loops from their start. It is told how many passes over the dataset the others have begun,
and each of its own before that ends at once; until it is there it calls nobody (`world.takes_part`).
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterator
from typing import Any, Callable

from mindspore import nn

from ms_kungfu.elastic.state import Component
from ms_kungfu.elastic.training import ElasticTraining
from ms_kungfu.msrun import pipelines, reducers, world
from ms_kungfu.msrun.communication import refused

_log = logging.getLogger(__name__)
_cells: list[weakref.ref[Any]] = []  # that the program has made, in its order, which is that of all workers


def noting(init: Callable[..., None]) -> Callable[..., None]:
    """What stands in the place of ``nn.Cell.__init__``."""

    def __init__(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        _cells.append(weakref.ref(self))

    return __init__


def _outermost() -> list[Any]:
    """The cells that live, but for those in another one."""
    gc.collect()  # what nobody has any more is gone at a veteran and at who joins
    found = list({id(cell): cell for cell in (known() for known in _cells) if cell is not None}.values())
    inner = {id(cell) for outer in found for _, cell in outer.cells_and_names() if cell is not outer}
    known = {id(cell) for cell in found} | inner
    for each in gc.get_objects():
        if issubclass(type(each), nn.Cell) and id(each) not in known and any(True for _ in each.get_parameters()):
            raise refused(
                f"a loop of one's own beside a {type(each).__name__} that copy.deepcopy, or the like, has made",
                "who joins couldn't tell which it is; make it by its class, or keep it in another cell",
            )
    return [cell for cell in found if id(cell) not in inner]


class _Training:
    """The program's one training by a loop of its own."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.data = pipelines.elastic(source, by_shards=False)
        self._passes, self._passes_of_others = 0, 0
        told = Component("passes", lambda: self._passes, self._hear)
        self.cells = _outermost()
        self._elastic = ElasticTraining(*self.cells, dataset=self.data, components=[told])
        self.taken = False  # a batch whose step hasn't ended
        self._updates: int | None = None  # that there were when its first batch was

    def updates(self) -> int:
        """By all optimizers so far."""
        return sum(int(cell.global_step.asnumpy()[0]) for cell in self.cells if isinstance(cell, nn.Optimizer))

    def _hear(self, passes: int) -> None:
        self._passes_of_others = passes

    def begin_pass(self) -> None:
        self._passes += 1
        if self._passes == 1:
            self._elastic.begin()
            self._updates = self.updates()
        world.pass_by(self._passes < self._passes_of_others)

    def step_end(self) -> None:
        if self.taken:
            self.taken = False
            self._elastic.step_end()

    def epoch_end(self) -> None:
        if self._passes == 1 and not self._passes_of_others and self._updates == self.updates():
            _log.warning(
                "--msrun: no optimizer has made a step in the first loop over a sharded dataset, which is dealt as the "
                "training data, once there is a reducer; evaluate behind it"
            )
        self._elastic.average_statistics()  # for an evaluation
        self._elastic.epoch_end()


_training: _Training | None = None


class Loop:
    """In the place of an iterator over a sharded dataset. `make` makes one over another dataset."""

    def __init__(self, source: Any, make: Callable[[Any], Any]) -> None:
        self._source, self._make = source, make
        self._batches: Any = None
        self._trains: bool | None = None  # None: nobody knows yet
        self._in_pass = False
        self._looked = False
        self._updates: int | None = None  # that there were when an evaluation began

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._trains is None and not reducers.made():
            return self._first_look()
        if self._trains is None:
            self._decide()
        return self._next_to_train() if self._trains else self._next_to_evaluate()

    def _first_look(self) -> Any:
        """At a batch, before anything is there that could train."""
        if self._looked:
            raise refused(
                "a loop over a sharded dataset in which nothing reduces gradients",
                "make a nn.DistributedGradReducer or ops.AllReduce before it, or use Model.train",
            )
        self._looked = True
        return next(self._make(self._source))

    def _decide(self) -> None:
        global _training
        if _training is None:
            _training = _Training(self._source)
        self._trains = _training.source is self._source
        self._batches = self._make(_training.data if self._trains else pipelines.whole(self._source))

    def _next_to_train(self) -> Any:
        training = _training
        assert training is not None
        training.step_end()
        if not self._in_pass:
            self._in_pass = True
            training.begin_pass()
        try:
            batch = next(self._batches) if not world.passes_by() else None
        except StopIteration:
            batch = None
            training.epoch_end()
        if batch is None:
            self._in_pass = False
            raise StopIteration
        training.taken = True
        return batch

    def _next_to_evaluate(self) -> Any:
        training = _training
        assert training is not None
        updates = training.updates()
        if self._in_pass and updates != self._updates:
            raise refused(
                "a second sharded dataset that a loop trains by",
                "the first one is dealt to the workers; make one dataset, before the loop over epochs",
            )
        self._updates = updates
        cut = self._in_pass and world.passes_by()  # of what is over, one batch is as good as all
        batch = None if cut else next(self._batches, None)
        self._in_pass = batch is not None
        if batch is None:
            raise StopIteration
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches if self._batches is not None else self._make(self._source), name)
