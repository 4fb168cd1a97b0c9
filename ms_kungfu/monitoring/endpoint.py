"""Serve the monitor's last record to Prometheus."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from typing import Any, Callable, cast

from ms_kungfu import env, runtime
from ms_kungfu.monitoring.record import StepRecord

_log = logging.getLogger("ms_kungfu.monitoring")

# For each metric: its name, its help text, and a function that reads its value from a record.
_GAUGES: tuple[tuple[str, str, Callable[[StepRecord], float | None]], ...] = (
    ("step", "Steps done since training started.", lambda r: r.step),
    ("cluster_size", "Number of workers.", lambda r: r.cluster_size),
    ("batch_size", "Samples in a step, over all workers.", lambda r: r.batch_size),
    ("trained_samples", "Samples trained since training started.", lambda r: r.trained_samples),
    ("loss", "Training loss, mean over the workers.", lambda r: r.loss),
    ("learning_rate", "Learning rate.", lambda r: r.learning_rate),
    ("step_seconds", "Duration of a step.", lambda r: r.seconds),
    ("communication_seconds", "Time in collectives during a step.", lambda r: r.communication_seconds),
    (
        "exposed_communication_seconds",
        "Time in collectives that the backward pass doesn't hide.",
        lambda r: r.exposed_seconds,
    ),
    (
        "hidden_communication_ratio",
        "Fraction of the time in collectives that the backward pass hides.",
        lambda r: r.hidden_fraction,
    ),
    ("gradient_norm", "Norm of the averaged gradient.", lambda r: r.gradient_norm),
    (
        "gradient_variance",
        "Mean squared distance of a worker's gradient from the mean gradient.",
        lambda r: r.gradient_variance,
    ),
    ("gradient_noise_scale", "Simple noise scale, in samples.", lambda r: r.gradient_noise_scale),
    ("update_ratio", "Norm of an update divided by the norm of the weights.", lambda r: r.update_ratio),
    ("monitor_seconds", "CPU time that monitoring takes in a step.", lambda r: r.monitor_seconds),
    ("resize_seconds", "Duration of the last change of the cluster.", lambda r: r.resize_seconds),
)
_BY_RANK: tuple[tuple[str, str, Callable[[StepRecord], tuple[float, ...]]], ...] = (
    ("compute_seconds", "Time outside of collectives during a worker's step.", lambda r: r.compute_seconds),
    ("received_bytes", "Bytes that a worker receives in a step.", lambda r: r.received_bytes),
    ("received_from_bytes", "Bytes that this worker receives from a rank in a step.", lambda r: r.received_from),
    (
        "bandwidth_from_bytes_per_second",
        "Bytes that this worker receives from a rank, per second of communication.",
        lambda r: r.bandwidth_from,
    ),
)


class MetricsEndpoint:
    """Serve the last record to Prometheus at ``http://127.0.0.1:PORT/metrics``.

    A thread of prometheus_client serves the requests, and sleeps between them. Each worker on a
    host has its own port: the worker in slot i uses ``port + i``. By default, only programs on this
    machine can connect; `address` changes that. Requests need no authentication.

    Args:
        last: a function that returns the last record, or None before the first record.
        port: the port of the host's first worker. With 0, each worker uses any free port.
        address: the address on which the server listens.

    Raises:
        ImportError: if prometheus_client is missing.
        OSError: if the port can't be used.
    """

    def __init__(self, last: Callable[[], StepRecord | None], port: int, address: str = "127.0.0.1") -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise ImportError("the metrics endpoint needs prometheus_client: pip install ms-kungfu[metrics]") from None
        self._last = last
        registry = CollectorRegistry()
        registry.register(cast(Any, self))
        wanted = port + _place() if port else 0
        try:
            self._server, self._thread = start_http_server(wanted, address, registry)
        except OSError as error:
            raise OSError(f"the metrics endpoint can't use port {wanted} on {address}: {error.strerror}") from None
        self.url = f"http://{address}:{self._server.server_port}/metrics"
        _log.info("metrics: url=%s", self.url)

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of the last record; prometheus_client calls this method."""
        from prometheus_client.core import GaugeMetricFamily

        record = self._last()
        if record is None:
            return
        for name, text, value_of in _GAUGES:
            value = value_of(record)
            if value is not None and not math.isnan(value):
                yield GaugeMetricFamily(f"kungfu_{name}", text, value=value)
        for name, text, values_of in _BY_RANK:
            family = GaugeMetricFamily(f"kungfu_{name}", text, labels=["rank"])
            for rank, value in enumerate(values_of(record)):
                family.add_metric([str(rank)], value)
            yield family
        yield GaugeMetricFamily("kungfu_rank", "Rank of this worker.", value=runtime.current_rank())

    def stop(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _place() -> int:
    """Return this worker's slot on its host.

    The slot is computed from the worker's port. While this worker is running, no other worker on
    the host has the same port.
    """
    own, ports = env.SELF.get(), env.PORT_RANGE.get()
    return int(own.rpartition(":")[2]) - (ports[0] if ports else 10000) if own else 0
