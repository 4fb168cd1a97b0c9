"""MindSpore's optimizers for data-parallel training: drop-in, with the gradients reduced in fusion groups."""

from __future__ import annotations

from mindspore import nn

from ms_kungfu.optimizers._synchronising import Replicas, Synchronising, move_toward
from ms_kungfu.optimizers.adaptive import AdaptiveSGDOptimizer
from ms_kungfu.optimizers.grad_reducer import KungFuGradReducer, Reducing
from ms_kungfu.optimizers.overflow import KungFuTrainOneStepWithLossScaleCell, OverflowAgreement
from ms_kungfu.optimizers.pair import PairAveragingOptimizer
from ms_kungfu.optimizers.synchronous import SynchronousAveragingOptimizer, SynchronousSGDOptimizer

__all__ = [
    "AdaptiveSGDOptimizer",
    "KungFuAdam",
    "KungFuAdamWeightDecay",
    "KungFuGradReducer",
    "KungFuMomentum",
    "KungFuRMSProp",
    "KungFuSGD",
    "KungFuTrainOneStepWithLossScaleCell",
    "OverflowAgreement",
    "PairAveragingOptimizer",
    "Replicas",
    "SynchronousAveragingOptimizer",
    "SynchronousSGDOptimizer",
    "Synchronising",
    "move_toward",
]


class KungFuMomentum(Reducing, nn.Momentum):
    """``nn.Momentum``, with all its arguments, on gradients that are averaged over all ranks.

    ``gradients_mean=False`` sums them instead.
    """


class KungFuSGD(Reducing, nn.SGD):
    """``nn.SGD``, likewise."""


class KungFuAdam(Reducing, nn.Adam):
    """``nn.Adam``, likewise."""


class KungFuAdamWeightDecay(Reducing, nn.AdamWeightDecay):
    """``nn.AdamWeightDecay``, likewise."""


class KungFuRMSProp(Reducing, nn.RMSProp):
    """``nn.RMSProp``, likewise."""
