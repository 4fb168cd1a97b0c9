"""Optimizers for data-parallel training, which reduce gradients in fusion groups.

The classes whose names begin with ``KungFu`` are drop-in replacements for MindSpore's classes.
"""

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
    """``nn.Momentum`` with gradients averaged over all ranks.

    Args:
        args: the positional arguments of MindSpore's optimizer.
        gradients_mean: whether the gradients are averaged (True) or summed.
        fusion: see :class:`KungFuGradReducer`.
        overlap: see :class:`KungFuGradReducer`.
        kwargs: the keyword arguments of MindSpore's optimizer.
    """


class KungFuSGD(Reducing, nn.SGD):
    """``nn.SGD`` with gradients averaged over all ranks.

    The arguments are the same as for :class:`KungFuMomentum`.
    """


class KungFuAdam(Reducing, nn.Adam):
    """``nn.Adam`` with gradients averaged over all ranks.

    The arguments are the same as for :class:`KungFuMomentum`.
    """


class KungFuAdamWeightDecay(Reducing, nn.AdamWeightDecay):
    """``nn.AdamWeightDecay`` with gradients averaged over all ranks.

    The arguments are the same as for :class:`KungFuMomentum`.
    """


class KungFuRMSProp(Reducing, nn.RMSProp):
    """``nn.RMSProp`` with gradients averaged over all ranks.

    The arguments are the same as for :class:`KungFuMomentum`.
    """
