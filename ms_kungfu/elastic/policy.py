"""Policies: from measurements of a training to changes of it.

Pure: no clock, no cluster, no MindSpore. A policy gets the `Metrics` of the moment. It returns a
`Decision`, which always has a reason, or None. `ms_kungfu.elastic.policy_runner` carries decisions
out. See docs/policies.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Metrics:
    """What a policy knows.

    Times are in seconds. None stands for what isn't known (yet).
    """

    step: int = 0
    """Steps done since training started."""
    epoch: int = 0
    """Epochs done in the present call of training."""
    cluster_size: int = 1
    """The number of workers."""
    batch_size: int = 0
    """Samples of a step, of all workers together."""
    holds_global_batch: bool = False
    """Whether the batch stays the same when the cluster changes; else it grows and shrinks with it."""
    trained_samples: int = 0
    """Samples trained since training started, of all workers."""
    total_samples: int | None = None
    """Samples that will have been trained when training ends."""
    steps_at_size: int = 0
    """Steps done since the cluster last changed. The first ones are slow: new shapes are compiled."""
    step_time: float | None = None
    """Duration of the last measured step."""
    compute_times: tuple[float, ...] = ()
    """Of each worker, the part of the step outside of communication."""
    communication_time: float | None = None
    """The part of a step that communication takes without any late worker, as far as it isn't hidden."""
    gradient_noise_scale: float | None = None
    """In samples; infinite if noise hides the gradient."""
    noise_scale_steps: int = 0
    """How many measurements the noise scale is made of."""
    loss: float | None = None
    """Mean over the workers, weighted by their samples, if the program gives it."""
    learning_rate: float | None = None
    """The optimizer's, at the last measured step."""
    training_time: float = 0.0
    """Time since training started, resizes included."""
    resize_time: float | None = None
    """For how long the last change of the cluster delayed training."""
    shards: int | None = None
    """How many shards a full step has (docs/shards.md). None: each worker trains its part of the batch in
    one."""

    @property
    def local_batch_size(self) -> float:
        """Samples of a worker in a step."""
        return self.batch_size / self.cluster_size


@dataclass(frozen=True)
class Decision:
    """What to change, and why.

    A value of None, or an empty `evict`, changes nothing.

    Args:
        reason: a text that isn't empty.

    Raises:
        ValueError: for an empty reason, a value outside of its range, or values that don't go together.
    """

    reason: str
    size: int | None = None
    """The number of workers, which come when they are ready; until then policies are called as before."""
    keeps_local_batch: bool | None = None
    """With `size`: a dataset that holds its global batch changes it in proportion, when the cluster has
    the new size. With shards it has more or fewer of them, of the same shape."""
    global_batch_size: int | None = None
    """Samples of a step, of all workers together: the dataset holds them at any size of the cluster."""
    local_batch_size: int | None = None
    """Samples of a step at each worker, so that all together follow the size of the cluster."""
    learning_rate: float | None = None
    """Instead of the present one, or of the rest of the optimizer's list of rates."""
    strategy: str | None = None
    """Of the collectives, by KungFu's name."""
    optimizer: str | None = None
    """What ``optimizer.switch_to`` takes."""
    evict: tuple[int, ...] = ()
    """Ranks to evict."""
    shards: int | None = None
    """With `global_batch_size`: how many shards a full step has, from the next one on; else as many as
    before."""

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason:
            raise ValueError("a decision has a reason: a text that isn't empty")
        for name in ("size", "global_batch_size", "local_batch_size", "shards"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is an integer of 1 or more, got {value!r}")
        if self.global_batch_size is not None and self.local_batch_size is not None:
            raise ValueError(
                "a decision sets global_batch_size or local_batch_size, not both, got "
                f"{self.global_batch_size} and {self.local_batch_size}"
            )
        if self.shards is not None and self.global_batch_size is None:
            raise ValueError("shards goes with the global_batch_size that they are parts of")
        if self.keeps_local_batch and self.size is None:
            raise ValueError("keeps_local_batch goes with a size")
        rate = self.learning_rate
        if rate is not None and not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"learning_rate is a number of 0 or more, got {rate!r}")
        if any(isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 for rank in self.evict):
            raise ValueError(f"evict holds ranks, got {self.evict!r}")

    @property
    def changes(self) -> dict[str, Any]:
        """What it changes, by name."""
        found = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "reason"}
        return {name: value for name, value in found.items() if value not in (None, ())}

    def to_json(self) -> dict[str, Any]:
        """Return the reason and the changes as JSON."""
        return {"reason": self.reason, **self.changes}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Decision:
        """Make a decision of what `to_json` has returned, the `document`."""
        return cls(**{**document, "evict": tuple(document.get("evict", ()))})


class Policy:
    """Base of policies: override the hooks you need; each returns a Decision or None.

    The hooks are called at every worker, with the same metrics, and all workers do what the lowest rank
    decides. A policy that remembers something gives it to a joining worker by `state` and `restore`.
    """

    def before_train(self, q: Metrics) -> Decision | None:
        """Return what to change as a call of training begins, by the metrics `q`."""

    def before_epoch(self, q: Metrics) -> Decision | None:
        """Return what to change as an epoch begins, by the metrics `q`.

        The first epoch begins after `before_train`.
        """

    def before_step(self, q: Metrics) -> Decision | None:
        """Return what to change before the next step, by the metrics `q`.

        The hook is called in the cluster that will train the step, and can't change it any more.
        """

    def after_step(self, q: Metrics) -> Decision | None:
        """Return what to change after a step, by the metrics `q`.

        The decision counts from one of the next steps on.
        """

    def after_epoch(self, q: Metrics) -> Decision | None:
        """Return what to change after an epoch, by the metrics `q`.

        The `after_step` of its last step comes before.
        """

    def after_train(self, q: Metrics) -> None:
        """Clean up after a call of training has ended at this worker, by the metrics `q`."""

    def state(self) -> Any:
        """Return what a joining worker needs to decide alike, as JSON."""
        return None

    def restore(self, state: Any) -> None:
        """Take another worker's `state`."""


HOOKS = ("before_train", "before_epoch", "before_step", "after_step", "after_epoch", "after_train")


@dataclass
class Policies(Policy):
    """Several policies as one.

    If two want different things at once, the first in the list decides. What the other one wants
    besides is done, too.

    Args:
        parts: the policies, in their order.
    """

    parts: Sequence[Policy] = field(default_factory=tuple)

    def decide(self, hook: str, q: Metrics) -> Decision | None:
        """Call a hook of each part, and return the combined decision.

        Args:
            hook: its name.
            q: the metrics of the moment.
        """
        made = []
        for part in self.parts:
            decision = getattr(part, hook)(q)
            if decision is not None:
                made.append(replace(decision, reason=f"{type(part).__name__}: {decision.reason}"))
        return combine(made)

    def before_train(self, q: Metrics) -> Decision | None:
        """Return the parts' combined decision by the metrics `q`."""
        return self.decide("before_train", q)

    def before_epoch(self, q: Metrics) -> Decision | None:
        """Return the parts' combined decision by the metrics `q`."""
        return self.decide("before_epoch", q)

    def before_step(self, q: Metrics) -> Decision | None:
        """Return the parts' combined decision by the metrics `q`."""
        return self.decide("before_step", q)

    def after_step(self, q: Metrics) -> Decision | None:
        """Return the parts' combined decision by the metrics `q`."""
        return self.decide("after_step", q)

    def after_epoch(self, q: Metrics) -> Decision | None:
        """Return the parts' combined decision by the metrics `q`."""
        return self.decide("after_epoch", q)

    def after_train(self, q: Metrics) -> None:
        """Call the parts' hook with the metrics `q`."""
        self.decide("after_train", q)

    def state(self) -> Any:
        """Return the states of the parts, as JSON."""
        return [part.state() for part in self.parts]

    def restore(self, state: Any) -> None:
        """Restore each part from another worker's `state`."""
        for part, kept in zip(self.parts, state):
            part.restore(kept)


def combine(decisions: Iterable[Decision]) -> Decision | None:
    """Return one decision: of each thing that several decisions change, the first one's value."""
    changes: dict[str, Any] = {}
    reasons = []
    for decision in decisions:
        wanted = decision.changes
        if "global_batch_size" in changes or "local_batch_size" in changes:
            for name in ("global_batch_size", "local_batch_size", "shards"):
                wanted.pop(name, None)
        # An eviction and a new size are two ways to change the membership; one at a time.
        if "size" in changes or "evict" in changes:
            for name in ("size", "keeps_local_batch", "evict"):
                wanted.pop(name, None)
        new = {name: value for name, value in wanted.items() if name not in changes}
        if new:
            changes.update(new)
            reasons.append(decision.reason)
    return Decision("; ".join(reasons), **changes) if changes else None


def as_policy(policy: Policy | Sequence[Policy] | None) -> Policies:
    """Return one policy or several as Policies. TypeError for anything else."""
    if isinstance(policy, Policies):
        policy = policy.parts
    elif policy is None or isinstance(policy, Policy):
        policy = () if policy is None else (policy,)
    if not isinstance(policy, (tuple, list)) or not all(isinstance(part, Policy) for part in policy):
        raise TypeError(f"policy is a ms_kungfu.elastic.Policy or a list of them, got {policy!r}")
    return Policies(tuple(policy))
