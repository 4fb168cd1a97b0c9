"""Policies: from what is seen of a training to what is changed about it. Pure: no clock, no cluster, no MindSpore.

A policy gets the `Metrics` of the moment and returns a `Decision`, which always has a reason, or None. What carries
decisions out is `ms_kungfu.elastic.policy_runner`. docs/policies.md
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any


@dataclass(frozen=True)
class Metrics:
    """What a policy knows. Times are in seconds; None stands for what isn't known (yet)."""

    step: int = 0
    """Steps done since training started."""
    epoch: int = 0
    """Epochs done in the present call of training."""
    cluster_size: int = 1
    """Workers."""
    batch_size: int = 0
    """Samples of a step, of all workers together."""
    holds_global_batch: bool = False
    """Whether the batch stays the same when the cluster changes; else it grows and shrinks with it."""
    trained_samples: int = 0
    """Of all workers."""
    total_samples: int | None = None
    """That will have been trained when training ends."""
    steps_at_size: int = 0
    """Steps done since the cluster last changed. The first ones are slow: new shapes are compiled."""
    step_time: float | None = None
    """Of the last measured step."""
    compute_times: tuple[float, ...] = ()
    """Of each worker, the part of it outside of communication."""
    communication_time: float | None = None
    """The part of a step that communication takes though nobody is late for it, as far as it isn't hidden."""
    gradient_noise_scale: float | None = None
    """In samples; infinite where noise hides the gradient."""
    noise_scale_steps: int = 0
    """Measurements that it is made of."""
    loss: float | None = None
    """Mean over the workers, weighted by their samples; where the program gives it."""
    learning_rate: float | None = None
    """The optimizer's, at the last measured step."""
    training_time: float = 0.0
    """Since training started, resizes included."""
    resize_time: float | None = None
    """For how long the last change of the cluster held up training."""
    shards: int | None = None
    """Into how many a full step is dealt (docs/shards.md); None: each worker trains its part of the batch in one."""

    @property
    def local_batch_size(self) -> float:
        """Samples of a worker in a step."""
        return self.batch_size / self.cluster_size


@dataclass(frozen=True)
class Decision:
    """What is to change, and why. None, or nothing in `evict`: it stays as it is."""

    reason: str
    size: int | None = None
    """Number of workers. They come when they are ready; until then policies are asked as before."""
    keeps_local_batch: bool | None = None
    """With `size`: a dataset that holds its global batch changes it in proportion, when the new size comes true; one
    that deals shards deals more or fewer of them, of the same shape."""
    global_batch_size: int | None = None
    """Samples of a step, of all workers together: the dataset holds them at any size of the cluster."""
    local_batch_size: int | None = None
    """Samples of a step at each worker, so that all together follow the size of the cluster."""
    learning_rate: float | None = None
    """Instead of the present one, or of the rest of the optimizer's list of rates."""
    strategy: str | None = None
    """Of the collectives, in KungFu's names."""
    optimizer: str | None = None
    """What ``optimizer.switch_to`` takes."""
    evict: tuple[int, ...] = ()
    """Ranks that shall leave."""
    shards: int | None = None
    """With `global_batch_size`: into how many a full step is dealt, from the next one on; else as many as before."""

    def __post_init__(self) -> None:
        if not isinstance(self.reason, str) or not self.reason:
            raise ValueError("a decision has a reason: a text that isn't empty")
        for name in ("size", "global_batch_size", "local_batch_size", "shards"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is an integer of 1 or more, got {value!r}")
        if self.global_batch_size is not None and self.local_batch_size is not None:
            raise ValueError("a decision sets global_batch_size or local_batch_size, not both")
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
        """The reason, and what changes."""
        return {"reason": self.reason, **self.changes}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Decision:
        """What `to_json` has made a document of."""
        return cls(**{**document, "evict": tuple(document.get("evict", ()))})


class Policy:
    """Override what you need; each hook returns a Decision or None.

    The hooks are called at every worker, with the same quantities but for nothing: what the lowest rank decides is done
    by all. A policy that remembers something gives it to a worker that joins by `state` and `restore`.
    """

    def before_train(self, q: Metrics) -> Decision | None:
        """A call of training begins."""

    def before_epoch(self, q: Metrics) -> Decision | None:
        """An epoch begins. The first one does after `before_train`."""

    def before_step(self, q: Metrics) -> Decision | None:
        """The next step is about to begin, in the cluster that will train it. Can't change the cluster any more."""

    def after_step(self, q: Metrics) -> Decision | None:
        """A step is done. What is decided here counts from one of the next ones on."""

    def after_epoch(self, q: Metrics) -> Decision | None:
        """An epoch has ended, after the `after_step` of its last step."""

    def after_train(self, q: Metrics) -> None:
        """The call of training has ended at this worker."""

    def state(self) -> Any:
        """What a worker that joins needs to decide alike; JSON."""
        return None

    def restore(self, state: Any) -> None:
        """Take another worker's `state`."""


HOOKS = ("before_train", "before_epoch", "before_step", "after_step", "after_epoch", "after_train")


@dataclass
class Policies(Policy):
    """Several policies as one. Where two want different things at once, the one that comes first has its way; what the
    other wants beside that is done, too."""

    parts: Sequence[Policy] = field(default_factory=tuple)

    def decide(self, hook: str, q: Metrics) -> Decision | None:
        """Call one of `HOOKS` of each part."""
        made = []
        for part in self.parts:
            decision = getattr(part, hook)(q)
            if decision is not None:
                made.append(replace(decision, reason=f"{type(part).__name__}: {decision.reason}"))
        return combine(made)

    def before_train(self, q: Metrics) -> Decision | None:
        return self.decide("before_train", q)

    def before_epoch(self, q: Metrics) -> Decision | None:
        return self.decide("before_epoch", q)

    def before_step(self, q: Metrics) -> Decision | None:
        return self.decide("before_step", q)

    def after_step(self, q: Metrics) -> Decision | None:
        return self.decide("after_step", q)

    def after_epoch(self, q: Metrics) -> Decision | None:
        return self.decide("after_epoch", q)

    def after_train(self, q: Metrics) -> None:
        self.decide("after_train", q)

    def state(self) -> Any:
        return [part.state() for part in self.parts]

    def restore(self, state: Any) -> None:
        for part, kept in zip(self.parts, state):
            part.restore(kept)


def combine(decisions: Iterable[Decision]) -> Decision | None:
    """One decision: of each thing that several change, the first one's wish."""
    changes: dict[str, Any] = {}
    reasons = []
    for decision in decisions:
        wanted = decision.changes
        if "global_batch_size" in changes or "local_batch_size" in changes:
            for name in ("global_batch_size", "local_batch_size", "shards"):
                wanted.pop(name, None)
        # A worker that is told to go and a new size are two ways to change the membership; one at a time.
        if "size" in changes or "evict" in changes:
            for name in ("size", "keeps_local_batch", "evict"):
                wanted.pop(name, None)
        new = {name: value for name, value in wanted.items() if name not in changes}
        if new:
            changes.update(new)
            reasons.append(decision.reason)
    return Decision("; ".join(reasons), **changes) if changes else None


def as_policy(policy: Policy | Sequence[Policy] | None) -> Policies:
    """One policy or several, as Policies. TypeError for anything else."""
    if isinstance(policy, Policies):
        policy = policy.parts
    elif policy is None or isinstance(policy, Policy):
        policy = () if policy is None else (policy,)
    if not isinstance(policy, (tuple, list)) or not all(isinstance(part, Policy) for part in policy):
        raise TypeError(f"policy is a ms_kungfu.elastic.Policy or a list of them, got {policy!r}")
    return Policies(tuple(policy))
