"""Wrap a MindSpore optimizer with pair averaging (asynchronous decentralized SGD)."""

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
    """Average the parameters with those of a neighbour, in place, and record the neighbour's rank."""

    def __init__(self, parameters: Any, name: str, neighbour: str, seed: int, prefetch: bool) -> None:
        super().__init__(auto_prefix=False)
        self.request = RequestModel(name, neighbour, seed, prefetch)
        self.store = SaveModel(name)
        self.exchanged = Parameter(Tensor([-1, 0], ms.int64), name="exchanged", requires_grad=False)
        self.count = len(parameters)
        self.map = composite.HyperMap()

    def construct(self, parameters):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Average the parameters with the neighbour's parameters, and record the neighbour's rank."""
        theirs = self.request(parameters)
        moved = self.map(ops.partial(move_toward, 0.5), parameters, theirs[: self.count])
        noted = ops.assign(self.exchanged, theirs[self.count])
        return moved, noted


class Publish(nn.Cell):
    """Save parameters for other workers, outside of a training step."""

    def __init__(self, parameters: Any, store: SaveModel) -> None:
        super().__init__(auto_prefix=False)
        self.published = parameters
        self.store = store

    @ms.jit(backend="ms_backend")
    def construct(self):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Save the parameters."""
        return self.store(self.published)


class Pairing(Replicas):
    """Mix-in for optimizers with which workers average their models in pairs.

    List it before `Synchronising` in the base classes.
    """

    parameters: Any
    pairs: PairExchange

    def last_exchange(self) -> tuple[int, int]:
        """Return the worker whose model the last step used.

        Returns:
            The other worker's rank, and how many times that worker had saved its model. If the step used no
            other model, the result is ``(-1, 0)``.
        """
        rank, version = self.pairs.exchanged.asnumpy().tolist()
        return rank, version

    @cached_property
    def _publish(self) -> Publish:
        return Publish(self.parameters, self.pairs.store)


class PairAveragingOptimizer(Pairing, Synchronising):
    """Pair averaging (AD-PSGD): each step averages a worker's model with one other worker's model.

    Each step does the following, where w is this worker's model and g is the gradient of this worker's
    batch at w::

        p = the latest saved model of one other worker
        w = (w + p) / 2
        w = optimizer's update of w by g
        save w, for the other workers to request

    No step waits for another worker. A worker reads another worker's model from shared memory,
    without interrupting that worker. With `prefetch` the model is copied in the background while
    the next gradients are computed. A model from another host is sent over the network, and the
    step that uses the model waits until it has arrived.

    In the paper, both workers of a pair take the average at the same time. Here, as in KungFu, only the
    requesting worker takes the average. If no other worker has saved a model yet, a worker trains
    exactly as with `optimizer` alone, bit for bit.

    *When*: use it if workers have different or changing speeds, or if the network is slow. A worker
    that slows down, fails or joins doesn't delay the others. With many workers, a model takes
    longer to influence all others, so the models differ more than with
    :class:`SynchronousAveragingOptimizer`. If all workers are equally fast and share one fast
    network, that class or :class:`SynchronousSGDOptimizer` converges at least as fast.

    *Cost*: in each step a worker writes its model and reads one model, for any number of workers.
    *Memory*: the store takes twice the size of the model. The requested model takes as much memory as
    one model, or as two models if the job has several hosts.

    The workers' models differ; `merge` replaces them with one model. A joining worker begins with
    the model and the moments of the lowest remaining rank. The remaining workers keep their own.
    Each worker runs steps at its own speed. In :class:`~ms_kungfu.elastic.ElasticTraining` the
    workers synchronise only if the cluster changes. See docs/optimizers.md.

    Source: Lian et al., Asynchronous Decentralized Parallel Stochastic Gradient Descent, ICML 2018
    (arXiv:1710.06952).

    Args:
        optimizer: any ``mindspore.nn.Optimizer``. Its moments aren't exchanged among the workers.
        neighbour: how the other worker is chosen: ``"random"`` (each with the same probability), or
            ``"round-robin"``.
        prefetch: whether the worker chooses the neighbour and copies its model at the end of the
            previous step (True), or when the model is needed (False). With True the copied model is one
            step older, but a step doesn't wait for the copy.
        seed: the seed of the random choice, at least 0 and below 2**63. By default each process has a
            different seed.
        name: the name under which the models are saved. If a program has two such optimizers, they need
            different names.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a value is out of range.
    """

    asynchronous = True
    """Whether workers may run different numbers of steps."""

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
        """Save this worker's model now, between steps.

        Each step also saves the model at its end. Call this method after the program has changed the
        model outside of a step, for example by loading parameters. Without this call, other workers get
        the older model until this worker's next step ends.
        """
        self._publish()

    def merge(self) -> None:
        """Replace the workers' models with one merged model, and save this model; see `Replicas.merge`."""
        super().merge()
        self.publish()

    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Average the model with a neighbour's model, update it, and save it for the other workers.

        Args:
            gradients: a tuple of tensors, this worker's gradients in the parameters' order.

        Returns:
            What the optimizer returns.
        """
        averaged = self.pairs(self.parameters)
        updated = self.optimizer(ops.depend(gradients, averaged))
        return ops.depend(updated, self.pairs.store(self.parameters))


def pair_options(neighbour: str, prefetch: bool, seed: int | None) -> tuple[str, int, bool]:
    """Check the options of pair averaging, and return them in the order (neighbour, seed, prefetch)."""
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
