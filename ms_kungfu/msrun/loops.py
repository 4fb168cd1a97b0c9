"""Support a program's own training loop, over a dataset that the program has sharded for V ranks.

    for image, label in dataset:
        loss, gradients = gradient(image, label)
        optimizer(reducer(gradients))

Such a loop doesn't show where a step ends, or which cells the loop trains. Therefore these rules apply:

- A step ends when the loop requests the next batch.
- All cells that the program has created before its first batch are kept equal on all workers.
- The training dataset is the first sharded dataset that the program reads after it has created a reducer.
- A loop over any other dataset is an evaluation, in which each worker sees all samples.
- If the program trains with `Model.train`, each loop is an evaluation.

A joining worker runs the program from its start, so it begins with the first pass over the dataset. The worker receives
the number of passes that the other workers have begun. Until it reaches the current pass, each of its passes ends
immediately, and it takes part in no collective (`world.takes_part`).

The cluster changes only after the last step of a pass. The reason is that a loop may count its batches (`enumerate`)
and run an operation every few batches, which all workers must run at the same batch. A worker that joined during a pass
would count from 0, and would then wait in one operation while the other workers wait in another. A failure during a
pass causes no such problem, because the surviving workers keep their counts.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from mindspore import nn

from ms_kungfu.elastic import program
from ms_kungfu.elastic.state import Component
from ms_kungfu.elastic.training import ElasticTraining
from ms_kungfu.msrun import cells, objects, pipelines, reducers, world
from ms_kungfu.msrun.communication import refused
from ms_kungfu.msrun.rest import Rest
from ms_kungfu.ops import wait_for_queue

_log = logging.getLogger(__name__)


def _outermost() -> list[Any]:
    """Return the living cells that aren't inside another cell."""
    gc.collect()  # removes unused cells, so that all workers find the same cells
    found = list({id(cell): cell for cell in cells.living()}.values())
    inner = {id(cell) for outer in found for _, cell in outer.cells_and_names() if cell is not outer}
    known = {id(cell) for cell in found} | inner
    for each in gc.get_objects():
        if issubclass(type(each), nn.Cell) and id(each) not in known and any(True for _ in each.get_parameters()):
            raise refused(
                f"a custom training loop with a {type(each).__name__} that was created by copy.deepcopy or similar",
                "a joining worker can't identify it; create it by its class, or keep it in another cell",
            )
    return [cell for cell in found if id(cell) not in inner]


class _Training:
    """The training in a program's own loop. A program has at most one `_Training` object.

    The cluster changes only between passes over the training dataset.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.data = pipelines.elastic(source, by_shards=False)
        self._passes, self._passes_of_others = 0, 0
        self._is_broken_off = False  # whether the program has left the loop early, so that the pass ends now
        told = Component("passes", lambda: [self._passes, self._is_broken_off], self._hear)
        cells = _outermost()
        self._elastic = ElasticTraining(*cells, dataset=self.data, components=[told, objects.component(cells)])
        self._rest = Rest(cells)
        changes = self._elastic.changes
        changes.prepare, changes.may_follow = self._copy_rest, self._is_between_passes
        changes.defers_until = "the loop has ended its pass over the dataset"
        changes.agree_on_trained = self._agree_on_trained
        self.taken = False  # whether the loop has taken a batch whose step hasn't ended
        self.in_pass = False
        self._batches = 0  # how many batches the loop has taken in this pass
        self._updates = 0  # the optimizers' count of updates when this pass began

    def _agree_on_trained(self, joins: bool) -> None:
        self._elastic.carried.trained = tuple(self._rest.agree(joins))

    def _copy_rest(self) -> None:
        if self._is_between_passes():
            self._rest.copy()

    def _is_between_passes(self) -> bool:
        return self._is_broken_off or self.data.steps >= self.data.get_dataset_size()

    def _hear(self, told: Sequence[Any]) -> None:
        passes, broken_off = told
        # If the other workers have left their pass early, that pass is over for a joining worker, too.
        self._passes_of_others = passes + 1 if broken_off else passes
        self._is_broken_off = broken_off

    def begin_pass(self) -> None:
        self._passes += 1
        # Queued operations belong to the previous pass. These operations must end before `world.takes_part` changes,
        # because a joining worker took no part in that pass.
        wait_for_queue()
        if self._passes == 1:
            self._elastic.begin()
        self._batches, self._updates = 0, cells.updates()
        world.pass_by(self._passes < self._passes_of_others)
        self.in_pass = not world.passes_by()
        if self.in_pass and self._is_broken_off:  # a joining worker; the other workers do the same in `break_off`
            self._leave_out_the_rest()
            self.in_pass = True

    def take(self) -> None:
        self.taken = True
        self._batches += 1

    def step_end(self) -> None:
        if self.taken:
            self.taken = False
            self._elastic.step_end()

    def break_off(self) -> None:
        """End a pass whose loop the program has left early, because the program begins a new pass.

        All workers have left the loop at the same batch.
        """
        updates = cells.updates() - self._updates
        self._is_broken_off = True
        # The last batch counts as unused if it has caused no update and each earlier batch of the pass has caused the
        # same number of updates.
        if self._batches > 1 and updates % self._batches and updates % (self._batches - 1) == 0:
            self.taken = False
        if self.taken:
            self.step_end()
        elif not self._elastic.should_stop:  # the last step couldn't change the cluster, because the pass wasn't over
            self._elastic.changes.change_to(behind_a_step=True)
        self._leave_out_the_rest()

    def _leave_out_the_rest(self) -> None:
        self._is_broken_off = False
        self.data.leave_out_the_rest()
        self.epoch_end()

    def epoch_end(self) -> None:
        self.in_pass = False
        if self._passes == 1 and not self._passes_of_others and self._updates == cells.updates():
            _log.warning(
                "misuse: check=msrun. The first loop over a sharded dataset after a reducer was created counts "
                "as the training loop, but no optimizer made a step in that loop; run an evaluation loop only "
                "after the training loop"
            )
        self._elastic.average_statistics()  # an evaluation may follow, in which the workers' statistics must be equal
        # A learning rate, for example, may depend on a count that the program keeps over all passes. On a worker that
        # has joined later, such a value differs.
        self._elastic.check_sameness()
        self._elastic.epoch_end()


_training: _Training | None = None


class Unsharded:
    """An iterator over a dataset that isn't sharded, for example for an evaluation.

    If the program trains with this iterator, an error is raised. Without the error, each worker would train on all
    samples, or on those that the worker selects by its rank, and the workers' gradients wouldn't be combined.
    """

    _LOOKS = 3  # how many batches are checked for training

    def __init__(self, iterator: Any) -> None:
        self._iterator, self._looks, self._updates = iterator, 0, 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._looks < self._LOOKS and program.current().calls == 0 and reducers.made():
            updates = cells.updates()
            if self._looks > 0 and updates != self._updates:
                raise refused(
                    "a loop that trains with a dataset that isn't sharded",
                    f"give the dataset num_shards=get_group_size(), which is {world.size()}, and shard_id=get_rank(); "
                    "samples that a program selects by its rank, and zip(), can't be partitioned again",
                )
            self._looks, self._updates = self._looks + 1, updates
        return next(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._iterator, name)


class Loop:
    """The replacement for an iterator over a sharded dataset. `make` returns MindSpore's iterator over a dataset."""

    def __init__(self, source: Any, make: Callable[[Any], Any]) -> None:
        self._source, self._make = source, make
        self._batches: Any = None
        self._trains: bool | None = None  # None if this isn't known yet
        self._in_pass = False
        self._looked = False
        self._updates: int | None = None  # number of updates when an evaluation began

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._trains is None and not reducers.made():
            return self._first_look()
        if self._trains is None:
            self._decide()
        return self._next_to_train() if self._trains else self._next_to_evaluate()

    def _first_look(self) -> Any:
        """Return one batch, because a program may need its shape to create a reducer. Reject a second batch."""
        if self._looked:
            raise refused(
                "a loop over a sharded dataset in a program without a gradient reducer",
                "create a nn.DistributedGradReducer or ops.AllReduce before the loop, or use Model.train",
            )
        self._looked = True
        return next(self._make(self._source))

    def _decide(self) -> None:
        global _training
        if _training is None and program.current().calls == 0:  # the program hasn't called Model.train
            _training = _Training(self._source)
        self._trains = _training is not None and _training.source is self._source
        if _training is None or not self._trains:
            self._batches = self._make(pipelines.whole(self._source))
            return
        if _training.in_pass:
            _training.break_off()
        self._batches = self._make(_training.data)

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
        training.take()
        return batch

    def _next_to_evaluate(self) -> Any:
        updates = cells.updates()
        if self._in_pass and updates != self._updates and _training is None:
            raise refused(
                "a training loop in a program that uses Model.train",
                "the workers partition only the dataset of Model.train, and any other loop over a dataset is "
                "treated as an evaluation; use either Model.train or a loop for training",
            )
        if self._in_pass and updates != self._updates:
            raise refused(
                "a second sharded dataset in a training loop",
                "only the first sharded dataset that a loop reads after a reducer exists is partitioned "
                "among the workers; create one training dataset before the loop over epochs, and read it "
                "before any evaluation dataset",
            )
        self._updates = updates
        cut = self._in_pass and world.passes_by()  # one batch is enough if the other workers have finished this pass
        batch = None if cut else next(self._batches, None)
        self._in_pass = batch is not None
        if batch is None:
            raise StopIteration
        return batch

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches if self._batches is not None else self._make(self._source), name)
