"""Report each step of training to the monitor, and call the policies."""

from __future__ import annotations

from typing import Any

from ms_kungfu import runtime
from ms_kungfu.elastic.options import Options
from ms_kungfu.elastic.policy import as_policy
from ms_kungfu.elastic.policy_runner import PolicyRunner
from ms_kungfu.elastic.program import Training, is_behind
from ms_kungfu.monitoring.monitor import Monitor


class Measuring:
    """The monitor and the policies. If the program uses neither, the methods do nothing."""

    def __init__(self, training: Training, options: Options, total_samples: int | None) -> None:
        self._training = training
        self.monitor = options.monitor or next((o.monitor for o in training.optimizers if hasattr(o, "monitor")), None)
        self.policies: PolicyRunner | None = None
        policies = as_policy(options.policy)
        if policies.parts:
            self.monitor = self.monitor or Monitor(update_ratio_interval=0)
            self.policies = PolicyRunner(policies, self.monitor, options.evict, total_samples)

    @property
    def wanted_size(self) -> int:
        """The size in a policy's pending request; the current size if no request is pending."""
        pending = None if self.policies is None else self.policies.pending_size
        return runtime.current_cluster_size() if pending is None else pending

    def begin(self) -> None:
        """Start the monitor. Called when training begins, or continues, on this worker."""
        if self.monitor is not None and not self._training.should_stop:
            # Don't select Parameters by `requires_grad`: MindSpore also sets this flag for an optimizer's moments.
            parameters = [p for optimizer in self._training.optimizers for p in optimizer.parameters]
            self.monitor.begin(parameters, self._training.step)

    def expect_epochs(self, count: int) -> None:
        """Compute the total number of samples from the number of epochs, unless the program has given the total."""
        dataset = self._training.dataset
        if self.policies is not None and self.policies.total_samples is None and dataset is not None:
            self.policies.total_samples = count * dataset.total_samples

    def ask(self, hook: str) -> None:
        """Call the policies' hook `hook`, and carry out their decision (collective)."""
        if self.policies is not None:
            self.policies.hook(hook, self._training)

    def step_end(self, loss: Any, samples: int | None, trained: int | None) -> None:
        """Report the end of a step (collective). `samples`: this worker's samples. `trained`: all workers' samples."""
        if self.monitor is None:
            return
        from ms_kungfu.elastic.learning_rates import learning_rate_of  # loads MindSpore

        optimizers, step, dataset = self._training.optimizers, self._training.step, self._training.dataset
        if samples is None:
            samples = next((o.device_batch_size for o in optimizers if getattr(o, "device_batch_size", None)), 0)
        self.monitor.gradient_scale = float(getattr(optimizers[0], "loss_scale", 1.0)) if optimizers else 1.0
        shards = () if dataset is None else dataset.step_shards
        rate = learning_rate_of(optimizers, step - 1)
        record = self.monitor.step_end(samples, loss, rate, step, shards, trained)
        if self.policies is not None:
            self.policies.stepped(record)

    def take_size(self) -> int | None:
        """Return the size that a policy has chosen since the last call of this method; None if there is none."""
        return None if self.policies is None else self.policies.take_size()

    def on_resized(self, size: int) -> None:
        """Report that the cluster has changed. Called before the training state is transferred."""
        if self.policies is not None:
            self.policies.on_resized(size, self._training.dataset)

    def took(self, seconds: float) -> None:
        """Report how long the last change of the cluster has delayed training."""
        if self.policies is not None:
            self.policies.took(seconds)
        if self.monitor is not None:
            self.monitor.resized(seconds)

    def end(self) -> None:
        """Report the end of a training call."""
        if self.policies is not None and not is_behind():
            self.policies.after_train(self._training)
        if self.monitor is not None:
            self.monitor.end()
