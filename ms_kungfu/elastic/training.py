"""Continue training while the cluster changes, in training loops and in `KungFuElasticCallback`."""

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
    """Keep the workers' training state equal while workers join and leave.

    ::

        elastic = ElasticTraining(net, optimizer, schedule="10:2,20:4,40:1", dataset=data)
        for epoch in elastic.epochs(10):
            for image, label in data:
                loss = train_step(image, label)
                elastic.step_end()

    The docstring of `ms_kungfu.elastic` describes joining, leaving and asynchronous workers.

    Args:
        trained: everything that training changes: cells, optimizers, lists of Parameters, or objects
            that contain Parameters (such as a ``DynamicLossScaler``). MindSpore's own schedulers of
            these optimizers are found automatically. Schedulers of other classes must be in `trained`.
        schedule: ``{step: size}``, ``"10:2,20:4"`` (2 workers as soon as 10 steps are done, ...) or a
            function of the step that returns a size or None. If `schedule` is None, only the config
            server resizes the cluster.
        wait: whether the step of a schedule entry waits until the cluster has the entry's size, as in
            KungFu.
        dataset: the `ElasticDataset` that the loop reads. On a joining worker, the dataset
            continues from the other workers' position. Its iterators end when training ends for
            this worker.
        loss_scale_manager: a loss scale manager that is a plain Python object. Its numbers become part
            of the training state.
        components: further state of the program; see `ms_kungfu.elastic.state`.
        lr_rule: how the learning rates depend on the cluster size: ``"none"``, ``"linear"``,
            ``"sqrt"``, or a function ``(size, start_size) -> factor``. See the docstring of
            `ms_kungfu.elastic`.
        averaged: the Parameters and buffers that differ between workers by design. They are averaged at
            each change of the cluster and before a checkpoint. None means the moving means and
            variances of MindSpore's normalization cells. With ``()`` nothing is averaged, and training
            continues with the lowest rank's values after a resize.
        checkpoint_dir: the folder of the checkpoints (`ms_kungfu.elastic.checkpoint`). All workers must
            pass it.
        checkpoint_every: the number of steps between checkpoints. With None, no checkpoints are written
            automatically.
        keep_checkpoints: the number of checkpoints to keep.
        resume: whether to start from the newest checkpoint in `checkpoint_dir`, if there is one. The
            number of workers may have changed since that checkpoint. If false, a folder with
            checkpoints is rejected.
        prepare: a function that compiles the first step. A joining worker calls it before it joins.
        policy: one `Policy` or several (docs/policies.md). The policies' size requests override the
            schedule.
        monitor: the monitor that measures the steps (docs/monitoring.md). If it is None and there
            are policies, one monitor is created for them.
        evict: a function that evicts workers for a policy. One worker calls the function with the
            ranks to evict.
        total_samples: the number of samples that will have been used when training ends, for
            policies. By default, `epochs` computes it.
        asynchronous: whether workers run their steps independently. With None, the optimizers
            determine this.

    Raises:
        ValueError, TypeError: on each worker, for wrong arguments, before any communication.
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
        """The number of steps done since training started, including the steps before this worker joined."""
        self.first_step = 0
        """The value of `step` when the current training call began."""
        self.epoch = 0
        """The number of epochs done in the current training call."""
        self.should_stop = False
        """Whether the loop should stop.

        True if this worker has left, if its state belongs to a later training call, or if the workers
        have agreed to stop.
        """
        self.before_checkpoint: Callable[[], None] = lambda: None
        """A collective function that is called before a checkpoint, to agree on a value in the checkpoint."""
        self.carries_more = bool(components)
        """Whether the program has passed its own components, so that no warning about missing state is needed."""
        self.optimizers = inventory.collect_optimizers(trained)
        """The MindSpore optimizers among the trained objects, without optimizers inside another optimizer."""
        self._measuring = measuring = Measuring(self, options, total_samples)
        self.monitor = measuring.monitor
        self.asynchronous = is_asynchronous(options, self.optimizers, dataset, self.monitor)
        """Whether the workers run their steps independently."""
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
        """The size in a policy's pending request; the current size if no request is pending."""
        return self._measuring.wanted_size

    @property
    def parameters(self) -> list[Any]:
        """The Parameters that are kept equal on all workers, without duplicates."""
        return self.carried.parameters

    @property
    def components(self) -> list[state.Component]:
        """The parts of the state that are neither Parameters nor buffers."""
        return self.carried.components

    @property
    def training_state(self) -> TrainingState:
        """The complete state that determines the next step."""
        return self.carried.state()

    @property
    def averaged(self) -> Sequence[Any]:
        """The tensors that differ between the workers by design, such as moving statistics."""
        return self.carried.averaged

    def average_statistics(self) -> None:
        """Average the tensors that differ between the workers by design, such as moving statistics.

        Afterwards an evaluation has the same result on each worker. The method is collective. Call it
        between steps. If each worker trains a separate model, call it after the optimizer's `merge`,
        because the averaged statistics belong to the merged model.
        """
        if not runtime.detached() and not is_behind():
            state_transfer.average(self.averaged)

    def begin(self) -> None:
        """Start a training call; a joining worker receives the state here.

        The method is collective. The other workers may be in a later training call than the joining
        worker (``for ...: model.train(1, ...)``). They wait until the joining worker reaches the same
        call, and then it receives the state. Until then, the joining worker's `should_stop` is true,
        and its dataset is suspended.
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
        """Count a step, and carry out a change of the cluster that is due.

        The method is collective; every worker calls it once per step. After a change of the cluster,
        the joining workers have the state, and this worker's dataset continues with its new share of
        the samples. The arguments are for the monitor and the policies. Errors are raised on every
        worker.

        Args:
            loss: this worker's loss, a number or a tensor.
            samples: the number of samples on which this worker trained in the step; by default the
                number from the dataset.

        Returns:
            What changed, and whether the step was undone (docs/recovery.md).

        Raises:
            ResizeError: if a requested size isn't possible. The cluster doesn't change.
            DivergenceError: if workers differ in a value that must be equal on all workers.
            ValueError: if a policy's decision can't be carried out in this training.
            KungFuError: if no living worker has the training state, or a step can't be undone.
        """
        if self.should_stop:
            return membership.no_change()
        runtime.init()
        program.current().resuming = False
        from ms_kungfu.ops import wait_for_queue  # loads MindSpore; importing this module doesn't

        wait_for_queue()  # operations that PyNative mode has queued belong to this step
        self.step += 1
        membership.step_ended(self.step)
        event_log.step_ended(self.step)
        self.carried.check_covered()
        self._ahead.look(self.step)
        self._beside.step_end()
        return self._asynchronous.step_end(loss) if self.asynchronous else self._synchronous.step_end(loss, samples)

    def step_begin(self) -> None:
        """Begin a step, and save the state that is restored if the step is undone.

        The saved state includes changes that the program made before this call, such as a new
        learning rate or clipped weights. With an `ElasticDataset`, a step begins automatically at
        its first batch. Without an `ElasticDataset`, a step begins when the previous `step_end`
        returns, unless the loop calls this method.
        """
        self._synchronous.begin()

    def request_stop(self) -> None:
        """Request that training end on all workers after the same step.

        A single worker may request the stop. All workers agree on the stop in the next `step_end`, which
        may be in the next epoch. Afterwards `should_stop` is true. An asynchronous worker should leave its
        loop instead of calling this method, because `end` then ends training for all workers.
        """
        self.changes.stop_asked = True

    def agree_on_stop(self) -> bool:
        """Return whether a requested stop takes effect at the end of this epoch.

        The method is collective. Directly after a change of the cluster, joining workers might not
        have reached the end of this epoch. The workers then agree at the end of the next step
        instead.
        """
        if not self.asynchronous and not self.should_stop:
            self.changes.agree_on_stop()
        return self.should_stop

    def epoch_begin(self) -> None:
        """Notify the policies that an epoch begins; `epochs` calls this method automatically."""
        if self.should_stop:
            return
        # A joining worker enters an epoch that the other workers have already begun.
        if not program.current().resuming:
            self._measuring.ask("before_epoch")
        # The time between two epochs, e.g. for an evaluation, isn't part of a step.
        self.changes.statistics.resume()
        membership.step_resumed()

    def checkpoint(self) -> None:
        """Write the state to `checkpoint_dir` in the background (collective).

        Call this method between steps.

        Raises:
            ValueError: if workers are asynchronous; use `checkpoint_every` instead.
        """
        if self.asynchronous:
            raise ValueError("asynchronous workers can't write a checkpoint together; give checkpoint_every instead")
        self._checkpoints.write(self.step)

    def epoch_end(self) -> None:
        """Count an epoch; `epochs` calls this method automatically."""
        program.current().resuming = False
        if not self.should_stop:
            self.epoch += 1
            self._synchronous.epoch_end()

    def end(self) -> None:
        """End the training call; if the workers are asynchronous, end it for all workers.

        The method is collective, and `epochs` calls it automatically. It notifies the policies, and closes
        the monitor's files. If the worker that wrote the last checkpoint failed before the file was
        complete, another worker writes a checkpoint.

        Raises:
            DivergenceError: on every worker, if workers differ in a value that must be equal.
        """
        if self.asynchronous:
            self._asynchronous.end()
        elif not runtime.detached() and not is_behind():
            self._checkpoints.make_up(self.step)
        self._measuring.end()
        self.changes.end()

    def check_sameness(self) -> None:
        """Raise DivergenceError on every worker if workers differ in a value that must be equal.

        The method is collective. Call it between steps; `end` calls it automatically. During training,
        each value is checked once every hundred steps.
        """
        self.changes.check_sameness()

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs of a training call that has `count` epochs.

        The method calls `begin`, and then yields ``range(count)``. On a joining worker, it starts
        with the other workers' current epoch. All steps of that epoch may be done although the
        epoch hasn't ended. A worker that joins or resumes in such an epoch gets no batch, but runs
        the code after the batches.

        Without a dataset, the cluster changes only between epochs, and not after the last epoch
        (docs/loops.md).
        """
        between = self.dataset is None and not self.asynchronous
        self.changes.expect_epochs(count)
        joins = membership.is_joining()
        if between:
            self.changes.may_follow = lambda: False  # the cluster changes only between epochs
        try:
            self.begin()
            if between and joins:
                program.current().resuming = False  # this worker begins its first epoch with the others
            if between and count == 1 and not self.should_stop:
                warn_of_one_epoch(self._options)
            while self.epoch < count and not self.should_stop:
                self.changes.defer_in_last_epoch(between and self.epoch + 1 == count)
                self.epoch_begin()
                yield self.epoch
                self.epoch_end()
                if between and self.epoch < count and not self.should_stop:
                    self.changes.change_to()
                    self._synchronous.follow()
        finally:  # the program may leave this loop with `break`, and continue with another kind of loop
            self.changes.leave_loop(between)
        self.end()
