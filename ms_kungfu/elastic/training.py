"""Training that goes on while the cluster changes: what `KungFuElasticCallback` drives, and loops of one's own use."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ms_kungfu import runtime
from ms_kungfu.elastic import membership, state
from ms_kungfu.elastic.membership import Change
from ms_kungfu.elastic.policy import Policy, as_policy
from ms_kungfu.elastic.schedule import Schedule, parse_schedule

if TYPE_CHECKING:
    from ms_kungfu.dataset import ElasticDataset
    from ms_kungfu.elastic.policy import Policies
    from ms_kungfu.elastic.steering import Evict, Steering
    from ms_kungfu.monitoring.monitor import Monitor

_log = logging.getLogger(__name__)


class _Process:
    """Where this process is in its program: a joiner runs it from the start while the others are in its middle."""

    calls = 0  # trainings begun, over all ElasticTraining objects
    resume: dict[str, int] | None = None  # the progress a joiner received
    resuming = False  # a joiner has begun where the others are and hasn't trained yet


def is_behind() -> bool:
    """Whether this process joined and has not come to the call of training yet in which the others were then."""
    return _Process.resume is not None and _Process.calls < _Process.resume["call"]


def is_resuming() -> bool:
    """Whether this process is behind, or has just begun in the middle of a call that the others began before."""
    return is_behind() or _Process.resuming


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
            all that training changes.
        schedule: ``{step: size}``, ``"10:2,20:4"`` or a function of the step; None follows the config server only.
        dataset: the `ElasticDataset` the loop reads. It goes on from the same position at a joiner, and its iterators
            end when training is over for this worker.
        loss_scale_manager: a host-side loss scale manager whose numbers are part of the state.
        components: more state of the program's own, see `ms_kungfu.elastic.state`.
        policy: one `Policy` or several, see docs/policies.md. Where they and the schedule want a size, theirs counts.
        monitor: a `Monitor` that measures the steps (docs/monitoring.md); policies have one in any case.
        evict: what sends workers away where a policy wants it: a function of their ranks, called by one worker.
        total_samples: that will have been trained when training ends, for policies; `epochs` knows it by itself.

    All workers make the same calls in the same order. A worker that joins runs the program from its start: its first
    `begin` returns with the state of the others, and the loop goes on in the epoch, and at the sample, where they are.
    Until then its program must not call collectives other than `sync_net_parameters`.
    A worker that has left finds `should_stop` true, its dataset ended and `step_end` without effect: its loop and its
    program end by themselves, with exit status 0.
    """

    def __init__(
        self,
        *trained: Any,
        schedule: Schedule | None = None,
        dataset: ElasticDataset | None = None,
        loss_scale_manager: Any = None,
        components: Sequence[state.Component] = (),
        policy: Policy | Sequence[Policy] | None = None,
        monitor: Monitor | None = None,
        evict: Evict | None = None,
        total_samples: int | None = None,
    ) -> None:
        self._size_after = parse_schedule(schedule)
        self._trained = trained
        self._dataset = dataset
        self._loss_scale_manager = loss_scale_manager
        self._more = tuple(components)
        self._call = 0
        self.step = 0
        """Steps done since training started, in all workers' lives."""
        self.first_step = 0
        """The value of `step` when the present call of training began."""
        self.epoch = 0
        """Epochs done in the present call of training."""
        self.should_stop = False
        """This worker has no part in the training any more, or not yet (see `begin`)."""
        if dataset is not None:
            dataset.driven = True
        self.optimizers = state.collect_optimizers(trained)
        """The optimizers of MindSpore among what is trained; of those in one another the outer one."""
        self.monitor = monitor or next((o.monitor for o in self.optimizers if hasattr(o, "monitor")), None)
        self._steering = self._steered_by(as_policy(policy), evict, total_samples)

    @property
    def dataset(self) -> ElasticDataset | None:
        return self._dataset

    @property
    def parameters(self) -> list[Any]:
        """The Parameters that are kept the same, each once."""
        return state.collect_parameters(self._trained)

    @property
    def components(self) -> list[state.Component]:
        """The rest of the state."""
        carried = [state.Component("progress", self._progress, self._resume)]
        if self._dataset is not None:
            carried.append(state.Component("dataset", self._dataset.state, self._dataset.restore))
        if self._loss_scale_manager is not None:
            carried.append(state.attributes_component("loss_scale", self._loss_scale_manager))
        if self.monitor is not None:
            carried.append(state.Component("monitor", self.monitor.state, self.monitor.restore))
        if self._steering is not None:
            carried.append(state.Component("policies", self._steering.state, self._steering.restore))
        return [*carried, *state.random_components(), *self._more]

    def begin(self) -> None:
        """Start a call of training; a joiner receives the state here. Collective.

        Where the others are already in a later call (``for ...: model.train(1, ...)``), a joiner has `should_stop` set
        and its dataset suspended until it arrives there.
        """
        runtime.init()
        _Process.calls += 1
        self._call = _Process.calls
        self.should_stop = False
        self.epoch = 0
        self.first_step = self.step
        if runtime.detached():
            self._suspend(True)
            return
        if membership.is_joiner():
            state.share_state(self.parameters, self.components)
            _log.info("joined as rank %d of %d", runtime.current_rank(), runtime.current_cluster_size())
        resume = _Process.resume
        if resume is None or self._call > resume["call"]:
            self._suspend(False)
            self._begin_monitor()
            self._ask("before_train")
            self._change_to(self._size_after(0) if self.step == 0 else None)
            self._ask("before_step")
        else:
            self.step, self.first_step, self.epoch = resume["step"], resume["first_step"], resume["epoch"]
            _Process.resuming = True
            self._suspend(is_behind())
            if not self.should_stop:
                self._begin_monitor()
                self._ask("before_step")

    def step_end(self, loss: Any = None, samples: int | None = None) -> Change:
        """Count a step, and follow a change of the cluster that is due. Collective, once a step at every worker.

        `loss` (this worker's, a number or a tensor) and `samples` (that this worker has trained in the step; the
        dataset knows it otherwise) are for the monitor and the policies.

        Returns what changed. On return from a change the workers that joined have the state, and this one's dataset
        goes on with its new share.
        """
        if self.should_stop:
            size = runtime.current_cluster_size()
            return Change(changed=False, detached=runtime.detached(), old_size=size, new_size=size)
        _Process.resuming = False
        from ms_kungfu.ops import wait_for_queue  # loads MindSpore, which importing this module doesn't

        # What PyNative mode has queued belongs to this step, and to the membership in which it is done.
        wait_for_queue()
        self.step += 1
        self._measure(loss, samples)
        if self._dataset is not None:
            self._dataset.commit()
        self._ask("after_step")
        change = self._change_to(self._size_after(self.step))
        if not self.should_stop:
            self._ask("before_step")
        return change

    def epoch_begin(self) -> None:
        """Tell the policies that an epoch begins; `epochs` does so itself."""
        # A joiner comes to an epoch that the others have begun already.
        if not self.should_stop and not _Process.resuming:
            self._ask("before_epoch")

    def epoch_end(self) -> None:
        """Count an epoch; `epochs` does so itself."""
        _Process.resuming = False
        if not self.should_stop:
            self.epoch += 1
            self._ask("after_epoch")

    def end(self) -> None:
        """The call of training is over: tell the policies, close the monitor's files. `epochs` does so itself."""
        if self._steering is not None and not is_behind():
            self._steering.after_train(self)
        if self.monitor is not None:
            self.monitor.end()

    def epochs(self, count: int) -> Iterator[int]:
        """The epochs of a call of training that are still to do, of `count`: `begin`, then ``range(count)``, at a
        joiner from the epoch in which the others are."""
        if self._steering is not None and self._steering.total_samples is None and self._dataset is not None:
            self._steering.total_samples = count * self._dataset.total_samples
        self.begin()
        while self.epoch < count and not self.should_stop:
            self.epoch_begin()
            yield self.epoch
            self.epoch_end()
        self.end()

    def _steered_by(self, policies: Policies, evict: Any, total_samples: int | None) -> Steering | None:
        if not policies.parts:
            return None
        from ms_kungfu.elastic.steering import Steering, check_evict

        if self.monitor is None:
            from ms_kungfu.monitoring.monitor import Monitor

            self.monitor = Monitor(update_ratio_interval=0)
        return Steering(policies, self.monitor, check_evict(evict), total_samples)

    def _begin_monitor(self) -> None:
        if self.monitor is not None:
            self.monitor.begin([p for p in self.parameters if p.requires_grad], self.step)

    def _ask(self, hook: str) -> None:
        if self._steering is not None:
            self._steering.hook(hook, self)

    def _measure(self, loss: Any, samples: int | None) -> None:
        if self.monitor is None:
            return
        from ms_kungfu.elastic.steering import learning_rate_of

        optimizers = self.optimizers
        if samples is None and self._dataset is not None:
            samples = self._dataset.weight
        elif samples is None:
            samples = next((o.device_batch_size for o in optimizers if getattr(o, "device_batch_size", None)), 0)
        self.monitor.gradient_scale = float(getattr(optimizers[0], "loss_scale", 1.0)) if optimizers else 1.0
        record = self.monitor.step_end(samples, loss, learning_rate_of(optimizers, self.step - 1), self.step)
        if self._steering is not None:
            self._steering.stepped(record)

    def _change_to(self, scheduled: int | None) -> Change:
        """Follow what the policies, the schedule or the config server want."""
        began = time.monotonic()
        size = self._steering.take_size() if self._steering is not None else None
        change = self._follow(membership.step(scheduled if size is None else size))
        if change.changed and not change.detached:
            seconds = time.monotonic() - began
            if self._steering is not None:
                self._steering.resized(seconds)
            if self.monitor is not None:
                self.monitor.resized(seconds)
        return change

    def _follow(self, change: Change) -> Change:
        if change.detached:
            _log.info("left the cluster after step %d (%d -> %d workers)", self.step, change.old_size, change.new_size)
            self._suspend(True)
        elif change.changed:
            state.share_state(self.parameters, self.components)
            _log.info("step %d: %d -> %d workers", self.step, change.old_size, change.new_size)
        return change

    def _suspend(self, suspended: bool) -> None:
        self.should_stop = suspended
        if self._dataset is not None:
            self._dataset.suspended = suspended

    def _progress(self) -> dict[str, int]:
        return {"call": self._call, "step": self.step, "first_step": self.first_step, "epoch": self.epoch}

    @staticmethod
    def _resume(progress: dict[str, int]) -> None:
        _Process.resume = progress
