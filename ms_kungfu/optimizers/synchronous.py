"""Wrap a MindSpore optimizer with synchronous SGD or synchronous model averaging."""

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
    """Synchronous SGD (S-SGD): average the gradients over all workers, then call `optimizer`.

    All workers make the same update, so their models stay equal, bit for bit. Therefore n workers
    with a local batch of b samples train like one worker with a batch of n * b samples.

    *When*: use it by default. Its weakness is that many workers with a fixed local batch have a
    large global batch. The learning rate must be scaled and warmed up for the global batch. Above
    some batch size, the accuracy still drops. Use :class:`SynchronousAveragingOptimizer` in that
    case. Every step waits for the slowest worker.

    *Cost*: the number of bytes that each worker sends and receives per step equals the size of the
    gradients, for any number of workers. The gradients are sent in fusion groups (docs/fusion.md).
    With `overlap`, the reduction runs during the backward pass; overlap is the default with several
    hosts.

    ``KungFuMomentum`` and similar classes, subclasses of MindSpore's optimizers, do the same.

    Source: Goyal et al., Accurate, Large Minibatch SGD, 2017 (arXiv:1706.02677).

    Args:
        optimizer: an optimizer from ``mindspore.nn``, ``mindspore.experimental.optim`` or
            ``mindspore.mint.optim``. With the last two, create schedulers for `optimizer` and not for
            the wrapper: ``StepLR(optimizer, ...)``.
        gradients_mean: whether the gradients are averaged (True) or summed.
        fusion: see :class:`KungFuGradReducer`.
        overlap: see :class:`KungFuGradReducer`.
    """

    _takes_groups = True

    def __new__(cls, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Create an object of a special subclass if `optimizer` has ``param_groups``."""
        grouped = cls is SynchronousSGDOptimizer and is_grouped(optimizer)
        return super().__new__(_OfGroups if grouped else cls)

    def __init__(
        self, optimizer: nn.Optimizer, gradients_mean: bool = True, fusion: Any = None, overlap: bool | None = None
    ) -> None:
        super().__init__(optimizer)
        self.grad_reducer = KungFuGradReducer(self.parameters, gradients_mean, fusion=fusion, overlap=overlap)

    def fusion_plan(self) -> Plan:
        """Return the plan: the groups of gradients, their sizes and their order.

        To see the plan, ``print`` the result. docs/fusion.md explains the plan.
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
    """Wrap an optimizer with ``param_groups``, which reads learning rates in Python, so `construct` isn't jitted."""

    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        return self.optimizer(self.grad_reducer(gradients))


_lead = composite.MultitypeFuncGraph("lead")
_speed = composite.MultitypeFuncGraph("speed")


@_lead.register("Number", "Tensor", "Tensor", "Tensor")
def _lead_by(momentum, steady, velocity, mean):  # type: ignore[no-untyped-def]
    """Return the central model for one tensor: the mean, plus the momentum if the cluster hasn't changed."""
    # `ops.select` is used instead of a multiplication by 0, because the velocity from an older cluster may be infinite.
    return ops.select(steady, mean + momentum * velocity, mean)


@_speed.register("Tensor", "Tensor", "Tensor", "Tensor")
def _keep(steady, central, velocity, lead):  # type: ignore[no-untyped-def]
    """Store the new central model, and its change since the last step."""
    moved = ops.assign(velocity, ops.select(steady, lead - central, ops.zeros_like(lead)))
    return ops.assign(central, ops.depend(lead, moved))


class CentralModel(nn.Cell):
    """The central model z of SMA: the mean of the workers' models, with momentum if requested.

    The formula is ``z = mean + momentum * (z - z_before)``. If a worker joins, leaves or fails, the
    mean changes. So the next step uses the mean alone, and the momentum restarts from zero. A
    cluster of one worker also uses the mean alone. A failure causes two steps without momentum: the
    step with the failure, and the first step in the next cluster version, which excludes the failed
    worker.
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
        """Return the central model. `parameters`: this worker's model."""
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
    """Synchronous model averaging (SMA): each step moves a worker's model towards the mean of all models.

    Each step does the following, where w is this worker's model and g is the gradient of this worker's
    batch at w::

        z = mean of all workers' w
        w = w - alpha * (w - z)
        w = optimizer's update of w by g

    With `momentum`, the central model z also moves by `momentum` times its last change, as in the
    paper: ``z = mean + momentum * (z - z_before)``. In the paper, the central model moves by the
    sum of the corrections ``alpha * (w - z)``. The result is the mean only if alpha is 1 divided by
    the number of workers. This optimizer always uses the mean, so its rule doesn't depend on the
    number of workers. The first step after a worker has joined or left has no momentum.

    *When*: use it with many workers and small local batches. Use the learning rate for one worker's
    batch. SMA keeps each worker's gradient noise, which the large batch of S-SGD averages out. KungFu's
    README reports that S-SGD is better with 8 GPUs and SMA is better with 16. With few workers, S-SGD
    converges faster. Every step waits for the slowest worker.

    *Cost*: the number of bytes that each worker sends and receives per step equals the size of the
    model, for any number of workers. With `momentum`, two more copies of the model are stored.

    The workers' models differ; `merge` replaces them with their mean. Call `merge` before the model
    is evaluated or saved. You can also use a single worker's model, which is slightly worse. A
    joining worker begins with the model and the moments of the lowest remaining rank. The remaining
    workers keep their own. A single worker trains exactly as with `optimizer` alone, bit for bit.

    Source: Koliousis et al., CROSSBOW: Scaling Deep Learning with Small Batch Sizes on Multi-GPU
    Servers, VLDB 2019.

    Args:
        optimizer: any ``mindspore.nn.Optimizer``. Its moments aren't exchanged among the workers.
        alpha: the fraction of the distance to the mean by which a step moves the model, above 0 and at
            most 1. With 1, each step begins with the mean itself.
        momentum: the momentum of the central model, at least 0 and below 1.
        name: the name of this optimizer's all-reduce.

    Raises:
        TypeError: if `alpha` or `momentum` isn't a number.
        ValueError: if a value is out of range.
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
        """Move the model towards the mean of all workers' models, and update it.

        Args:
            gradients: a tuple of tensors, this worker's gradients in the parameters' order.

        Returns:
            What the optimizer returns.
        """
        moved = self.map(ops.partial(move_toward, self.alpha), self.parameters, self.center(self.parameters))
        return self.optimizer(ops.depend(gradients, moved))


def fraction(name: str, value: Any, *, zero: bool) -> float:
    """Return `value` as a float.

    Raise TypeError if the value isn't a number, and ValueError if it isn't between 0 and 1. Of the
    two limits, only 0 is allowed if `zero` is true, and only 1 if `zero` is false.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    if not (0 <= value < 1 if zero else 0 < value <= 1):
        raise ValueError(f"{name} must be {'at least 0 and below' if zero else 'above 0 and at most'} 1, got {value!r}")
    return float(value)
