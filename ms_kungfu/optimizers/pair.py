"""Pair averaging: asynchronous decentralized SGD, around any optimizer of MindSpore."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import composite

from ms_kungfu import runtime
from ms_kungfu.ops._store import NEIGHBOURS, RequestModel, SaveModel
from ms_kungfu.optimizers._synchronising import Replicas, Synchronising, move_toward


class PairExchange(nn.Cell):
    """Average the parameters with those of a neighbour, in place; keep the neighbour's rank."""

    def __init__(self, parameters: Any, name: str, neighbour: str, seed: int, prefetch: bool) -> None:
        super().__init__(auto_prefix=False)
        self.request = RequestModel(name, neighbour, seed, prefetch)
        self.store = SaveModel(name)
        self.exchanged = Parameter(Tensor([-1, 0], ms.int64), name="exchanged", requires_grad=False)
        self.count = len(parameters)
        self.map = composite.HyperMap()

    def construct(self, parameters):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Average the parameters with the neighbour's, and note its rank."""
        theirs = self.request(parameters)
        moved = self.map(ops.partial(move_toward, 0.5), parameters, theirs[: self.count])
        noted = ops.assign(self.exchanged, theirs[self.count])
        return moved, noted


class Publish(nn.Cell):
    """Save parameters, outside of a step."""

    def __init__(self, parameters: Any, store: SaveModel) -> None:
        super().__init__(auto_prefix=False)
        self.published = parameters
        self.store = store

    @ms.jit(backend="ms_backend")
    def construct(self):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Save the parameters."""
        return self.store(self.published)


class Pairing(Replicas):
    """Mix-in before `Synchronising`: workers that average their models in pairs."""

    parameters: Any
    pairs: PairExchange

    def last_exchange(self) -> tuple[int, int]:
        """Return whose model the last step took.

        Returns:
            The rank, and the version of the model (its count of saves); ``(-1, 0)`` if the step took none.
        """
        rank, version = self.pairs.exchanged.asnumpy().tolist()
        return rank, version

    @cached_property
    def _publish(self) -> Publish:
        return Publish(self.parameters, self.pairs.store)


class PairAveragingOptimizer(Pairing, Synchronising):
    """Pair averaging (AD-PSGD): each worker averages its own model with one other worker's a step.

    Each step, with w this worker's model and g the gradient of its own batch at w::

        p = the model of one other worker, as it was saved last
        w = (w + p) / 2
        w = optimizer's update of w by g
        save w, for the others to take

    No step waits for another worker. A model is taken from shared memory without its owner's help. With
    `prefetch` it is copied in the background while the next gradients are computed. A model of a worker
    on another host comes over the network, and the step that takes it waits for it.

    In the paper both workers of a pair take the average at the same time. Here, as in KungFu, only the
    worker that asks takes it. A worker without a partner (alone, or the first to have saved) trains as
    with `optimizer` alone, bit for bit.

    *When*: workers of different or changing speed, or a slow network. A worker that slows down, fails
    or joins doesn't hold up the others. With many workers a model takes longer to reach all of them, so
    the models are farther apart than with :class:`SynchronousAveragingOptimizer`. If all workers are
    equally fast and near, that one or :class:`SynchronousSGDOptimizer` converges at least as fast.

    *Cost*: a worker writes its model once a step and reads one: twice the model's bytes, whatever the
    number of workers. Memory: twice the model for the store, once for the model being fetched, and once
    more over several hosts.

    The workers' models differ; `merge` makes them one. A joining worker begins with the model and the
    moments of the lowest rank that stayed; those that stay keep theirs. Workers make their steps at
    their own speed, in :class:`~ms_kungfu.elastic.ElasticTraining` as well, where they meet only for a
    change. See docs/optimizers.md.

    Source: Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018
    (arXiv:1710.06952).

    Args:
        optimizer: any optimizer of MindSpore; its moments stay this worker's own.
        neighbour: ``"random"``, each of the others as likely as any other, or ``"round-robin"``.
        prefetch: whether the neighbour is chosen and its model copied at the end of the step before: a
            step older, off the critical path. Else when it is needed.
        seed: of the random choice, at least 0 and below 2**63; by default each process has its own.
        name: under which the models are saved; two optimizers of one program need two.

    Raises:
        TypeError: for an argument of another type.
        ValueError: for a value outside of its range.
    """

    asynchronous = True
    """That workers needn't make the same number of steps."""

    def __init__(
        self,
        optimizer: nn.Optimizer,
        neighbour: str = "random",
        prefetch: bool = True,
        seed: int | None = None,
        name: str = "pair",
    ) -> None:
        super().__init__(optimizer)
        self.pairs = PairExchange(self.parameters, name, *pair_options(neighbour, prefetch, seed))

    def publish(self) -> None:
        """Save this worker's model now, between steps, as each step does at its end.

        Call it for a model that has changed by other means, such as a loaded one. The others would go on
        taking the older model until this worker's next step.
        """
        self._publish()

    def merge(self) -> None:
        """Make the workers' models one, and save the result for the others; see `Replicas.merge`."""
        super().merge()
        self.publish()

    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Average the model with a neighbour's, update it, and save it for the others.

        Args:
            gradients: a tuple of tensors, this worker's gradients in the parameters' order.

        Returns:
            What the optimizer returns.
        """
        averaged = self.pairs(self.parameters)
        updated = self.optimizer(ops.depend(gradients, averaged))
        return ops.depend(updated, self.pairs.store(self.parameters))


def pair_options(neighbour: str, prefetch: bool, seed: int | None) -> tuple[str, int, bool]:
    """Check the options of pair averaging, and return them with a seed."""
    if neighbour not in NEIGHBOURS:
        raise ValueError(f"neighbour must be one of {', '.join(NEIGHBOURS)}, not {neighbour!r}")
    if not isinstance(prefetch, bool):
        raise TypeError(f"prefetch must be True or False, not {prefetch!r}")
    if seed is None:
        seed = runtime.uid() & (1 << 63) - 1
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be a number or None, not {seed!r}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be at least 0 and below 2**63, got {seed}")
    return neighbour, seed, prefetch
