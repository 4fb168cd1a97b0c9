"""Carries out what policies decide. Driven by `ElasticTraining`."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any, Callable, Protocol

import numpy as np

from ms_kungfu import env, membership, runtime
from ms_kungfu.agreement import gather_living, told_by_lowest
from ms_kungfu.elastic.policy import HOOKS, Decision, Policies, Policy, Quantities

if TYPE_CHECKING:
    from ms_kungfu.dataset import ElasticDataset
    from ms_kungfu.monitoring.monitor import Monitor
    from ms_kungfu.monitoring.record import StepRecord

_log = logging.getLogger(__name__)

Evict = Callable[[Sequence[int]], None]

# Workers of one host reduce in shared memory, which has no topology to choose.
_STRATEGIES = ("AUTO", "SHM")


class Steered(Protocol):
    """What policies see of a training, and change about it."""

    step: int
    epoch: int
    optimizers: list[Any]

    @property
    def dataset(self) -> ElasticDataset | None: ...


@dataclass(frozen=True)
class _Eviction:
    """Workers that are to leave, and who has asked for it, by their uids. The same at all workers."""

    job: str | None
    version: int  # of the cluster in which they were there
    sender: int
    leaving: list[int]


class Steering:
    """Asks the policies, agrees on the answer with the other workers, and does what it says.

    Every worker asks its own policies, so that any of them can go on if others leave; the lowest rank's answer counts.
    """

    def __init__(self, policies: Policies, monitor: Monitor, evict: Evict | None, total_samples: int | None) -> None:
        self.policies = policies
        self.monitor = monitor
        self.total_samples = total_samples
        self._evict = evict
        self._asked = tuple(
            hook
            for hook in HOOKS
            if any(getattr(type(part), hook) is not getattr(Policy, hook) for part in policies.parts)
        )
        self._wanted_size: int | None = None  # decided and not passed on yet
        self._pending_size: int | None = None  # passed on and not come true yet
        self._keeps_local_batch = False  # when the size that was decided on comes true
        self._steps_at_size = 0
        self._eviction: _Eviction | None = None
        self._began = time.monotonic()
        self._resize_time: float | None = None
        self._step_time: float | None = None  # before the change

    def state(self) -> dict[str, Any]:
        return {
            "policies": self.policies.state(),
            "time": time.monotonic() - self._began,
            "resize_time": self._resize_time,
            "size": self._wanted_size,
            "pending": self._pending_size,
            "keeps_local_batch": self._keeps_local_batch,
            "total_samples": self.total_samples,
            "eviction": None if self._eviction is None else list(astuple(self._eviction)),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.policies.restore(state["policies"])
        self._began = time.monotonic() - state["time"]
        self._resize_time, self._wanted_size = state["resize_time"], state["size"]
        self._pending_size, self._keeps_local_batch = state["pending"], state["keeps_local_batch"]
        self.total_samples = state["total_samples"]
        held = state.get("eviction")  # not in files of older versions, and in some with host and port
        self._eviction = None
        if held is not None and held[0] == env.BROKER.get():  # else a checkpoint's, of other processes
            self._eviction = _Eviction(*held)

    def stepped(self, record: StepRecord | None) -> None:
        """A step is done, and measured where there is a record."""
        self._steps_at_size += 1
        if record is None:
            return
        if self._steps_at_size == 1 and self._resize_time is not None and self._step_time is not None:
            # The first step in a new cluster compiles, at a joiner or everywhere: part of what the change has cost.
            self._resize_time += max(0.0, record.seconds - self._step_time)
        self._step_time = record.seconds

    def comes_true(self, old_size: int, new_size: int, dataset: ElasticDataset | None) -> None:
        """The cluster has changed, and its state isn't shared yet. At all members that go on."""
        follows = self._keeps_local_batch and new_size == self._pending_size
        if follows and dataset is not None and dataset.holds_global_batch:
            batch = max(1, round(dataset.global_batch_size * new_size / old_size))
            dataset.set_batch_size(global_batch_size=batch)

    def resized(self, seconds: float) -> None:
        """The cluster has changed, which held up training for so long."""
        self._steps_at_size = 0
        self._resize_time = seconds
        self._pending_size, self._keeps_local_batch = None, False

    def take_size(self) -> int | None:
        """The size that has been decided on since the last call."""
        size, self._wanted_size = self._wanted_size, None
        if size is not None:
            self._pending_size = size
        return size

    @property
    def pending_size(self) -> int | None:
        """The size that was decided on and hasn't come true yet."""
        return self._pending_size

    def hook(self, hook: str, training: Steered) -> None:
        """Ask the policies and do what they say; a new size is left for `take_size`. Collective.

        Raises ValueError, at every worker, for a decision that can't be carried out here.
        """
        if hook not in self._asked:
            return
        self._renew_eviction()
        decision = self.policies.decide(hook, self.quantities(training))
        if decision is not None and decision.size is not None:
            # Policies go on asking while the new workers get ready.
            there = runtime.current_cluster_size() if self._pending_size is None else self._pending_size
            if decision.size == there:
                decision = replace(decision, size=None, keeps_local_batch=None)
        decision, decider = agree(decision)
        if decision is None or not decision.changes:
            return
        level = logging.INFO if runtime.current_rank() == 0 else logging.DEBUG  # all would say the same
        _log.log(level, "step %d: %s: %s", training.step, describe(decision), decision.reason)
        self._check(decision, training)
        if decision.size is not None:
            self._wanted_size = decision.size
            self._keeps_local_batch = bool(decision.keeps_local_batch)
        if training.dataset is not None and (decision.global_batch_size or decision.local_batch_size):
            training.dataset.set_batch_size(decision.local_batch_size, decision.global_batch_size)
        if decision.learning_rate is not None:
            for optimizer in training.optimizers:
                set_learning_rate(optimizer, decision.learning_rate)
        if decision.optimizer is not None:
            for optimizer in training.optimizers:
                if hasattr(optimizer, "switch_to"):
                    optimizer.switch_to(decision.optimizer)
        if decision.evict:
            uids = _uids()
            leaving = [uids[rank] for rank in decision.evict if rank in uids]
            self._eviction = _Eviction(env.BROKER.get(), membership.cluster_version(), uids.get(decider, 0), leaving)
            if runtime.current_rank() == decider:
                self._send_away(decision.evict)

    def after_train(self, training: Steered) -> None:
        """Tell the policies that a call of training has ended. Not collective: those who left are told as well."""
        self.policies.after_train(self.quantities(training))

    def quantities(self, training: Steered) -> Quantities:
        record, dataset = self.monitor.last, training.dataset
        if dataset is not None:
            batch = dataset.global_batch_size
        else:
            batch = 0 if record is None else record.batch_size
        common: dict[str, Any] = {
            "step": training.step,
            "epoch": training.epoch,
            "cluster_size": runtime.current_cluster_size(),
            "batch_size": batch,
            "holds_global_batch": dataset is not None and dataset.holds_global_batch,
            "trained_samples": self.monitor.trained_samples,
            "total_samples": self.total_samples,
            "steps_at_size": self._steps_at_size,
            "gradient_noise_scale": self.monitor.noise_scale.noise_scale,
            "noise_scale_steps": self.monitor.noise_scale.steps,
            "training_time": time.monotonic() - self._began,
            "resize_time": self._resize_time,
        }
        if record is None or self._steps_at_size == 0:  # what was measured is another cluster's
            return Quantities(**common)
        return Quantities(
            **common,
            step_time=record.seconds,
            compute_times=record.compute_seconds,
            communication_time=min(record.communication_seconds, record.exposed_seconds),
            loss=record.loss,
            learning_rate=record.learning_rate,
        )

    @staticmethod
    def _check(decision: Decision, training: Steered) -> None:
        size = runtime.current_cluster_size()
        if decision.strategy is not None and decision.strategy.upper() not in _STRATEGIES:
            raise ValueError(
                f"a policy asked for strategy {decision.strategy!r}; workers of one host reduce in shared memory, "
                f"which has no topology to choose: {' or '.join(_STRATEGIES)}"
            )
        if training.dataset is None and (decision.global_batch_size or decision.local_batch_size):
            raise ValueError(
                f"a policy asked for another batch ({describe(decision)}), which needs an ElasticDataset; give one to "
                "ElasticTraining or Model.train"
            )
        if decision.learning_rate is not None and not training.optimizers:
            raise ValueError("a policy asked for a learning rate, but no optimizer is among what is trained")
        if decision.optimizer is not None and not any(hasattr(o, "switch_to") for o in training.optimizers):
            raise ValueError(
                f"a policy asked for the optimizer {decision.optimizer!r}, but no optimizer here can switch; train "
                "with AdaptiveSGDOptimizer"
            )
        if any(rank >= size for rank in decision.evict):
            raise ValueError(f"a policy asked to evict the ranks {list(decision.evict)} of {size} workers")

    def _renew_eviction(self) -> None:
        """Collective, before the first question in a new cluster, as joiners have got what the others hold: where the
        worker that asked for an eviction is gone, it may have died before, and the lowest rank asks again. Who is asked
        for twice leaves once."""
        held = self._eviction
        if held is None or held.version == membership.cluster_version():
            return
        uids = _uids()
        ranks = [rank for rank, uid in uids.items() if uid in held.leaving]
        asks_again = bool(ranks) and held.sender not in uids.values()
        sender = uids[min(uids)] if asks_again else held.sender
        leaving = [uids[rank] for rank in ranks]
        self._eviction = _Eviction(held.job, membership.cluster_version(), sender, leaving) if ranks else None
        if asks_again and runtime.current_rank() == min(uids):
            self._send_away(ranks)

    def _send_away(self, ranks: Sequence[int]) -> None:
        try:
            if self._evict is not None:
                self._evict(ranks)
            else:
                for rank in ranks:
                    membership.evict(rank)
        except Exception as error:  # the others don't know of it and would wait for this worker
            _log.error("can't evict the ranks %s: %s: %s", list(ranks), type(error).__name__, error)


def _uids() -> dict[int, int]:
    """Collective: the living ranks' processes. Addresses won't do: they are used again."""
    return {
        rank: int(uid[0]) for rank, uid in gather_living(np.array([membership.uid()]), "kungfu/policy/uids").items()
    }


def agree(mine: Decision | None) -> tuple[Decision | None, int]:
    """Collective: the decision of the lowest living rank, at every worker, and which rank that is."""
    if runtime.current_cluster_size() == 1:
        return mine, 0
    told, decider = told_by_lowest("" if mine is None else json.dumps(mine.to_json()), "kungfu/policy")
    return Decision.from_json(json.loads(told)) if told else None, decider


def describe(decision: Decision) -> str:
    """ "size 4, learning_rate 0.1" """
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in decision.changes.items()
    )


def set_learning_rate(optimizer: Any, rate: float) -> None:
    """Another learning rate from now on, in place: compiled graphs stay valid. Instead of what is left of a list.

    ValueError for a schedule of MindSpore's and for groups with rates of their own, which no number can replace.
    """
    import mindspore as ms

    held = optimizer.learning_rate
    inner = held if isinstance(held, ms.Parameter) else getattr(held, "learning_rate", None)
    if not isinstance(inner, ms.Parameter):
        raise ValueError(
            f"a policy asked for the learning rate {rate:g}, but {type(optimizer).__name__} has "
            f"{'groups of parameters' if isinstance(held, (tuple, list, ms.nn.CellList)) else 'a schedule'} with rates "
            "of their own; give it a number or a list"
        )
    ms.ops.assign(inner, ms.Tensor(np.full(inner.shape, rate), dtype=inner.dtype))


def learning_rate_of(optimizers: Iterable[Any], step: int) -> float | None:
    """The first optimizer's rate in step number `step`, from 0; None where it has a schedule or groups."""
    import mindspore as ms

    for optimizer in optimizers:
        held = optimizer.learning_rate
        inner = held if isinstance(held, ms.Parameter) else getattr(held, "learning_rate", None)
        if isinstance(inner, ms.Parameter):
            values = inner.asnumpy().ravel()
            return float(values[min(step, values.size - 1)])
        return None
    return None


def check_evict(evict: Any) -> Evict | None:
    if evict is not None and not callable(evict):
        raise TypeError(f"evict is a function of the ranks that shall leave, got {evict!r}")
    return evict
