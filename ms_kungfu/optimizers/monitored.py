"""Wrap an optimizer to monitor training, as in KungFu."""

from __future__ import annotations

from typing import Any

from ms_kungfu.monitoring.monitor import Monitor
from ms_kungfu.optimizers._synchronising import Delegating


class _Monitored(Delegating):
    """An optimizer wrapper with an attribute `monitor`, which is a `Monitor`."""

    def __init__(
        self, optimizer: Any, device_batch_size: int | None = None, monitor_interval: int = 1, **options: Any
    ) -> None:
        super().__init__(optimizer)
        self.device_batch_size = device_batch_size
        self.monitor = Monitor(interval=monitor_interval, **options)

    def construct(self, gradients):  # type: ignore[no-untyped-def]  # read by MindSpore's parser
        """Update the parameters with the wrapped optimizer.

        Args:
            gradients: a tuple of tensors, this worker's gradients in the parameters' order.

        Returns:
            What the optimizer returns.
        """
        return self.optimizer(gradients)


class MonitorGradientNoiseScaleOptimizer(_Monitored):
    """Wrap an optimizer and measure the gradient noise scale with a `Monitor`.

    `MonitorCallback`, `KungFuElasticCallback` and `ElasticTraining` use this optimizer's monitor
    without further calls. In another training loop, call ``optimizer.monitor.begin()`` before the first
    step, and ``optimizer.monitor.step_end(samples=...)`` after each step.

    Args:
        optimizer: an optimizer that averages or sums the gradients over the workers, such as
            ``KungFuMomentum``.
        device_batch_size: number of samples per worker in a step, which applies if neither the dataset
            nor the loop provides the number.
        monitor_interval: number of steps between two measurements.
        options: arguments of `Monitor`.
    """

    def gradient_noise_scale(self) -> float | None:
        """Return the gradient noise scale; see `ms_kungfu.monitoring.noise_scale`.

        Returns:
            A number of samples, or None before the first measurement.
        """
        return self.monitor.noise_scale.noise_scale


class MonitorGradientVarianceOptimizer(_Monitored):
    """Wrap an optimizer and measure the variance of the gradients with a `Monitor`.

    `MonitorCallback`, `KungFuElasticCallback` and `ElasticTraining` use this optimizer's monitor
    without further calls. In another training loop, call ``optimizer.monitor.begin()`` before the first
    step, and ``optimizer.monitor.step_end(samples=...)`` after each step.

    Args:
        optimizer: an optimizer that averages or sums the gradients over the workers, such as
            ``KungFuMomentum``.
        device_batch_size: number of samples per worker in a step, which applies if neither the dataset
            nor the loop provides the number.
        monitor_interval: number of steps between two measurements.
        options: arguments of `Monitor`.
    """

    def gradient_variance(self) -> float | None:
        """Return the variance of the gradients in the last measured step.

        Returns:
            The mean squared distance of a worker's gradient from the mean over the workers, or None before
            the first measurement.
        """
        return None if self.monitor.last is None else self.monitor.last.gradient_variance
