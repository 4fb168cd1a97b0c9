"""Define the base class of policies, which decide how to change training while it runs.

A policy receives the current `Metrics`, and returns None or a `Decision` with a reason.
`ms_kungfu.elastic.policy_runner` carries out decisions. Policies are pure: they use no clock, no
cluster and no MindSpore. See docs/policies.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Metrics:
    """The measurements that a policy receives.

    Times are in seconds. None means that a value isn't known (yet).
    """

    step: int = 0
    """Number of steps done since training started."""
    epoch: int = 0
    """Number of epochs done in the current training call."""
    cluster_size: int = 1
    """The number of workers."""
    batch_size: int = 0
    """Number of samples in a step, over all workers."""
    holds_global_batch: bool = False
    """Whether the batch size stays the same at a resize. If not, it is proportional to the cluster size."""
    trained_samples: int = 0
    """Number of samples on which all workers have trained since training started."""
    total_samples: int | None = None
    """Number of samples on which all workers will have trained when training ends."""
    steps_at_size: int = 0
    """Number of steps since the cluster last changed. The first steps are slow, because they compile."""
    step_time: float | None = None
    """Duration of the last measured step."""
    compute_times: tuple[float, ...] = ()
    """For each worker, the computation time of its last measured step, without communication."""
    communication_time: float | None = None
    """Time for which the step waits for communication. Waiting for late workers doesn't count."""
    gradient_noise_scale: float | None = None
    """The noise scale in samples; infinite if noise hides the gradient."""
    noise_scale_steps: int = 0
    """Number of measurements in the noise scale."""
    loss: float | None = None
    """Mean loss over the workers, weighted by their samples, if the program reports a loss."""
    learning_rate: float | None = None
    """The optimizer's learning rate at the last measured step."""
    training_time: float = 0.0
    """Time since training started, including resizes."""
    resize_time: float | None = None
    """Time by which the last change of the cluster delayed training."""
    shards: int | None = None
    """Number of shards in a full step (docs/shards.md); None if training doesn't use shards."""

    @property
    def local_batch_size(self) -> float:
        """Number of samples per worker in a step."""
        return self.batch_size / self.cluster_size


@dataclass(frozen=True)
class Decision:
    """The changes that a policy decides on, and their reason.

    A field that is None, or an empty `evict`, changes nothing.

    Args:
        reason: why the policy has made this decision, as text that isn't empty.

    Raises:
        ValueError: if the reason is empty, a value is out of range, or two values can't be combined.
    """

    reason: str
    size: int | None = None
    """The new number of workers. The cluster changes as soon as the new workers are ready. Until then,
    the policies are still called at each step."""
    keeps_local_batch: bool | None = None
    """Whether each worker keeps its batch size when the cluster changes to `size`. Requires `size`.

    If the dataset has a fixed global batch, that batch changes in proportion as soon as the cluster has
    the new size. With shards, the number of shards changes, but not their shape.
    """
    global_batch_size: int | None = None
    """The new number of samples in a step, over all workers. The number is the same at every cluster size."""
    local_batch_size: int | None = None
    """The new number of samples per worker in a step.

    The global batch is then proportional to the cluster size.
    """
    learning_rate: float | None = None
    """The new constant rate, which replaces the current rate or the rest of the optimizer's list of rates."""
    strategy: str | None = None
    """The new strategy of the collectives, by its name in KungFu."""
    optimizer: str | None = None
    """The argument with which ``optimizer.switch_to`` is called."""
    evict: tuple[int, ...] = ()
    """The ranks to evict."""
    shards: int | None = None
    """The new number of shards in a full step, from the next step on.

    Requires `global_batch_size`. If `shards` is None, the number doesn't change.
    """

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason:
            raise ValueError("the reason of a decision is empty; give a string")
        for name in ("size", "global_batch_size", "local_batch_size", "shards"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} must be an integer of 1 or more, got {value!r}")
        if self.global_batch_size is not None and self.local_batch_size is not None:
            raise ValueError(
                "a decision can't set both global_batch_size and local_batch_size, got "
                f"{self.global_batch_size} and {self.local_batch_size}"
            )
        if self.shards is not None and self.global_batch_size is None:
            raise ValueError("a decision with shards needs global_batch_size")
        if self.keeps_local_batch and self.size is None:
            raise ValueError("a decision with keeps_local_batch needs size")
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"learning_rate must be a number of 0 or more, got {rate!r}")
        if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in self.evict):
            raise ValueError(f"evict must contain only ranks (integers of 0 or more), got {self.evict!r}")

    @property
    def changes(self) -> dict[str, Any]:
        """The values that the decision changes, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "reason"}
        return {name: value for name, value in found.items() if value not in (None, ())}

    def to_json(self) -> dict[str, Any]:
        """Return the reason and the changes as JSON."""
        return {"reason": self.reason, **self.changes}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Decision:
        """Return the decision from which `to_json` made `document`."""
        return cls(**{**document, "evict": tuple(document.get("evict", ()))})


class Policy:
    """The base class of policies: override the hooks that you need.

    Each hook returns a `Decision` or None. Every worker calls the hooks with the same metrics, and all
    workers carry out the lowest rank's decision. If a policy has state, override `state` and `restore`,
    which transfer the state to a joining worker.
    """

    def before_train(self, q: Metrics) -> Decision | None:
        """Return a decision when a training call begins, given the metrics `q`."""

    def before_epoch(self, q: Metrics) -> Decision | None:
        """Return a decision when an epoch begins, given the metrics `q`.

        In the first epoch, `before_train` is called before this hook.
        """

    def before_step(self, q: Metrics) -> Decision | None:
        """Return a decision before the next step, given the metrics `q`.

        If the cluster changes before a step, this hook is called after the change, so its decision
        can't change the cluster for that step.
        """

    def after_step(self, q: Metrics) -> Decision | None:
        """Return a decision after a step, given the metrics `q`.

        The decision takes effect in one of the next steps.
        """

    def after_epoch(self, q: Metrics) -> Decision | None:
        """Return a decision after an epoch, given the metrics `q`.

        For the epoch's last step, `after_step` is called before this hook.
        """

    def after_train(self, q: Metrics) -> None:
        """Clean up when a training call has ended on this worker, given the metrics `q`."""

    def state(self) -> Any:
        """Return the state that a joining worker needs to make the same decisions, as JSON."""
        return None

    def restore(self, state: Any) -> None:
        """Continue from another worker's `state`."""


HOOKS = ("before_train", "before_epoch", "before_step", "after_step", "after_epoch", "after_train")


@dataclass
class Policies(Policy):
    """Combine several policies into one.

    If two policies change the same value, the first policy in the list decides that value. The
    other policy's changes to other values are still carried out.

    Args:
        parts: the policies, in descending order of priority.
    """

    parts: Sequence[Policy] = field(default_factory=tuple)

    def decide(self, hook: str, q: Metrics) -> Decision | None:
        """Call a hook of each policy, and return the combined decision.

        Args:
            hook: the name of the hook.
            q: the current metrics.
        """
        made = []
        for part in self.parts:
            decision = getattr(part, hook)(q)
            if decision is not None:
                made.append(replace(decision, reason=f"{type(part).__name__}: {decision.reason}"))
        return combine(made)

    def before_train(self, q: Metrics) -> Decision | None:
        """Return the policies' combined decision, given the metrics `q`."""
        return self.decide("before_train", q)

    def before_epoch(self, q: Metrics) -> Decision | None:
        """Return the policies' combined decision, given the metrics `q`."""
        return self.decide("before_epoch", q)

    def before_step(self, q: Metrics) -> Decision | None:
        """Return the policies' combined decision, given the metrics `q`."""
        return self.decide("before_step", q)

    def after_step(self, q: Metrics) -> Decision | None:
        """Return the policies' combined decision, given the metrics `q`."""
        return self.decide("after_step", q)

    def after_epoch(self, q: Metrics) -> Decision | None:
        """Return the policies' combined decision, given the metrics `q`."""
        return self.decide("after_epoch", q)

    def after_train(self, q: Metrics) -> None:
        """Call each policy's `after_train` with the metrics `q`."""
        self.decide("after_train", q)

    def state(self) -> Any:
        """Return the states of all policies, as JSON."""
        return [part.state() for part in self.parts]

    def restore(self, state: Any) -> None:
        """Restore each policy from another worker's `state`."""
        for part, kept in zip(self.parts, state):
            part.restore(kept)


def combine(decisions: Iterable[Decision]) -> Decision | None:
    """Combine several decisions into one. If several decisions change the same value, the first decision applies."""
    changes: dict[str, Any] = {}
    reasons = []
    for decision in decisions:
        wanted = decision.changes
        if "global_batch_size" in changes or "local_batch_size" in changes:
            for name in ("global_batch_size", "local_batch_size", "shards"):
                wanted.pop(name, None)
        # An eviction and a new size both change the membership, so only the first of the two is carried out.
        if "size" in changes or "evict" in changes:
            for name in ("size", "keeps_local_batch", "evict"):
                wanted.pop(name, None)
        new = {name: value for name, value in wanted.items() if name not in changes}
        if new:
            changes.update(new)
            reasons.append(decision.reason)
    return Decision("; ".join(reasons), **changes) if changes else None


def as_policy(policy: Policy | Sequence[Policy] | None) -> Policies:
    """Convert one policy, or a list of policies, to `Policies`. Raise TypeError for anything else."""
    if isinstance(policy, Policies):
        policy = policy.parts
    elif policy is None or isinstance(policy, Policy):
        policy = () if policy is None else (policy,)
    if not isinstance(policy, (tuple, list)) or not all(isinstance(part, Policy) for part in policy):
        raise TypeError(f"policy must be a ms_kungfu.elastic.Policy or a list of them, got {policy!r}")
    return Policies(tuple(policy))
