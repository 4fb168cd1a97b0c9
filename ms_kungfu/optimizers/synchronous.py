"""Synchronous SGD and synchronous model averaging, around any optimizer of MindSpore."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import composite

from ms_kungfu.fusion import Plan
from ms_kungfu.ops import KungFuAllReduce, ReduceOp
from ms_kungfu.ops._cluster import Cluster
from ms_kungfu.optimizers._synchronising import Replicas, Synchronising, move_toward
from ms_kungfu.optimizers.grad_reducer import KungFuGradReducer
from ms_kungfu.trained.inventory import is_grouped


class SynchronousSGDOptimizer(Synchronising):
    """Synchronous SGD (S-SGD): average the gradients over all workers, then let `optimizer` update.

    Every worker makes the same update, so their models stay equal, bit for bit. So n workers with a
    local batch of b train as one does with a batch of n * b.

    *When*: the default. Its weakness is the large batch that many workers with a fixed local batch make
    together. The learning rate has to be scaled and warmed up for it, and beyond some size the accuracy
    falls all the same. Then average models instead (:class:`SynchronousAveragingOptimizer`). Every step
    waits for the slowest worker.

    *Cost*: each worker sends and receives as many bytes a step as the gradients have, whatever the
    number of workers. The gradients travel in fusion groups (docs/fusion.md). `overlap` hides them
    behind the backward pass; over several hosts it is on by default.

    ``KungFuMomentum`` and its like are the same for MindSpore's own optimizers, by inheritance.

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017 (arXiv:1706.02677).

    Args:
        optimizer: an optimizer of ``mindspore.nn``, ``mindspore.experimental.optim`` or
            ``mindspore.mint.optim``. Schedulers of the last two are made for `optimizer` itself:
            ``StepLR(optimizer, ...)``.
        gradients_mean: whether the gradients are averaged (True) or summed.
        fusion: see :class:`KungFuGradReducer`.
        overlap: see :class:`KungFuGradReducer`.
    """

    _takes_groups = True

    def __new__(cls, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the class for optimizers with ``param_groups`` if `optimizer` is one."""
        grouped = cls is SynchronousSGDOptimizer and is_grouped(optimizer)
        return super().__new__(_OfGroups if grouped else cls)

    def __init__(
        self, optimizer: nn.Optimizer, gradients_mean: bool = True, fusion: Any = None, overlap: bool | None = None
    ) -> None:
        super().__init__(optimizer)
        self.grad_reducer = KungFuGradReducer(self.parameters, gradients_mean, fusion=fusion, overlap=overlap)

    def fusion_plan(self) -> Plan:
        """Return which gradients are reduced together, how large and in what order; ``print`` it.

        docs/fusion.md explains the plan.
        """
        return self.grad_reducer.fusion_plan()

    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Reduce the gradients over all ranks, and update the parameters.

        Args:
            gradients: a tuple of tensors, this worker's gradients in the parameters' order.

        Returns:
            What the optimizer returns.
        """
        return self.optimizer(self.grad_reducer(gradients))


class _OfGroups(SynchronousSGDOptimizer):
    """Around an optimizer with ``param_groups``, which reads its rates in Python: a jitted call would keep them."""

    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        return self.optimizer(self.grad_reducer(gradients))


_lead = composite.MultitypeFuncGraph("lead")
_speed = composite.MultitypeFuncGraph("speed")


@_lead.register("Number", "Tensor", "Tensor", "Tensor")
def _lead_by(momentum, steady, velocity, mean):  # type: ignore[no-untyped-def]
    """Return the central model of one tensor: the mean, carried on by its velocity."""
    # Selected rather than multiplied: values from an older cluster may be infinite.
    return ops.select(steady, mean + momentum * velocity, mean)


@_speed.register("Tensor", "Tensor", "Tensor", "Tensor")
def _keep(steady, central, velocity, lead):  # type: ignore[no-untyped-def]
    """Keep the new central model and its distance from the last one."""
    moved = ops.assign(velocity, ops.select(steady, lead - central, ops.zeros_like(lead)))
    return ops.assign(central, ops.depend(lead, moved))


class CentralModel(nn.Cell):
    """The central model z of SMA: the mean of the workers' models, with a momentum of its own if requested.

    ``z = mean + momentum * (z - z_before)``. A change of membership, or a failure, moves the mean by itself. So the
    first step after one uses the mean alone and begins a new velocity, and so does a cluster of one. (A failure causes
    two such steps: its own, and the first of the version without the failed worker.)
    """

    def __init__(self, parameters: Any, momentum: float, name: str) -> None:
        super().__init__(auto_prefix=False)
        self.all_reduce = KungFuAllReduce(ReduceOp.MEAN, name)
        self.momentum = momentum
        if momentum:
            self.cluster = Cluster()
            self.central = parameters.clone(prefix="central", init="zeros")
            self.velocity = parameters.clone(prefix="central_velocity", init="zeros")
            self.seen = Parameter(Tensor(-1, ms.int64), name="central_seen", requires_grad=False)
            self.map = composite.HyperMap()

    def construct(self, parameters):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Return the central model."""
        mean = self.all_reduce(parameters)
        if self.momentum == 0.0:
            return mean
        version, size = self.cluster()
        steady = ops.logical_and(ops.equal(version, self.seen), ops.greater(size, 1))
        lead = self.map(ops.partial(_lead, self.momentum, steady), self.velocity, mean)
        kept = self.map(ops.partial(_speed, steady), self.central, self.velocity, lead)
        seen = ops.assign(self.seen, ops.depend(version, steady))
        return ops.depend(lead, (kept, seen))


class SynchronousAveragingOptimizer(Replicas, Synchronising):
    """Synchronous model averaging (SMA): each worker's own model is drawn to the mean of all.

    Each step, with w this worker's model and g the gradient of its own batch at w::

        z = mean of all workers' w
        w = w - alpha * (w - z)
        w = optimizer's update of w by g

    With `momentum` the central model z is carried on by its own movement, as in the paper: ``z = mean +
    momentum * (z - z_before)``. The paper's central model moves by the sum of the corrections ``alpha *
    (w - z)``. It is the mean if alpha is one over the number of workers, which also makes the rule here
    independent of that number. The first step after a change of membership does without the momentum.

    *When*: many workers with small local batches. The learning rate is that of one worker's batch. Each
    worker's noise is kept, which the large batch of S-SGD loses. KungFu's README reports S-SGD ahead
    with 8 GPUs and SMA ahead with 16. With few workers S-SGD converges faster. Every step waits for the
    slowest worker.

    *Cost*: each worker sends and receives as many bytes a step as the model has, whatever the number of
    workers. With `momentum` two more copies of the model are kept.

    The workers' models differ. `merge` makes them one, the mean. Call it before the model is evaluated
    or saved, or use any worker's model, which is slightly worse. A joining worker begins with the model
    and the moments of the lowest rank that stayed; those that stay keep theirs. One worker trains as
    with `optimizer` alone, bit for bit.

    Source: Koliousis et al., CROSSBOW: Scaling Deep Learning with Small Batch Sizes on Multi-GPU
    Servers, VLDB 2019.

    Args:
        optimizer: any optimizer of MindSpore; its moments stay this worker's own.
        alpha: above 0, at most 1 (each step begins with the mean itself).
        momentum: of the central model, at least 0 and below 1.
        name: of the exchange among the workers.

    Raises:
        TypeError: if `alpha` or `momentum` isn't a number.
        ValueError: for a value outside of its range.
    """

    def __init__(
        self, optimizer: nn.Optimizer, alpha: float = 0.1, momentum: float = 0.0, name: str = "averaging"
    ) -> None:
        super().__init__(optimizer)
        self.alpha = fraction("alpha", alpha, zero=False)
        self.momentum_of_center = fraction("momentum", momentum, zero=True)
        self.center = CentralModel(self.parameters, self.momentum_of_center, name)
        self.map = composite.HyperMap()

    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Draw the model to the mean of all workers', and update it.

        Args:
            gradients: a tuple of tensors, this worker's gradients in the parameters' order.

        Returns:
            What the optimizer returns.
        """
        moved = self.map(ops.partial(move_toward, self.alpha), self.parameters, self.center(self.parameters))
        return self.optimizer(ops.depend(gradients, moved))


def fraction(name: str, value: Any, *, zero: bool) -> float:
    """Return `value` as a float.

    It raises TypeError or ValueError unless the value lies between 0 and 1, or is 0 (with `zero`), or 1
    (without).
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not (0 <= value < 1 if zero else 0 < value <= 1):
        raise ValueError(f"{name} must be {'at least 0 and below' if zero else 'above 0 and at most'} 1, got {value!r}")
    return float(value)
