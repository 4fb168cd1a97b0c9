"""Monitor ``Model.train`` on a cluster that doesn't change."""

from __future__ import annotations

from typing import Any

from mindspore.train import Callback

from ms_kungfu.elastic.learning_rates import learning_rate_of
from ms_kungfu.monitoring.monitor import Monitor
from ms_kungfu.trained.inventory import collect_optimizers


class MonitorCallback(Callback):
    """Measure each step of ``Model.train`` (docs/monitoring.md).

    Pass options, as in ``MonitorCallback(jsonl="training.jsonl")``, or a `Monitor`. If the program uses
    a `KungFuElasticCallback`, pass the monitor to that callback instead.

    Args:
        monitor: the monitor to use. The default is the optimizer's monitor
            (`MonitorGradientNoiseScaleOptimizer`), or a new monitor if the optimizer has none.
        options: the arguments of a new `Monitor`.

    Raises:
        ValueError: both a monitor and options are given.
    """

    def __init__(self, monitor: Monitor | None = None, **options: Any) -> None:
        super().__init__()
        if monitor is not None and options:
            raise ValueError(f"give a monitor or the options of a new monitor, not both: {', '.join(options)}")
        self._optimizers: list[Any] = []
        self.monitor = Monitor(**options) if options and monitor is None else monitor

    def on_train_begin(self, run_context: Any) -> None:
        """Begin to measure.

        Args:
            run_context: the context that MindSpore passes.
        """
        params = run_context.original_args()
        if self.monitor is None:
            self.monitor = getattr(params.optimizer, "monitor", None) or Monitor()
        connect_summary(self.monitor, params)
        self._optimizers = collect_optimizers([params.train_network])
        self.monitor.begin([p for optimizer in self._optimizers for p in optimizer.parameters])

    def on_train_step_end(self, run_context: Any) -> None:
        """Measure the step.

        Args:
            run_context: the context that MindSpore passes.
        """
        params, monitor = run_context.original_args(), self.monitor
        assert monitor is not None
        optimizers = self._optimizers
        monitor.gradient_scale = float(getattr(optimizers[0], "loss_scale", 1.0)) if optimizers else 1.0
        rate = learning_rate_of(optimizers, params.cur_step_num - 1)
        shards = getattr(params.train_dataset, "step_shards", ())
        monitor.step_end(batch_rows(params), params.net_outputs, rate, shards=shards)

    def on_train_end(self, run_context: Any) -> None:
        """Close the monitor's files.

        Args:
            run_context: the context that MindSpore passes.
        """
        if self.monitor is not None:
            self.monitor.end()


def batch_rows(params: Any) -> int:
    """Return the number of samples in this worker's last batch."""
    element = params.get("train_dataset_element")
    if isinstance(element, dict):
        element = list(element.values())
    first = element[0] if isinstance(element, (tuple, list)) and element else element
    shape = getattr(first, "shape", ())
    return int(shape[0]) if shape else 0


def connect_summary(monitor: Monitor, params: Any) -> None:
    """Let the monitor write its records to the SummaryRecord of a SummaryCollector, if the program uses one."""
    if monitor.summary is None:
        collectors = (c for c in params.get("list_callback") or () if type(c).__name__ == "SummaryCollector")
        monitor.summary = getattr(next(collectors, None), "_record", None)
