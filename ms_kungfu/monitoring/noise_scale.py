"""Estimate the gradient noise scale from norms of gradients. The functions are pure.

McCandlish, Kaplan, Amodei and the OpenAI Dota Team, "An Empirical Model of Large-Batch Training",
2018, appendix A.1.

A gradient over b samples has the expected squared norm ``|G|^2 + tr(Sigma) / b``. Here, G is the
gradient over all data, and Sigma is the covariance of one sample's gradient. Measurements at two
batch sizes yield two equations for ``|G|^2`` and ``tr(Sigma)``. Data-parallel training has two
batch sizes in every step: the batch of a worker's own gradient, and the batch of the mean over all
workers. ``tr(Sigma) / |G|^2`` is the *simple noise scale* B. If the batch is far smaller than B
samples, doubling the batch saves nearly half of the steps. If the batch is far larger than B
samples, doubling the batch saves almost no steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


def unbiased_estimates(
    mean_local_squared: float, reduced_squared: float, batches: Sequence[float]
) -> tuple[float, float] | None:
    """Estimate ``(|G|^2, tr(Sigma))`` from one step.

    Both estimates are unbiased and very noisy; the estimate of ``|G|^2`` may be negative.

    Args:
        mean_local_squared: the squared norm of each worker's gradient, averaged over the workers.
        reduced_squared: the squared norm of the mean gradient over all samples.
        batches: each worker's number of samples. The numbers may differ between workers, because
            the estimate uses the mean of the inverses.

    Returns: The two estimates. None if they can't be computed, because there is only one worker, a
        batch has 0 samples, or a norm isn't finite (an overflow).
    """
    if len(batches) < 2 or min(batches) <= 0:
        return None
    if not (math.isfinite(mean_local_squared) and math.isfinite(reduced_squared)):
        return None
    small = sum(1 / b for b in batches) / len(batches)
    big = 1 / sum(batches)
    covariance = (mean_local_squared - reduced_squared) / (small - big)
    return (small * reduced_squared - big * mean_local_squared) / (small - big), covariance


class NoiseScaleEstimator:
    """Average ``|G|^2`` and ``tr(Sigma)`` separately over the steps, and estimate the noise scale.

    The two numbers are averaged before they are divided, because the ratio of two noisy numbers is
    biased. The averages are corrected for their initial value of 0. Neither number depends on the
    cluster's size, so the averages continue across resizes.

    Source: McCandlish, Kaplan, Amodei and the OpenAI Dota Team, An Empirical Model of Large-Batch
    Training, 2018, appendix A.1.

    Args:
        half_life: the number of steps after which the weight of a step is halved.

    Raises:
        ValueError: if `half_life` isn't positive.
    """

    def __init__(self, half_life: float = 20.0) -> None:
        if not half_life > 0:
            raise ValueError(f"half_life must be a positive number of steps, got {half_life!r}")
        self._keep = 0.5 ** (1 / half_life)
        self._squared_norm = 0.0
        self._covariance = 0.0
        self._weight = 0.0
        self.steps = 0
        """The number of steps that have contributed to the averages."""

    def update(self, mean_local_squared: float, reduced_squared: float, batches: Sequence[float]) -> bool:
        """Add a step to the averages; see `unbiased_estimates`.

        Args:
            mean_local_squared: the squared norm of each worker's gradient, averaged over the
                workers.
            reduced_squared: the squared norm of the mean gradient over all samples.
            batches: each worker's number of samples.

        Returns:
            Whether the step contributed to the averages.
        """
        estimates = unbiased_estimates(mean_local_squared, reduced_squared, batches)
        if estimates is None:
            return False
        new = 1 - self._keep
        self._squared_norm = self._keep * self._squared_norm + new * estimates[0]
        self._covariance = self._keep * self._covariance + new * estimates[1]
        self._weight = self._keep * self._weight + new
        self.steps += 1
        return True

    @property
    def gradient_squared_norm(self) -> float | None:
        """``|G|^2``, the squared norm of the gradient over all data; None before the first step."""
        return self._squared_norm / self._weight if self._weight else None

    @property
    def covariance_trace(self) -> float | None:
        """``tr(Sigma)``, the variance of one sample's gradient, summed over its elements.

        None before the first step.
        """
        return self._covariance / self._weight if self._weight else None

    @property
    def noise_scale(self) -> float | None:
        """``tr(Sigma) / |G|^2`` in samples; infinite if noise hides the gradient.

        None before the first step.
        """
        if not self._weight:
            return None
        if self._covariance <= 0:
            return 0.0
        return self._covariance / self._squared_norm if self._squared_norm > 0 else math.inf

    def state(self) -> dict[str, Any]:
        """Return, as JSON, the state that another worker needs to continue the averages."""
        return {k: v for k, v in vars(self).items() if k != "_keep"}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from another worker's `state`.

        Args:
            state: the value that the other worker's method `state` has returned.
        """
        vars(self).update(state)
