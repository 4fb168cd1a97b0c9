"""Training that continues while the cluster changes, in loops and in `KungFuElasticCallback`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable

from ms_kungfu import membership, runtime
from ms_kungfu.elastic import event_log, program, state, state_transfer
from ms_kungfu.elastic.ahead import Ahead
from ms_kungfu.elastic.asynchronous import AsynchronousSteps, is_asynchronous
from ms_kungfu.elastic.beginning import Beginning
from ms_kungfu.elastic.beside import Beside
from ms_kungfu.elastic.carried import Carried
from ms_kungfu.elastic.changes import ClusterChanges
from ms_kungfu.elastic.checkpoint import Checkpointing
from ms_kungfu.elastic.eviction import Evict
from ms_kungfu.elastic.lr_rule import LRRule
from ms_kungfu.elastic.measuring import Measuring
from ms_kungfu.elastic.misuse_warnings import warn_of_one_epoch
from ms_kungfu.elastic.options import Options
from ms_kungfu.elastic.policy import Policy
from ms_kungfu.elastic.program import is_behind
from ms_kungfu.elastic.schedule import Schedule, parse_schedule
from ms_kungfu.elastic.state import TrainingState
from ms_kungfu.elastic.synchronous import SynchronousSteps
from ms_kungfu.membership import Change
from ms_kungfu.monitoring.monitor import Monitor
from ms_kungfu.trained import inventory

if TYPE_CHECKING:
    import os

    from ms_kungfu.dataset import ElasticDataset


class ElasticTraining:
    """Keep the workers' training state the same while they come and go.

    ::

        elastic = ElasticTraining(net, optimizer, schedule="10:2,20:4,40:1", dataset=data)
        for epoch in elastic.epochs(10):
            for image, label in data:
                loss = train_step(image, label)
                elastic.step_end()

    The docstring of `ms_kungfu.elastic` says what it guarantees to joining and leaving workers, and how
    asynchronous workers meet.

    Args:
        trained: all that training changes: cells, optimizers, lists of Parameters, or objects that hold
            Parameters (a ``DynamicLossScaler``). Schedulers of ``mindspore.experimental.optim`` are
            found by their optimizer; give those of your own.
        schedule: ``{step: size}``, ``"10:2,20:4"`` (2 workers once 10 steps are done, ...) or a
            function of the step that returns a size or None. None follows the config server only
            (``kungfu-run resize``).
        wait: stop at a step of the schedule until its size is there, as KungFu does; else train on.
        dataset: the `ElasticDataset` the loop reads. It goes on from the same position at a joining
            worker, and its iterators end when training is over for this worker.
        loss_scale_manager: a host-side loss scale manager whose numbers are part of the state.
        components: more state of the program's own, see `ms_kungfu.elastic.state`.
        lr_rule: how the learning rates follow the cluster's size: ``"none"``, ``"linear"``, ``"sqrt"``,
            or a function ``(size, start_size) -> factor``. The docstring of `ms_kungfu.elastic` says
            more.
        averaged: the Parameters and buffers that differ between workers by nature: averaged at each
            change and before a checkpoint. None: the moving means and variances of MindSpore's
            normalization cells. ``()``: none; when a worker joins all go on with the lowest rank's.
        checkpoint_dir: folder of the checkpoints (`ms_kungfu.elastic.checkpoint`), at all workers.
        checkpoint_every: steps between them; None writes none.
        keep_checkpoints: how many are kept.
        resume: start from the newest checkpoint in `checkpoint_dir`, on any number of workers; from the
            beginning without one. Else a folder with checkpoints is rejected: they would be lost.
        prepare: called at a joining worker before it joins, to compile what its first step needs.
        policy: one `Policy` or several: docs/policies.md. Their size counts before the schedule's.
        monitor: measures the steps (docs/monitoring.md); policies have one in any case.
        evict: sends workers away if a policy wants it: a function of their ranks, called by one worker.
        total_samples: that will have been trained when training ends, for policies; `epochs` knows it.
        asynchronous: whether the workers make their steps without meeting. None: by the optimizers.

    Raises:
        ValueError, TypeError: at each worker, for wrong arguments; before anything is sent.
    """

    dataset: ElasticDataset | None = None
    """The `ElasticDataset` that the loop reads, or None."""

    def __init__(
        self,
        *trained: Any,
        schedule: Schedule | None = None,
        wait: bool = False,
        dataset: ElasticDataset | None = None,
        loss_scale_manager: Any = None,
        components: Sequence[state.Component] = (),
        lr_rule: LRRule = "none",
        averaged: Sequence[Any] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_every: int | None = None,
        keep_checkpoints: int = 3,
        resume: bool = False,
        prepare: Callable[[], None] | None = None,
        policy: Policy | Sequence[Policy] | None = None,
        monitor: Monitor | None = None,
        evict: Evict | None = None,
        total_samples: int | None = None,
        asynchronous: bool | None = None,
    ) -> None:
        options = Options(
            schedule, wait, components, lr_rule, averaged, checkpoint_dir, checkpoint_every, keep_checkpoints, resume,
            policy, monitor, evict, asynchronous,
        ).as_run()  # fmt: skip
        self.dataset = dataset
        self._options = options
        self.step = 0
        """Steps done since training started, including those before this worker joined."""
        self.first_step = 0
        """The value of `step` when the present call of training began."""
        self.epoch = 0
        """Epochs done in the present call of training."""
        self.should_stop = False
        """That this worker has left the training or isn't in it yet (`begin`), or a worker asked for a stop."""
        self.before_checkpoint: Callable[[], None] = lambda: None
        """Collective; for a driver of the training that agrees on something that a checkpoint keeps."""
        self.carries_more = bool(components)
        """Whether the program has named state of its own, so that it needs no warning of what isn't carried."""
        self.optimizers = inventory.collect_optimizers(trained)
        """The optimizers of MindSpore among what is trained; of those in one another the outer one."""
        self._measuring = measuring = Measuring(self, options, total_samples)
        self.monitor = measuring.monitor
        self.asynchronous = is_asynchronous(options, self.optimizers, dataset, self.monitor)
        """Whether the workers make their steps without coming together."""
        self.carried = carried = Carried(self, trained, options, loss_scale_manager, measuring)
        self._checkpoints = checkpoints = Checkpointing(options, self, lambda: self.before_checkpoint())
        self._beside, self._ahead = Beside(), Ahead(options.schedule)
        self.changes = ClusterChanges(self, options.wait, carried, measuring, checkpoints, self._beside)
        size_after = parse_schedule(options.schedule)
        parts = size_after, carried, measuring, checkpoints, self.changes
        self._beginning = Beginning(self, prepare, *parts)
        self._synchronous = SynchronousSteps(self, *parts)
        self._asynchronous = AsynchronousSteps(self, size_after, checkpoints, self.changes)
        if dataset is not None:
            dataset.driven = self._synchronous.last

    @property
    def wanted_size(self) -> int:
        """The size that a policy has requested and that hasn't come true yet, else the present one."""
        return self._measuring.wanted_size

    @property
    def parameters(self) -> list[Any]:
        """The Parameters that are kept the same, each once."""
        return self.carried.parameters

    @property
    def components(self) -> list[state.Component]:
        """The rest of the state."""
        return self.carried.components

    @property
    def training_state(self) -> TrainingState:
        """Everything that decides the next step."""
        return self.carried.state()

    @property
    def averaged(self) -> Sequence[Any]:
        """What differs between the workers by nature, such as moving statistics."""
        return self.carried.averaged

    def average_statistics(self) -> None:
        """Replace what differs between the workers by nature by its mean.

        An evaluation has the same result at each worker then. Collective, between steps. If each worker
        trains a model of its own, the statistics are that model's: call it after the optimizer's `merge`.
        """
        if not runtime.detached() and not is_behind():
            state_transfer.average(self.averaged)

    def begin(self) -> None:
        """Start a call of training; a joining worker receives the state here.

        Collective. The others may be in a later call already (``for ...: model.train(1, ...)``). Then a
        joining worker has `should_stop` set and its dataset suspended until it arrives there. It receives
        the state in that call's objects; the others wait meanwhile.
        """
        runtime.init()
        self._synchronous.misuse_warnings.look(self.carried.trained)
        if self._beginning.run():
            if not self.asynchronous:
                self._synchronous.last.watch(self.carried.trained)
            if not self.carries_more:
                self._beside.look(self.carried.trained, self.optimizers, self.parameters)
            self._synchronous.follow()

    def step_end(self, loss: Any = None, samples: int | None = None) -> Change:
        """Count a step, and follow a change of the cluster that is due.

        Collective, once a step. On return from a change the workers that joined have the state, and this
        one's dataset goes on with its new share. The arguments are for the monitor and the policies. Errors
        are raised at every worker.

        Args:
            loss: this worker's, a number or a tensor.
            samples: that this worker has trained in the step; the dataset knows it otherwise.

        Returns:
            What changed, and whether the step was undone (docs/recovery.md).

        Raises:
            ResizeError: if a requested size isn't possible; the cluster is as before.
            DivergenceError: if something that has to be equal on all workers isn't.
            ValueError: for a decision of a policy that can't be carried out here.
            KungFuError: if no living worker has the training state, or a step can't be undone.
        """
        if self.should_stop:
            return membership.no_change()
        runtime.init()
        program.current().resuming = False
        from ms_kungfu.ops import wait_for_queue  # loads MindSpore, which importing this module doesn't

        # Operations that PyNative mode has queued belong to this step, and to the membership in which it is done.
        wait_for_queue()
        self.step += 1
        membership.step_ended(self.step)
        event_log.step_ended(self.step)
        self.carried.check_covered()
        self._ahead.look(self.step)
        self._beside.step_end()
        return self._asynchronous.step_end(loss) if self.asynchronous else self._synchronous.step_end(loss, samples)

    def step_begin(self) -> None:
        """Begin a step: what the program has set before belongs to what an undone step restores.

        Examples: a rate, clipped weights. With an `ElasticDataset` a step begins with its first batch.
        Without one it begins when the `step_end` before returns, unless the loop calls this.
        """
        self._synchronous.begin()

    def request_stop(self) -> None:
        """Have training end at all workers after the same step.

        Any worker may ask, alone. `should_stop` is true once all have agreed on it in a `step_end`. Asked
        for before it, training ends with that step; behind it, one step later, be that the first of the
        next epoch. Asynchronous workers end the loop instead: `end` ends it for all.
        """
        self.changes.stop_asked = True

    def agree_on_stop(self) -> bool:
        """Return whether to stop at this end of an epoch because a worker has asked.

        Collective. Right after a change of the cluster the next step's end says so instead. Workers that
        joined in it may not have come to this epoch's end with the others.
        """
        if not self.asynchronous and not self.should_stop:
            self.changes.agree_on_stop()
        return self.should_stop

    def epoch_begin(self) -> None:
        """Tell the policies that an epoch begins; `epochs` does so itself."""
        # A joining worker comes to an epoch that the others have begun already.
        if not self.should_stop and not program.current().resuming:
            self._measuring.ask("before_epoch")

    def checkpoint(self) -> None:
        """Write the state to `checkpoint_dir`, in the background, between steps; collective.

        Raises:
            ValueError: if workers don't step together: there `checkpoint_every` alone writes them.
        """
        if self.asynchronous:
            raise ValueError("asynchronous workers are not between steps together; give checkpoint_every instead")
        self._checkpoints.write(self.step)

    def epoch_end(self) -> None:
        """Count an epoch; `epochs` does so itself."""
        program.current().resuming = False
        if not self.should_stop:
            self.epoch += 1
            self._measuring.ask("after_epoch")

    def end(self) -> None:
        """End the call of training, for all if the workers are asynchronous.

        Collective; `epochs` does so itself. It tells the policies, closes the monitor's files, and writes
        the last checkpoint again if its writer was lost with it.

        Raises:
            DivergenceError: at every worker, if something that has to be equal on all of them isn't.
        """
        if self.asynchronous:
            self._asynchronous.end()
        elif not runtime.detached() and not is_behind():
            self._checkpoints.make_up(self.step)
        self._measuring.end()
        self.changes.end()

    def check_sameness(self) -> None:
        """Raise DivergenceError at every worker if something isn't equal on all that has to be.

        Collective, between steps. `end` does so itself; in between each piece is checked once in a hundred
        steps.
        """
        self.changes.check_sameness()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs of a call of training that are still to do, of `count`.

        It calls `begin`, then yields ``range(count)``, at a joining worker from the others' epoch. An epoch
        that is trained but for its end is one of them. A worker that joins or resumes there gets no batch,
        and does with the others what the program does after an epoch.

        Without a dataset the cluster changes between epochs, and not in the last one. Only the program
        knows which steps of an epoch a joining worker would have to leave out.
        """
        between = self.dataset is None and not self.asynchronous
        self._measuring.expect_epochs(count)
        joins = membership.is_joining()
        if between:
            self.changes.may_follow = lambda: False  # after a step
        try:
            self.begin()
            if between and joins:
                program.current().resuming = False  # it begins its first epoch with the others
            if between and count == 1 and not self.should_stop:
                warn_of_one_epoch(self._options)
            while self.epoch < count and not self.should_stop:
                self.epoch_begin()
                yield self.epoch
                self.epoch_end()
                if between and self.epoch < count and not self.should_stop:
                    self.changes.change_to()
                    self._synchronous.follow()
        finally:  # the program may leave its loop by `break`, and continue with one of another form
            self.changes.leave_loop(between)
        self.end()
