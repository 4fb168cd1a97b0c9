"""The job's metrics for Prometheus, which are computed from its events and its status."""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

from ms_kungfu import job_events as e
from ms_kungfu.launcher.state.account import JobAccount

_MISSING = "the metrics need prometheus_client: pip install 'ms-kungfu[metrics]'"
_DECISIONS = ("continue", "shrink", "replace", "fail", "finish")


class JobMetrics:
    """Compute metrics from events. All calls must come from one thread."""

    def __init__(self) -> None:
        self._account = JobAccount()
        self._steps = self._resizes = 0
        self._failures = collections.Counter[str]()
        self._last: e.Statistics | None = None
        self._waiting: list[float | None] = []

    def add(self, event: e.Event) -> None:
        self._account.add(event)
        if isinstance(event, e.Statistics):
            self._steps += event.steps
            self._last = event
        elif isinstance(event, e.RankStatistics):
            self._waiting = event.waiting
        elif isinstance(event, e.VersionCommitted):
            self._resizes += 1
            self._waiting = []
        elif isinstance(event, e.WorkerFailed) and event.standing != "standby":
            self._failures[event.decision] += 1

    def render(self, status: dict[str, Any]) -> tuple[bytes, str]:
        """Return the metrics as text, and the content type. Raises ImportError if prometheus_client isn't installed."""
        try:
            from prometheus_client import CollectorRegistry
            from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
        except ImportError:
            raise ImportError(_MISSING) from None
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Collector(self, status))
        return generate_latest(registry), CONTENT_TYPE_LATEST

    def families(self, status: dict[str, Any]) -> Iterator[Any]:
        """Yield the metrics as objects of prometheus_client."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        def gauge(name: str, what: str, value: float | None) -> Any:
            family = GaugeMetricFamily(f"kungfu_job_{name}", what)
            if value is not None:
                family.add_metric([], value)
            return family

        account, last, cluster = self._account, self._last, status.get("cluster") or {}
        yield gauge("workers", "Workers of the committed cluster version", cluster.get("size"))
        yield gauge("version", "The committed cluster version", cluster.get("version"))
        yield CounterMetricFamily("kungfu_job_steps", "Committed steps", value=self._steps)
        yield CounterMetricFamily("kungfu_job_samples", "Samples of the committed steps", value=account.samples)
        yield gauge("goodput_ratio", "Share of the wall time that went into committed steps", account.goodput)
        loss = None if account.loss is None else float(account.loss)
        yield gauge("loss", "The last loss of the lowest rank", loss)
        failures = CounterMetricFamily("kungfu_job_failures", "Failed workers, by decision", labels=["decision"])
        for decision in _DECISIONS:
            failures.add_metric([decision], self._failures[decision])
        yield failures
        yield CounterMetricFamily("kungfu_job_resizes", "Committed changes of the cluster", value=self._resizes)
        yield CounterMetricFamily("kungfu_job_stalls", "Stalls that have ended", value=account.stalls)
        yield CounterMetricFamily("kungfu_job_stalled_seconds", "Duration of these stalls", value=account.stalled_s)
        times = GaugeMetricFamily("kungfu_job_step_seconds", "Seconds per step in the last second", labels=["quantile"])
        for quantile, value in (("0.5", last.p50), ("0.99", last.p99)) if last is not None else ():
            if value is not None:
                times.add_metric([quantile], value)
        yield times
        waiting = GaugeMetricFamily("kungfu_job_waiting_ratio", "Share of its time that a rank waited for others",
                                    labels=["rank"])  # fmt: skip
        for rank, share in enumerate(self._waiting):
            if share is not None:
                waiting.add_metric([str(rank)], share)
        yield waiting


class _Collector:
    def __init__(self, metrics: JobMetrics, status: dict[str, Any]) -> None:
        self._metrics, self._status = metrics, status

    def collect(self) -> Iterator[Any]:
        """Yield the metrics. prometheus_client calls this method."""
        return self._metrics.families(self._status)
