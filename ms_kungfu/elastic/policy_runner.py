"""Call the policies for `ElasticTraining`, agree on a decision with the other workers, and carry it out."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import replace
from typing import Any

from ms_kungfu import env, membership, runtime
from ms_kungfu.agreement import told_by_lowest
from ms_kungfu.dataset.dealing import MOST_SHARDS
from ms_kungfu.dataset.shares import Shares
from ms_kungfu.elastic.eviction import Evict, Evictions
from ms_kungfu.elastic.policy import HOOKS, Decision, Metrics, Policies, Policy
from ms_kungfu.elastic.program import Training
from ms_kungfu.monitoring.monitor import Monitor
from ms_kungfu.monitoring.record import StepRecord

_log = logging.getLogger(__name__)

# Workers on one host reduce in shared memory, which has only one topology.
_STRATEGIES = ("AUTO", "SHM")


class PolicyRunner:
    """Call the policies, agree on a decision with the other workers, and carry it out.

    Every worker calls its own policies, so that the remaining workers can continue if others leave. All workers carry
    out the lowest rank's decision.
    """

    def __init__(self, policies: Policies, monitor: Monitor, evict: Evict | None, total_samples: int | None) -> None:
        self.policies = policies
        self.monitor = monitor
        self.total_samples = total_samples
        self._evictions = Evictions(evict)
        self._asked = {  # the hooks that at least one policy overrides
            hook for hook in HOOKS for part in policies.parts if getattr(type(part), hook) is not getattr(Policy, hook)
        }
        self._wanted_size: int | None = None  # a size that a policy has chosen and that hasn't been requested yet
        self.pending_size: int | None = None
        """The size that was requested since the last change of the cluster. The next change sets it to None."""
        # (chosen size, previous size) if each worker is to keep its local batch when the cluster gets the chosen size.
        # The pair applies until the cluster has the chosen size, or a policy chooses another size.
        self._keeping: tuple[int, int] | None = None
        self._steps_at_size = 0
        self._began = time.monotonic()
        self._resize_time: float | None = None
        self._step_time: float | None = None  # duration of the last measured step

    def state(self) -> dict[str, Any]:
        return {
            "policies": self.policies.state(),
            "time": time.monotonic() - self._began,
            "resize_time": self._resize_time,
            "size": self._wanted_size,
            "pending": self.pending_size,
            "keeping": self._keeping,
            "job": env.JOB.get(),
            "total_samples": self.total_samples,
            "eviction": self._evictions.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.policies.restore(state["policies"])
        self._began = time.monotonic() - state["time"]
        self._resize_time, self._wanted_size, self.pending_size = state["resize_time"], state["size"], state["pending"]
        keeping = state.get("keeping")  # checkpoints of older versions don't have this entry
        self._keeping = None if keeping is None else (keeping[0], keeping[1])
        # This job doesn't know requests of an earlier job, so request the size again.
        if self.pending_size is not None and state.get("job") != env.JOB.get():
            self._wanted_size, self.pending_size = self._wanted_size or self.pending_size, None
        self.total_samples = state["total_samples"]
        self._evictions.restore(state.get("eviction"))

    def stepped(self, record: StepRecord | None) -> None:
        """Count a step. `record` contains its measurements; it is None if the step wasn't measured."""
        self._steps_at_size += 1
        if record is None:
            return
        if self._steps_at_size == 1 and self._resize_time is not None and self._step_time is not None:
            # In the first step of a new cluster, some workers compile. The cost of the change includes that time.
            self._resize_time += max(0.0, record.seconds - self._step_time)
        self._step_time = record.seconds

    def on_resized(self, new_size: int, dataset: Shares | None) -> None:
        """Adjust the global batch after a change of the cluster. Called on all workers that remain.

        This method is called before the state transfer, so that joining workers receive the adjusted batch.
        """
        self.pending_size = None
        if self._keeping is None or self._keeping[0] != new_size:
            return
        _, from_size = self._keeping
        self._keeping = None
        if dataset is not None and dataset.holds_global_batch:
            # With shards, round the batch to whole shards, so that no worker has to compile another shape.
            unit = 1 if dataset.shards is None else dataset.global_batch_size // dataset.shards
            count = max(1, round(dataset.global_batch_size // unit * new_size / from_size))
            if dataset.shards is not None:
                count = min(count, MOST_SHARDS)
            dataset.set_batch_size(global_batch_size=unit * count, shards=None if dataset.shards is None else count)

    def took(self, seconds: float) -> None:
        """Record how long the last change of the cluster delayed training."""
        self._steps_at_size = 0
        self._resize_time = seconds

    def take_size(self) -> int | None:
        """Return the size that a policy has chosen since the last call of this method; None if there is none."""
        size, self._wanted_size = self._wanted_size, None
        if size is not None:
            self.pending_size = size
        return size

    def hook(self, hook: str, training: Training) -> None:
        """Call the policies' hook `hook` and carry out their decision (collective).

        If the policies choose a new size, this method only records the size for `take_size`.

        Raises:
            ValueError: on every worker, if the decision can't be carried out in this training.
        """
        if hook not in self._asked:
            return
        self._evictions.renew()
        decision = self.policies.decide(hook, self.metrics(training))
        if decision is not None and decision.size is not None:
            # A policy may repeat its decision while the launcher starts the new workers.
            there = runtime.current_cluster_size() if self.pending_size is None else self.pending_size
            if decision.size == there:
                decision = replace(decision, size=None, keeps_local_batch=None)
        decision, decider = agree(decision)
        if decision is None or not decision.changes:
            return
        # The line is the same on all workers, so only rank 0 logs it at level INFO.
        level = logging.INFO if runtime.current_rank() == 0 else logging.DEBUG
        _log.log(level, 'policy: %s step=%d reason="%s"', describe(decision), training.step, decision.reason)
        if membership.speaks_for_all():
            membership.report("policy_decided", changes=describe(decision), step=training.step, reason=decision.reason)
        self._check(decision, training)
        if decision.size is not None:
            self._wanted_size = decision.size
            self._keeping = (decision.size, runtime.current_cluster_size()) if decision.keeps_local_batch else None
        if training.dataset is not None and (decision.global_batch_size or decision.local_batch_size):
            training.dataset.set_batch_size(decision.local_batch_size, decision.global_batch_size, decision.shards)
        if decision.learning_rate is not None:
            from ms_kungfu.elastic.learning_rates import set_learning_rate  # loads MindSpore

            for optimizer in training.optimizers:
                set_learning_rate(optimizer, decision.learning_rate)
        if decision.optimizer is not None:
            for optimizer in training.optimizers:
                if hasattr(optimizer, "switch_to"):
                    optimizer.switch_to(decision.optimizer)
        if decision.evict:
            self._evictions.order(decision.evict, decider)

    def after_train(self, training: Training) -> None:
        """Call the policies' hook `after_train`. Not collective, because workers that have left also call it."""
        self.policies.after_train(self.metrics(training))

    def metrics(self, training: Training) -> Metrics:
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
            "shards": None if dataset is None else dataset.shards,
            "trained_samples": self.monitor.trained_samples,
            "total_samples": self.total_samples,
            "steps_at_size": self._steps_at_size,
            "gradient_noise_scale": self.monitor.noise_scale.noise_scale,
            "noise_scale_steps": self.monitor.noise_scale.steps,
            "training_time": time.monotonic() - self._began,
            "resize_time": self._resize_time,
        }
        if record is None or self._steps_at_size == 0:  # the last measurements were made in the previous cluster
            return Metrics(**common)
        return Metrics(
            **common,
            step_time=record.seconds,
            compute_times=record.compute_seconds,
            communication_time=min(record.communication_seconds, record.exposed_seconds),
            loss=record.loss,
            learning_rate=record.learning_rate,
        )

    @staticmethod
    def _check(decision: Decision, training: Training) -> None:
        size = runtime.current_cluster_size()
        if decision.strategy is not None and decision.strategy.upper() not in _STRATEGIES:
            raise ValueError(
                f"a policy asked for strategy {decision.strategy!r}, but the workers on a host reduce in shared "
                f"memory, which has only one topology; use {' or '.join(_STRATEGIES)}"
            )
        if training.dataset is None and (decision.global_batch_size or decision.local_batch_size):
            raise ValueError(
                f"a policy asked for another batch size ({describe(decision)}), which requires an ElasticDataset; pass "
                "an ElasticDataset to ElasticTraining or Model.train"
            )
        if decision.learning_rate is not None and not training.optimizers:
            raise ValueError(
                "a policy asked for a learning rate, but none of the objects passed to the training is an optimizer"
            )
        if decision.optimizer is not None and not any(hasattr(o, "switch_to") for o in training.optimizers):
            raise ValueError(
                f"a policy asked for the optimizer {decision.optimizer!r}, but no trained optimizer can switch; train "
                "with AdaptiveSGDOptimizer"
            )
        if any(rank >= size for rank in decision.evict):
            raise ValueError(
                f"a policy asked to evict the ranks {list(decision.evict)}, but the cluster's size is {size}"
            )


def agree(mine: Decision | None) -> tuple[Decision | None, int]:
    """Return the lowest living rank's decision, and the number of that rank (collective).

    Every worker gets the same result.
    """
    if runtime.current_cluster_size() == 1:
        return mine, 0
    told, decider = told_by_lowest("" if mine is None else json.dumps(mine.to_json()), "kungfu/policy")
    return Decision.from_json(json.loads(told)) if told else None, decider


def describe(decision: Decision) -> str:
    """Return a decision's changes as text, e.g. "size=4 learning_rate=0.1"."""

    def text(value: object) -> str:
        if isinstance(value, tuple):
            return ",".join(map(str, value))
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    return " ".join(f"{name}={text(value)}" for name, value in decision.changes.items())
