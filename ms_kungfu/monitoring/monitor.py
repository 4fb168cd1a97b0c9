"""Measure each step, combine the measurements of all workers, and publish them."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

import numpy as np

from ms_kungfu import _core, env, runtime
from ms_kungfu._checks import at_least
from ms_kungfu._files import open_regular
from ms_kungfu.agreement import gather_living
from ms_kungfu.monitoring.endpoint import MetricsEndpoint
from ms_kungfu.monitoring.noise_scale import NoiseScaleEstimator
from ms_kungfu.monitoring.record import StepRecord

_log = logging.getLogger("ms_kungfu.monitoring")

Sink = Callable[[StepRecord], None]
_SUMMARY = (
    "loss",
    "learning_rate",
    "cluster_size",
    "batch_size",
    "seconds",
    "communication_seconds",
    "exposed_seconds",
    "hidden_fraction",
    "slowdown",
    "gradient_norm",
    "gradient_variance",
    "gradient_noise_scale",
    "update_ratio",
)


class Monitor:
    """Measure training, and record the same values on all workers; see docs/monitoring.md.

    Pass the monitor to `MonitorCallback`, `KungFuElasticCallback` or `ElasticTraining`. In any other
    loop, call `begin` once, and then `step_end` after each step. In measured steps, `step_end` is a
    collective. The monitor measures the reduced gradients. If the program scales the loss, set
    `gradient_scale`; otherwise the monitor reports the norms of the scaled gradients. The scaling
    doesn't affect the noise scale.

    Args:
        jsonl: a file to which rank 0 writes each record as a line of JSON. The file may be a FIFO
            that another process reads. While the FIFO is full, training waits.
        interval: the number of steps between two measurements. Times and bytes are the mean over
            these steps.
        half_life: the number of measured steps after which a measurement has half of its initial
            weight in the noise scale.
        update_ratio_interval: the number of steps between two measurements of the update-to-weight
            ratio; 0 turns these measurements off. Each measurement copies the weights.
        log_interval: the number of records between two lines in the log. Rank 0 writes these lines to
            the logger ``ms_kungfu.monitoring`` at level INFO.
        summary: an open MindSpore ``SummaryRecord``, to which the monitor writes each record.
        metrics_port: the first port of `MetricsEndpoint`; by default ``KUNGFU_METRICS_PORT``.
        sinks: functions that every worker calls with each record.
        gradients: a text that identifies the all-reduces of gradients. Their names contain this
            text between two slashes.
    """

    def __init__(
        self,
        jsonl: str | os.PathLike[str] | None = None,
        *,
        interval: int = 1,
        half_life: float = 20.0,
        update_ratio_interval: int = 100,
        log_interval: int = 50,
        summary: Any = None,
        metrics_port: int | None = None,
        sinks: Sequence[Sink] = (),
        gradients: str = "gradients",
    ) -> None:
        self.interval = at_least(1, interval, "interval")
        self.summary = summary
        self.noise_scale = NoiseScaleEstimator(half_life)
        self.gradient_scale = 1.0
        """The factor by which the reduced gradients are larger than the gradients of the unscaled loss."""
        self.step = 0
        """The number of steps done since training started."""
        self.trained_samples = 0
        self.last: StepRecord | None = None
        """The newest record."""
        # A replay must not overwrite the measurements of the original run.
        self._jsonl = None if jsonl is None or env.REPLAY.get() is not None else Path(jsonl)
        self._file: Any = None
        self._sinks = list(sinks)
        self._log_interval, self._records = at_least(1, log_interval, "log_interval"), 0
        self._update_ratio_interval = at_least(0, update_ratio_interval, "update_ratio_interval")
        self._weights: list[Any] = []
        self._before: list[Any] | None = None
        self._update_ratio: float | None = None
        self._gradients = gradients
        self._metrics_port = metrics_port
        self._endpoint: Any = None
        self._steps = self._samples = 0  # the numbers of steps and samples since the last record
        self._began = 0.0  # when the first step after the last record began
        self._traffic: tuple[int, int, float, float, list[int]] = (0, 0, 0.0, 0.0, [0])
        self._resize_seconds: float | None = None
        self._own_communication = 0.0
        self._cpu_s = 0.0
        self.cpu_seconds = 0.0
        """CPU time that this worker has spent on monitoring."""

    # -- calls by the training loop ------------------------------------------------------------------------------------

    def begin(self, weights: Sequence[Any] = (), step: int | None = None) -> None:
        """Begin to measure, at the start of training or after a change of the cluster.

        Args:
            weights: the Parameters whose updates the monitor measures.
            step: the number of steps done since training started. With None, the monitor uses its own
                count.
        """
        runtime.init()
        if step is not None:
            self.step = step
        self._weights = list(weights)
        self._open()
        self._go_on()

    def resized(self, seconds: float) -> None:
        """Record a change of the cluster that took `seconds`; no step includes this time."""
        self._resize_seconds = seconds
        self._go_on()

    def step_end(
        self,
        samples: int = 0,
        loss: Any = None,
        learning_rate: float | None = None,
        step: int | None = None,
        shards: Sequence[int] = (),
        trained: int | None = None,
    ) -> StepRecord | None:
        """Count a step, and measure it if a measurement is due.

        At each `interval`-th step, this call is a collective.

        Args:
            samples: the number of samples on which this worker trained in the step. If it is 0, the
                noise scale isn't measured.
            loss: this worker's loss, a number or a tensor with one element.
            learning_rate: the learning rate of this step.
            step: the number of the step that has just ended, counted from 1. By default, the monitor
                counts the steps.
            shards: the number of samples in each shard, if the step was partitioned into shards
                (`ElasticDataset.step_shards`). The monitor then ignores `samples`. It computes the
                statistics of the gradients over the shards, so they don't depend on the cluster size.
            trained: the number of samples on which all workers together trained in this step, if it
                is known (`ElasticDataset.commit`). If it isn't, the workers exchange their numbers
                of samples, and a worker that fails before the exchange isn't counted.

        Returns:
            The new record, or None if this step wasn't measured.
        """
        # Wait, because operations that MindSpore has queued belong to this step. A NumPy program hasn't loaded
        # ms_kungfu.ops.
        ops = sys.modules.get("ms_kungfu.ops")
        if ops is not None:
            ops.wait_for_queue()
        now, cpu = time.perf_counter(), time.thread_time()
        self.step = self.step + 1 if step is None else step
        self._steps += 1
        if trained is not None:
            self.trained_samples += trained
        else:
            self._samples += sum(shards) or samples
        record = None
        if self.step % self.interval == 0:
            record = self._record(now, samples, loss, learning_rate, shards)
        elif self.interval > 1:
            self._watch()
        self._snapshot()
        self._cpu_s += time.thread_time() - cpu
        return record

    def communicated(self, seconds: float) -> None:
        """Add `seconds` of communication that the program did without ms_kungfu's runtime."""
        self._own_communication += seconds

    def end(self) -> None:
        """Close the files at the end of training; `begin` opens them again."""
        _core.watch_gradients("")
        self._before = None
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._endpoint is not None:
            self._endpoint.stop()
            self._endpoint = None

    def state(self) -> dict[str, Any]:
        """Return, as JSON, the state that a joining worker needs to continue with the same statistics."""
        return {
            "step": self.step,
            "trained_samples": self.trained_samples,
            "noise_scale": self.noise_scale.state(),
            "resize_seconds": self._resize_seconds,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from another worker's `state`."""
        self.step, self.trained_samples = state["step"], state["trained_samples"]
        self.noise_scale.restore(state["noise_scale"])
        self._resize_seconds = state["resize_seconds"]

    # -- a step -------------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        self._began = time.perf_counter()
        self._traffic = _core.traffic()
        self._steps = self._samples = 0
        self._own_communication = 0.0
        self._watch()
        self._snapshot()

    def _watch(self) -> None:
        """Enable the computation of gradient norms if the next step will be measured."""
        _core.watch_gradients(self._gradients if (self.step + 1) % self.interval == 0 else "")

    def _record(
        self, now: float, samples: int, loss: Any, learning_rate: float | None, shards: Sequence[int]
    ) -> StepRecord:
        mine, steps = _core.traffic(), self._steps
        before, self._traffic = self._traffic, mine
        seconds, self._began = (now - self._began) / steps, now
        same = len(before[4]) == len(mine[4])
        received = [(new - old) // steps if same else 0 for new, old in zip(mine[4], before[4] if same else mine[4])]
        brought, reduced, elements, norms_cpu_s = _core.take_gradient_norms()
        self._cpu_s += norms_cpu_s
        spent, self._cpu_s = self._cpu_s, 0.0
        unseen, self._own_communication = self._own_communication, 0.0
        self.cpu_seconds += spent
        self._measure_update()
        own = {
            "seconds": seconds,
            "squared_norm": brought if elements else math.nan,
            "batch": samples,
            "samples": self._samples,
            "exposed": (mine[3] - before[3] + unseen) / steps,
            "busy": (mine[2] - before[2] + unseen) / steps,
            "loss": number_of(loss),
            "received": sum(received),
            "monitor": spent / steps,
            "resize": math.nan if self._resize_seconds is None else self._resize_seconds,
        }
        trained, self._steps, self._samples = self._samples, 0, 0
        # The first entry of a living worker's row isn't 0, because each step takes time. Ten float32 values make the
        # message fill one cache line.
        everyones = gather_living(np.array(list(own.values()), np.float32), "kungfu/monitor", nonzero=0)
        rows = np.array(list(everyones.values()), np.float64)
        told = dict(zip(own, rows.T))
        exposed, busy = told["exposed"], told["busy"]
        scale = self.gradient_scale**2
        # With shards, all workers have the same value, and the mean of equal values is exactly that value.
        local, reduced = float(told["squared_norm"].mean()) / scale, reduced / scale
        if shards:  # use values that don't depend on how the shards are assigned to workers
            total, average_loss = float(sum(shards)), float(told["loss"][0])
            self.trained_samples += trained
            self.noise_scale.update(local, reduced, shards)
        else:
            total = float(told["batch"].sum())
            weights = told["batch"] / total if total else np.full(len(rows), 1 / len(rows))
            average_loss = float(told["loss"] @ weights)
            self.trained_samples += int(told["samples"].sum())
            self.noise_scale.update(local, reduced, told["batch"].tolist())
        communication = max(0.0, float(busy.min()))  # rounding may have made the time negative
        resize = float(told["resize"].max())
        self.last = record = StepRecord(
            step=self.step,
            cluster_size=len(rows),
            batch_size=int(total),
            trained_samples=self.trained_samples,
            loss=average_loss if not math.isnan(average_loss) else None,
            learning_rate=learning_rate,
            seconds=float(told["seconds"].max()),
            compute_seconds=tuple(np.maximum(told["seconds"] - exposed, 0.0).tolist()),
            communication_seconds=communication,
            exposed_seconds=float(exposed.min()),
            hidden_fraction=max(0.0, 1 - float(exposed.sum() / busy.sum())) if busy.sum() > 0 else 0.0,
            received_bytes=tuple(int(v) for v in told["received"]),
            received_from=tuple(received),
            bandwidth_from=tuple(v / communication if communication > 0 else 0.0 for v in received),
            gradient_norm=math.sqrt(reduced) if elements and math.isfinite(reduced) else None,
            gradient_variance=max(local - reduced, 0.0) if elements and math.isfinite(local) else None,
            gradient_noise_scale=self.noise_scale.noise_scale,
            update_ratio=self._update_ratio,
            monitor_seconds=float(told["monitor"].max()),
            resize_seconds=resize if not math.isnan(resize) else None,
        )
        self._watch()
        self._hand_out(record)
        return record

    # -- update-to-weight ratio ---------------------------------------------------------------------------------------

    def _snapshot(self) -> None:
        """Copy the weights if the update of the next step will be measured."""
        every = self._update_ratio_interval
        due = bool(every and self._weights) and (self.step + 1) % every == 0
        if due and (self.step + 1) % self.interval == 0:
            self._before = [np.array(p.asnumpy()) for p in self._weights]

    def _measure_update(self) -> None:
        before, self._before = self._before, None
        if before is None or self.step % self._update_ratio_interval:
            return
        moved = weight = 0.0
        for old, parameter in zip(before, self._weights):
            moved += _squared_norm(parameter.asnumpy() - old)
            weight += _squared_norm(old)
        self._update_ratio = math.sqrt(moved / weight) if weight > 0 else None

    # -- outputs of records --------------------------------------------------------------------------------------------

    def _open(self) -> None:
        port = env.METRICS_PORT.get() if self._metrics_port is None else self._metrics_port
        if port is not None and self._endpoint is None:
            self._endpoint = MetricsEndpoint(lambda: self.last, port)
        if self._jsonl is not None and self._file is None and self.step == 0 and runtime.current_rank() == 0:
            # Only the job's first rank 0 truncates the file. A worker that becomes rank 0 later appends to the file.
            # Keep the file open: if it is a FIFO and this process closes it, the reader sees an end of file.
            self._file = self._open_jsonl(os.O_TRUNC)

    def _open_jsonl(self, flag: int = 0) -> Any:
        assert self._jsonl is not None
        self._jsonl.parent.mkdir(parents=True, exist_ok=True)
        fd = open_regular(self._jsonl, os.O_WRONLY | os.O_CREAT | os.O_APPEND | flag, devices=True)
        return os.fdopen(fd, "a", buffering=1)

    def _hand_out(self, record: StepRecord) -> None:
        self._records += 1
        if runtime.current_rank() == 0:
            if self._jsonl is not None:
                if self._file is None:
                    self._file = self._open_jsonl()
                self._file.write(json.dumps(record.to_json()) + "\n")
            if self._records % self._log_interval == 0 and _log.isEnabledFor(logging.INFO):
                _log.info("monitor: %s", describe(record))
        if self.summary is not None:
            _write_summary(self.summary, record)
        for sink in self._sinks:
            sink(record)


def _write_summary(summary: Any, record: StepRecord) -> None:
    """Add a record's values as scalars ``kungfu/...`` to an open SummaryRecord."""
    import mindspore as ms

    for name in _SUMMARY:
        value = getattr(record, name)
        if value is not None and math.isfinite(value):
            summary.add_value("scalar", f"kungfu/{name}", ms.Tensor(np.float32(value)))
    summary.record(record.step)


def describe(record: StepRecord) -> str:
    """Return a record as the key=value pairs of one log line."""
    parts = [f"step={record.step}"]
    if record.loss is not None:
        parts.append(f"loss={record.loss:.4g}")
    parts += [
        f"cluster_size={record.cluster_size} batch_size={record.batch_size} step_ms={record.seconds * 1e3:.1f}",
        f"communication_ms={record.communication_seconds * 1e3:.2f} hidden={record.hidden_fraction:.0%}",
    ]
    if record.cluster_size > 1 and record.slowdown > 1.5:
        parts.append(f"slowest={record.slowest} slowdown={record.slowdown:.1f}")
    if record.gradient_noise_scale is not None:
        parts.append(f"gradient_noise_scale={record.gradient_noise_scale:.3g}")
    if record.update_ratio is not None:
        parts.append(f"update_ratio={record.update_ratio:.2g}")
    return " ".join(parts)


def number_of(loss: Any) -> float:
    """Return a loss as a number; NaN if there is no loss. The loss may be a tensor, or the first of several outputs."""
    while isinstance(loss, (tuple, list)) and loss:
        loss = loss[0]
    if loss is None or isinstance(loss, (tuple, list)):
        return math.nan
    return float(np.asarray(loss.asnumpy() if hasattr(loss, "asnumpy") else loss).mean())


def _squared_norm(array: Any) -> float:
    flat = np.asarray(array).ravel()
    if flat.dtype.itemsize < 4 or flat.dtype.kind != "f":
        flat = flat.astype(np.float32)
    return float(np.dot(flat, flat))
