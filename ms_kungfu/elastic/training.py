"""Training that goes on while the cluster changes: what `KungFuElasticCallback` drives, and loops of one's own use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Callable

from ms_kungfu import membership, runtime
from ms_kungfu.elastic import chronicle, handover, program, state
from ms_kungfu.elastic.ahead import Ahead
from ms_kungfu.elastic.asynchronous import AsynchronousSteps, is_asynchronous
from ms_kungfu.elastic.beginning import Beginning
from ms_kungfu.elastic.beside import Beside
from ms_kungfu.elastic.carried import Carried
from ms_kungfu.elastic.changes import ClusterChanges
from ms_kungfu.elastic.checkpoint import Checkpointing
from ms_kungfu.elastic.doubts import warn_of_one_epoch
from ms_kungfu.elastic.eviction import Evict
from ms_kungfu.elastic.lr_rule import LRRule
from ms_kungfu.elastic.measuring import Measuring
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
    """Keeps the workers' training state the same while they come and go.

    ::

        elastic = ElasticTraining(net, optimizer, schedule="10:2,20:4,40:1", dataset=data)
        for epoch in elastic.epochs(10):
            for image, label in data:
                loss = train_step(image, label)
                elastic.step_end()

    Args:
        trained: cells, optimizers, lists of Parameters, or objects that hold Parameters (a ``DynamicLossScaler``):
            all that training changes. Schedulers of ``mindspore.experimental.optim`` are found by their optimizer;
            give those of your own.
        schedule: ``{step: size}``, ``"10:2,20:4"`` or a function of the step; None follows the config server only. A
            size is asked for at its step, and the cluster changes once the new workers are ready; a later entry takes
            the place of one that has not come true by then. Of a dict or text the workers of the next entry are started
            before, so that an entry that comes late enough costs no start (docs/resizing.md).
        wait: stop at a step of the schedule until its size is there, as KungFu does, instead of training meanwhile.
        dataset: the `ElasticDataset` the loop reads. It goes on from the same position at a joiner, and its iterators
            end when training is over for this worker.
        loss_scale_manager: a host-side loss scale manager whose numbers are part of the state.
        components: more state of the program's own, see `ms_kungfu.elastic.state`.
        lr_rule: how the learning rates of all optimizers of ``mindspore.nn`` among `trained` follow the size of the
            cluster: ``"linear"`` multiplies them by size / size at the start, ``"sqrt"`` by its root, a function
            ``(size, start_size) -> factor`` by what it returns. The start is the first `begin` with the optimizer. With
            a dataset that deals shards the sizes are those of the global batch, which the cluster doesn't change.
        averaged: the Parameters and buffers that differ between workers by nature and are averaged over them at each
            change and before a checkpoint; None: the moving means and variances of MindSpore's normalization cells.
            ``()``: none are averaged; when somebody joins all go on with those of the lowest rank.
        checkpoint_dir: folder of the checkpoints (`ms_kungfu.elastic.checkpoint`), which all workers have to give.
        checkpoint_every: steps between them; None writes none.
        keep_checkpoints: how many are kept.
        resume: start from the newest checkpoint in `checkpoint_dir`, on any number of workers; from the beginning where
            there is none. Without it a folder that has checkpoints is refused, lest they be overwritten.
        prepare: called at a worker that joins before it does so, to compile what its first step needs.
        policy: one `Policy` or several, see docs/policies.md. Where they and the schedule want a size, theirs counts.
        monitor: a `Monitor` that measures the steps (docs/monitoring.md); policies have one in any case.
        evict: what sends workers away where a policy wants it: a function of their ranks, called by one worker.
        total_samples: that will have been trained when training ends, for policies; `epochs` knows it by itself.
        asynchronous: whether the workers make their steps without meeting but for a reason, see below; None: where all
            optimizers among `trained` are asynchronous (`PairAveragingOptimizer`).

    Raises:
        ValueError, TypeError: for arguments that don't fit, or don't fit together; at each worker, before anything is
            sent.

    All workers make the same calls in the same order. A worker that joins runs the program from its start: its first
    `begin` returns with the state of the others, and the loop goes on in the epoch, and at the sample, where they are.
    Until then its program must not call collectives other than `sync_net_parameters`.
    A worker that has left finds `should_stop` true, its dataset ended and `step_end` without effect: its loop and its
    program end by themselves, with exit status 0.

    *Asynchronous*: each worker makes its steps at its own speed. They meet, each after its present step, for a change
    of the cluster, an entry of the schedule (which counts once one worker has come to it), a checkpoint, and the end of
    a call; `ms_kungfu.membership.sync_points` has the argument. There all take on the step, the epoch and the
    position in the data of the worker that is furthest. The first to come to its end ends the call for all, so call
    `end` where `epochs` isn't used; the others find `should_stop` true. No two workers that live train the same sample
    in an epoch; what the slower ones hadn't come to is left out. So a ledger, and what takes all workers at every step
    (`policy`, `monitor`, `wait`), is refused: ``asynchronous=False`` has them meet at every step.
    """

    dataset: ElasticDataset | None = None

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
        """Steps done since training started, in all workers' lives."""
        self.first_step = 0
        """The value of `step` when the present call of training began."""
        self.epoch = 0
        """Epochs done in the present call of training."""
        self.should_stop = False
        """This worker has no part in the training any more, or not yet (`begin`), or somebody has asked for a stop."""
        self.before_checkpoint: Callable[[], None] = lambda: None
        """Collective; for who drives the training and has something to agree on that a checkpoint keeps."""
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
        """The size that a policy has asked for where it hasn't come true yet, else the present one."""
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
        """What differs between the workers by nature becomes its mean, so that an evaluation has the same result at
        each. Collective, between steps. Where each worker trains a model of its own, the statistics are that model's:
        call it once the optimizer's `merge` has made the models one."""
        if not runtime.detached() and not is_behind():
            handover.average(self.averaged)

    def begin(self) -> None:
        """Start a call of training; a joiner receives the state here. Collective.

        Where the others are already in a later call (``for ...: model.train(1, ...)``), a joiner has `should_stop` set
        and its dataset suspended until it arrives there. It receives the state in that call's objects; the others wait
        meanwhile.
        """
        runtime.init()
        self._synchronous.doubts.look(self.carried.trained)
        if self._beginning.run():
            if not self.asynchronous:
                self._synchronous.last.watch(self.carried.trained)
            if not self.carries_more:
                self._beside.look(self.carried.trained, self.optimizers, self.parameters)
            self._synchronous.follow()

    def step_end(self, loss: Any = None, samples: int | None = None) -> Change:
        """Count a step, and follow a change of the cluster that is due. Collective, once a step at every worker.

        `loss` (this worker's, a number or a tensor) and `samples` (that this worker has trained in the step; the
        dataset knows it otherwise) are for the monitor and the policies.

        Returns what changed, and whether the step was undone (docs/recovery.md). On return from a change the workers
        that joined have the state, and this one's dataset goes on with its new share.

        Raises, at every worker:
            ResizeError: where a size that was asked for isn't possible; the cluster is as before.
            DivergenceError: where something that has to be equal on all workers isn't.
            ValueError: for a decision of a policy that can't be carried out here.
            KungFuError: where nobody lives who has the training state, or a step can't be undone (docs/recovery.md).
        """
        if self.should_stop:
            return membership.no_change()
        runtime.init()
        program.current().resuming = False
        from ms_kungfu.ops import wait_for_queue  # loads MindSpore, which importing this module doesn't

        # What PyNative mode has queued belongs to this step, and to the membership in which it is done.
        wait_for_queue()
        self.step += 1
        membership.step_ended(self.step)
        chronicle.deaths(self.step)
        self.carried.check_covered()
        self._ahead.look(self.step)
        self._beside.step_end()
        return self._asynchronous.step_end() if self.asynchronous else self._synchronous.step_end(loss, samples)

    def step_begin(self) -> None:
        """What the program has set between the steps (a rate, weights that it clips) belongs to what was before the
        next one, in case that is undone. With an `ElasticDataset` a step begins when it hands out the first batch;
        without one where the `step_end` before returns, unless the loop calls this."""
        self._synchronous.begin()

    def request_stop(self) -> None:
        """Have training end at all workers after the same step. Any worker may ask, alone; `should_stop` is true once
        all know of it, which they do in a `step_end`: asked for before it, training ends with that step; behind it, one
        step later, be that the first of the next epoch.

        Where the workers are asynchronous, end the loop instead: `end` ends it for all.
        """
        self.changes.stop_asked = True

    def agree_on_stop(self) -> bool:
        """Collective at the end of an epoch: whether to stop here because some worker has asked for it.

        Right after a change of the cluster the next step's end tells instead: those who have joined in it may not have
        come to this epoch's end with the others.
        """
        if not self.asynchronous and not self.should_stop:
            self.changes.agree_on_stop()
        return self.should_stop

    def epoch_begin(self) -> None:
        """Tell the policies that an epoch begins; `epochs` does so itself."""
        # A joiner comes to an epoch that the others have begun already.
        if not self.should_stop and not program.current().resuming:
            self._measuring.ask("before_epoch")

    def checkpoint(self) -> None:
        """Have the state as it is written to `checkpoint_dir`, in the background. Collective, between steps.

        ValueError where workers don't step together: there `checkpoint_every` alone writes them.
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
        """The call of training is over: tell the policies, close the monitor's files, look whether the last checkpoint
        was lost with its writer; where the workers are asynchronous, end it for all. Collective. `epochs` does so
        itself.

        Raises DivergenceError, at every worker, where something that has to be equal on all of them isn't."""
        if self.asynchronous:
            self._asynchronous.end()
        elif not runtime.detached() and not is_behind():
            self._checkpoints.make_up(self.step)
        self._measuring.end()
        self.changes.end()

    def check_sameness(self) -> None:
        """Collective, between steps: DivergenceError, at every worker, where something that has to be equal on all of
        them isn't. `end` does so itself; in between each piece is looked at once in a hundred steps."""
        self.changes.check_sameness()

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs of a call of training that are still to do, of `count`: `begin`, then ``range(count)``, at a
        joiner from the epoch in which the others are.

        An epoch whose steps are all trained, and whose end isn't told yet, is one of them: a worker that joins or is
        resumed there gets no batch of it, and does with the others what the program does after an epoch.

        Without a dataset the cluster changes between epochs, and not in the last one: which steps of an epoch a joining
        worker would have to leave out, only the program knows.
        """
        between = self.dataset is None and not self.asynchronous
        self._measuring.expect_epochs(count)
        joins = membership.is_joiner()
        if between:
            self.changes.may_follow = lambda: False  # behind a step
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
        finally:  # the program may leave its loop by `break`, and go on with one of another form
            if between:
                self.changes.may_follow = lambda: True
        self.end()
