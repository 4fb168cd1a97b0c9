"""Pair averaging (asynchronous decentralized SGD), which wraps any MindSpore optimizer."""

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
    """Average the parameters with a neighbour's parameters, in place. Record the neighbour's rank."""

    def __init__(self, parameters: Any, name: str, neighbour: str, seed: int, prefetch: bool) -> None:
        super().__init__(auto_prefix=False)
        self.request = RequestModel(name, neighbour, seed, prefetch)
        self.store = SaveModel(name)
        self.exchanged = Parameter(Tensor([-1, 0], ms.int64), name="exchanged", requires_grad=False)
        self.count = len(parameters)
        self.map = composite.HyperMap()

    def construct(self, parameters):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Average the parameters with the neighbour's, and record its rank."""
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
    """Mix-in before `Synchronising`: workers average their models in pairs."""

    parameters: Any
    pairs: PairExchange

    def last_exchange(self) -> tuple[int, int]:
        """Return whose model the last step used.

        Returns:
            The rank, and the version of the model (its count of saves); ``(-1, 0)`` if the step used none.
        """
        rank, version = self.pairs.exchanged.asnumpy().tolist()
        return rank, version

    @cached_property
    def _publish(self) -> Publish:
        return Publish(self.parameters, self.pairs.store)


class PairAveragingOptimizer(Pairing, Synchronising):
    """Pair averaging (AD-PSGD): each step averages a worker's model with one other worker's model.

    Each step, with w this worker's model and g the gradient of its own batch at w::

        p = the latest saved model of one other worker w = (w + p) / 2 w = optimizer's update of w by g
        save w, for the other workers to request

    No step waits for another worker. A worker reads another worker's model from shared memory, without
    that worker's help. With `prefetch` the model is copied in the background while the next gradients
    are computed. A model from another host is sent over the network, and the step that uses the model
    waits for it.

    In the paper both workers of a pair take the average at the same time. Here, as in KungFu, only the
    requesting worker takes the average. Until another worker has saved a model, a worker trains exactly
    as with `optimizer` alone, bit for bit.

    *When*: workers of different or changing speed, or a slow network. A worker that slows down, fails
    or joins doesn't delay the others. With many workers, a model takes longer to reach all of them, so
    the models differ more than with :class:`SynchronousAveragingOptimizer`. If all workers are equally
    fast and on one fast network, that class or :class:`SynchronousSGDOptimizer` converges at least as
    fast.

    *Cost*: in each step a worker writes its model and reads one model, for any number of workers.
    *Memory*: the store takes twice the size of the model. The requested model takes its size once, or
    twice with several hosts.

    The workers' models differ; `merge` replaces them by one. A joining worker begins with the model and
    the moments of the lowest remaining rank; the remaining workers keep theirs. Each worker makes steps
    at its own speed. In :class:`~ms_kungfu.elastic.ElasticTraining` the workers synchronise only for a
    change of the cluster. See docs/optimizers.md.

    Source: Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018
    (arXiv:1710.06952).

    Args:
        optimizer: any MindSpore optimizer. Its moments stay local to the worker.
        neighbour: ``"random"`` (each other worker has the same probability), or ``"round-robin"``.
        prefetch: whether to choose the neighbour and copy its model at the end of the previous step.
            The model is then one step older, but the copy is off the critical path. Otherwise the model
            is copied when it is needed.
        seed: seed of the random choice, at least 0 and below 2**63. By default each process has a
            different seed.
        name: the name under which the models are saved. Two optimizers of one program need different
            names.

    Raises:
        TypeError: for an argument of another type.
        ValueError: for a value outside of its range.
    """

    asynchronous = True
    """Whether workers may make different numbers of steps."""

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

        Call it after the program has changed the model outside of a step, for example loaded it. Otherwise
        the other workers get the older model until this worker's next step.
        """
        self._publish()

    def merge(self) -> None:
        """Replace the workers' models by one merged model, and save it for the others; see `Replicas.merge`."""
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
