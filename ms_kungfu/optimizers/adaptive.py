"""Wrap any MindSpore optimizer with a synchronisation algorithm that can change during training."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.ops import composite

from ms_kungfu import runtime
from ms_kungfu.agreement import gather_living
from ms_kungfu.errors import CollectiveMismatchError
from ms_kungfu.fusion import Plan
from ms_kungfu.ops import wait_for_queue
from ms_kungfu.optimizers._synchronising import Merge, Synchronising, move_toward
from ms_kungfu.optimizers.grad_reducer import KungFuGradReducer
from ms_kungfu.optimizers.pair import PairExchange, Pairing, pair_options
from ms_kungfu.optimizers.synchronous import CentralModel, fraction
from ms_kungfu.trained.inventory import assign

ALGORITHMS = ("ssgd", "sma", "pair")
_SSGD, _SMA, _PAIR = range(3)
_NEVER = -1


class AdaptiveSGDOptimizer(Pairing, Synchronising):
    """Train with model averaging first and synchronous SGD later, or switch the algorithm by a policy.

    The first `change_step` steps use :class:`SynchronousAveragingOptimizer` (SMA). Later steps use
    :class:`SynchronousSGDOptimizer` (S-SGD). :meth:`switch_to` changes between these two and
    :class:`PairAveragingOptimizer` at any time. A switch causes no compilation. With every algorithm,
    a single worker trains exactly as with `optimizer` alone, bit for bit.

    *Matched state*: S-SGD needs equal models. At a switch to S-SGD, the workers' models and the
    wrapped optimizer's moments are averaged over the workers. Each scalar (global step, learning rate,
    powers of Adam's betas) is replaced by its maximum over the workers. After the switch, the workers'
    models are equal bit for bit. A switch to another algorithm doesn't change the models.

    *When*: model averaging has more noise, so it explores more at the beginning. S-SGD converges better
    at the end. The reverse order suits clusters with occasional stragglers. A policy can find out which
    order is better.

    *Cost*: each step costs as much as a step of the current algorithm. A switch to S-SGD costs one
    all-reduce of the model and the moments.

    Source: Mai et al., KungFu: Making Training in Distributed Machine Learning Adaptive, OSDI 2020. The
    classes of the algorithms list their own sources.

    Args:
        optimizer: any ``mindspore.nn.Optimizer``.
        change_step: number of steps with SMA before training changes to S-SGD, that is, of updates
            by this optimizer since training began. A joining worker continues the other workers'
            count. With None, or if `switch_to` has already chosen an algorithm other than SMA,
            there is no automatic change.
        alpha: the argument `alpha` of :class:`SynchronousAveragingOptimizer`.
        algorithm: the algorithm with which training begins: ``"sma"``, ``"ssgd"`` or ``"pair"``.
        neighbour, prefetch, seed: arguments of :class:`PairAveragingOptimizer`.
        gradients_mean, fusion, overlap: arguments of :class:`SynchronousSGDOptimizer`.
        name: the prefix of the names of this optimizer's collectives.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a value is out of range.
    """

    def __init__(
        self,
        optimizer: nn.Optimizer,
        change_step: int | None = None,
        alpha: float = 0.1,
        algorithm: str = "sma",
        *,
        neighbour: str = "random",
        prefetch: bool = True,
        seed: int | None = None,
        gradients_mean: bool = True,
        fusion: Any = None,
        overlap: bool | None = None,
        name: str = "adaptive",
    ) -> None:
        super().__init__(optimizer)
        if change_step is not None and (isinstance(change_step, bool) or not isinstance(change_step, int)):
            raise TypeError(f"change_step must be a number of steps or None, not {change_step!r}")
        if change_step is not None and change_step < 0:
            raise ValueError(f"change_step must be at least 0, got {change_step}")
        self.alpha = fraction("alpha", alpha, zero=False)
        self.mode = Parameter(Tensor(_number_of(algorithm), ms.int32), name="algorithm", requires_grad=False)
        self.updates = Parameter(Tensor(0, ms.int64), name="updates", requires_grad=False)
        self.change_at = _NEVER if change_step is None else change_step
        self.grad_reducer = KungFuGradReducer(
            self.parameters, gradients_mean, f"{name}/gradients", fusion=fusion, overlap=overlap
        )
        self.grad_reducer.begins_alike = algorithm == "ssgd"  # other algorithms merge models before the first reduction
        self.center = CentralModel(self.parameters, 0.0, f"{name}/model")
        self.pairs = PairExchange(self.parameters, f"{name}/pair", *pair_options(neighbour, prefetch, seed))
        self.match = Merge(optimizer.get_parameters(), f"{name}/match")
        self.map = composite.HyperMap()
        self._prefetch = prefetch

    @property
    def algorithm(self) -> str:
        """The algorithm that the next step uses: ``"ssgd"``, ``"sma"`` or ``"pair"``."""
        if self._number() == _SMA and int(self.updates.asnumpy()) == self.change_at:
            return ALGORITHMS[_SSGD]
        return ALGORITHMS[self._number()]

    @property
    def replicas_differ(self) -> bool:
        """Whether the workers' models may differ at present: False only if the algorithm is S-SGD."""
        return self._number() != _SSGD

    def switch_to(self, algorithm: str) -> None:
        """Use another algorithm from the next step on.

        All ranks must call this at the same time, between steps.

        Args:
            algorithm: ``"ssgd"``, ``"sma"`` or ``"pair"``, the same at every rank.

        Raises:
            ValueError: the algorithm is unknown.
            CollectiveMismatchError: the ranks request different algorithms. Every rank raises this
                error, and no rank switches.
        """
        wanted = _number_of(algorithm)
        runtime.init()
        wait_for_queue()
        everyones = gather_living(np.array(wanted), "kungfu/algorithm")
        present = {rank: ALGORITHMS[int(one)] for rank, one in everyones.items()}
        if set(present.values()) != {algorithm}:
            asked = ", ".join(f"rank {rank}: {one}" for rank, one in present.items())
            raise CollectiveMismatchError(
                f"the ranks switch to different algorithms ({asked}); request the same one on all ranks"
            )
        if wanted == _SSGD and self._number() != _SSGD:
            self.merge()
        if wanted == _PAIR:
            # The models that workers saved when they last used pair averaging are outdated.
            self._publish()
            wait_for_queue()
            runtime.run_barrier()
            if self._prefetch:
                self._publish()
        assign(self.mode, np.array(wanted))
        wait_for_queue()

    def merge(self) -> None:
        """Replace the workers' models with one merged model; see `Replicas.merge`.

        If the algorithm is pair averaging, each worker also saves the merged model for the other workers.
        """
        super().merge()
        if self._number() == _PAIR:
            self._publish()

    def fusion_plan(self) -> Plan:
        """Return the plan: the groups of gradients that S-SGD reduces together; see docs/fusion.md."""
        return self.grad_reducer.fusion_plan()

    def _number(self) -> int:
        return int(self.mode.asnumpy())

    @ms.jit(backend="ms_backend")
    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Synchronise the workers with the present algorithm, and update the parameters.

        Args:
            gradients: a tuple of tensors, this worker's gradients in the parameters' order.

        Returns:
            What the wrapped optimizer returns.
        """
        if ops.logical_and(ops.equal(self.updates, self.change_at), ops.equal(self.mode, _SMA)):
            matched = self.match()
            ops.assign(self.mode, ops.depend(Tensor(_SSGD, ms.int32), matched))
        if ops.equal(self.mode, _SSGD):
            gradients = self.grad_reducer(gradients)
        elif ops.equal(self.mode, _SMA):
            moved = self.map(ops.partial(move_toward, self.alpha), self.parameters, self.center(self.parameters))
            gradients = ops.depend(gradients, moved)
        else:
            gradients = ops.depend(gradients, self.pairs(self.parameters))
        updated = self.optimizer(gradients)
        if ops.equal(self.mode, _PAIR):
            self.pairs.store(self.parameters)
        ops.assign_add(self.updates, Tensor(1, ms.int64))
        return updated


def _number_of(algorithm: str) -> int:
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    return ALGORITHMS.index(algorithm)
