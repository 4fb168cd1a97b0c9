"""Records, what is written of them, and the monitor in a cluster of one. No MindSpore."""

import json
import math
import os
import urllib.request

import numpy as np
import pytest

from ms_kungfu import _core
from ms_kungfu.monitoring.monitor import Monitor, describe
from ms_kungfu.monitoring.record import StepRecord


def make(**changes):
    values = {
        "step": 3, "cluster_size": 3, "batch_size": 12, "trained_samples": 36, "loss": 0.5, "learning_rate": 0.1,
        "seconds": 0.2, "compute_seconds": (0.1, 0.19, 0.05), "communication_seconds": 0.01, "exposed_seconds": 0.005,
        "hidden_fraction": 0.5, "received_bytes": (10, 20, 30), "received_from": (0, 4, 6),
        "bandwidth_from": (0.0, 400.0, 600.0), "gradient_norm": 2.0, "gradient_variance": 1.0,
        "gradient_noise_scale": math.inf, "update_ratio": None, "monitor_seconds": 1e-4, "resize_seconds": None,
    }  # fmt: skip
    return StepRecord(**{**values, **changes})


def test_the_slowest_worker_is_that_which_computes_longest():
    assert make().slowest == 1
    assert make().slowdown == pytest.approx(1.9)
    assert make(compute_seconds=(0.1, 0.4)).slowdown == pytest.approx(4.0)
    assert make(compute_seconds=(0.0,)).slowdown == 1.0


def test_a_record_is_a_line_of_json_that_everything_can_read():
    line = json.dumps(make(loss=math.nan).to_json(), allow_nan=False)
    assert json.loads(line)["gradient_noise_scale"] == "inf"
    assert json.loads(line)["loss"] == "nan"
    assert json.loads(line)["compute_seconds"] == [0.1, 0.19, 0.05]


def test_log_names_the_slow_ranks():
    assert "slowest=1 slowdown=1.9" in describe(make())
    assert "slowest" not in describe(make(compute_seconds=(0.1, 0.1, 0.12)))


class Weights:
    """A Parameter as the monitor sees it."""

    def __init__(self, values):
        self.values = np.array(values, np.float32)

    def asnumpy(self):
        return self.values


def reduce(gradient):
    gradient = np.asarray(gradient, np.float32)
    _core.all_reduce("gradients/0", gradient, np.empty_like(gradient), 1)


def test_samples_of_all_workers_are_counted_if_known():
    monitor = Monitor(interval=2)
    monitor.begin()
    for trained in (8, 5, 8):
        monitor.step_end(4, trained=trained)
    monitor.resized(1.0)  # between two records
    monitor.step_end(4, trained=8)
    monitor.end()
    assert monitor.last.trained_samples == 29


def test_a_monitor_by_hand(tmp_path):
    seen = []
    monitor = Monitor(tmp_path / "sub" / "training.jsonl", update_ratio_interval=2, sinks=[seen.append])
    weights = Weights([3.0, 4.0])
    monitor.begin([weights])
    for step in range(1, 5):
        reduce([3.0 * step, 4.0 * step])
        weights.values = weights.values + np.float32(0.3)
        assert monitor.step_end(8, loss=1 / step, learning_rate=0.1) is seen[-1]
    monitor.end()
    assert [record.step for record in seen] == [1, 2, 3, 4]
    assert [record.trained_samples for record in seen] == [8, 16, 24, 32]
    assert [record.gradient_norm for record in seen] == pytest.approx([5.0, 10.0, 15.0, 20.0])
    assert seen[0].gradient_noise_scale is None, "one worker can't tell"
    assert seen[0].update_ratio is None
    # the second step's: (0.3, 0.3) upon (3.3, 4.3)
    assert seen[1].update_ratio == seen[2].update_ratio == pytest.approx(math.hypot(0.3, 0.3) / math.hypot(3.3, 4.3))
    lines = [json.loads(line) for line in (tmp_path / "sub" / "training.jsonl").read_text().splitlines()]
    assert lines == [record.to_json() for record in seen]
    assert monitor.cpu_seconds > 0


def test_monitor_writes_to_a_fifo_that_stays_open_from_begin(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    reader = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    monitor = Monitor(tmp_path / "fifo")
    monitor.begin()
    with pytest.raises(BlockingIOError):  # no end of the file
        os.read(reader, 1)
    record = monitor.step_end(8)
    monitor.end()
    assert json.loads(os.read(reader, 1 << 16)) == record.to_json()
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_a_replay_leaves_the_file_of_the_run_that_it_repeats(tmp_path, monkeypatch):
    measured = tmp_path / "training.jsonl"
    measured.write_text("what was measured\n")
    monkeypatch.setenv("KUNGFU_REPLAY", str(tmp_path / "orders.json"))
    monitor = Monitor(measured)
    monitor.begin()
    assert monitor.step_end(8).step == 1
    monitor.end()
    assert measured.read_text() == "what was measured\n"


def test_between_two_measurements_nothing_is_taken():
    monitor = Monitor(interval=3)
    monitor.begin()
    records = []
    for step in range(1, 8):
        reduce([1.0 * step])
        records.append(monitor.step_end(4, loss=float(step)))
    assert [None if r is None else (r.step, r.gradient_norm, r.trained_samples, r.loss) for r in records] == [
        None, None, (3, 3.0, 12, 3.0), None, None, (6, 6.0, 24, 6.0), None,
    ]  # fmt: skip
    monitor.end()
    reduce([1.0])
    assert _core.take_gradient_norms()[2] == 0


def test_only_gradients_count_as_gradients():
    _core.watch_gradients("gradients")
    _core.take_gradient_norms()
    values = np.full(3, 2.0, np.float32)
    for name in ("gradients", "gradients/1", "a/gradients/1", "b/gradients", "gradientsX", "Xgradients/1", "loss"):
        _core.all_reduce(name, values, np.empty_like(values), 0)
    _core.all_reduce("gradients", np.arange(3), np.empty(3, np.int64), 0)  # integers have no norm here
    _core.all_reduce("gradients", values, np.empty_like(values), 3)  # nor has a maximum
    brought, reduced, elements, _ = _core.take_gradient_norms()
    assert (brought, reduced, elements) == (48.0, 48.0, 12)
    _core.watch_gradients("")


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("count", [0, 1, 15, 1024, 5000])
def test_norms_are_numpys(dtype, count):
    values = np.random.default_rng(count).standard_normal(count).astype(dtype)
    _core.watch_gradients("g")
    _core.all_reduce("g", values, values, 0)  # in place: what was brought is what counts
    brought, reduced, elements, cpu_s = _core.take_gradient_norms()
    _core.watch_gradients("")
    assert brought == reduced == pytest.approx(float((values.astype(np.float64) ** 2).sum()), rel=1e-6)
    assert elements == count
    assert 0 <= cpu_s < 1


def test_a_step_of_shards_counts_by_them_with_one_worker_too():
    monitor = Monitor(interval=2)
    monitor.begin()
    for _ in range(2):
        reduce([3.0, 4.0])
        record = monitor.step_end(3, loss=0.5, shards=(4, 4, 2))  # of which this worker has computed fewer
    assert (record.batch_size, record.trained_samples, record.loss) == (10, 20, 0.5)
    assert monitor.noise_scale.steps == 1
    assert record.gradient_noise_scale == 0.0  # both norms are the same here
    monitor.end()


def test_state_reaches_another_worker():
    one, other = Monitor(), Monitor()
    one.begin()
    for _ in range(3):
        one.step_end(8)
    one.noise_scale.update(2.0, 1.5, (4, 4))
    other.restore(json.loads(json.dumps(one.state())))
    assert other.state() == one.state()
    assert other.trained_samples == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"interval": 0}, "interval must be an integer of 1 or more, got 0"),
        ({"update_ratio_interval": -1}, "update_ratio_interval must be an integer of 0 or more"),
        ({"log_interval": 1.5}, "log_interval must be an integer"),
        ({"half_life": 0}, "half_life"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Monitor(**options)


def test_metrics_are_served_to_prometheus(monkeypatch):
    pytest.importorskip("prometheus_client")
    from ms_kungfu.monitoring.endpoint import MetricsEndpoint

    records = [None]
    endpoint = MetricsEndpoint(lambda: records[0], 0)
    try:
        assert endpoint.url.startswith("http://127.0.0.1:")

        def page():
            lines = urllib.request.urlopen(endpoint.url, timeout=10).read().decode().splitlines()
            return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))

        assert page() == {}
        records[0] = make()
        metrics = page()
        assert metrics["kungfu_step"] == "3.0"
        assert metrics['kungfu_compute_seconds{rank="1"}'] == "0.19"
        assert metrics['kungfu_received_from_bytes{rank="2"}'] == "6.0"
        assert metrics["kungfu_gradient_noise_scale"] == "+Inf"
        assert "kungfu_update_ratio" not in metrics
        port = int(endpoint.url.rpartition(":")[2].partition("/")[0])
        with pytest.raises(OSError, match=f"can't use port {port}"):
            MetricsEndpoint(lambda: None, port)
    finally:
        endpoint.stop()


def test_workers_of_a_host_have_ports_of_their_own(monkeypatch):
    from ms_kungfu.monitoring import endpoint

    monkeypatch.delenv("KUNGFU_SELF", raising=False)
    assert endpoint._place() == 0
    monkeypatch.setenv("KUNGFU_SELF", "127.0.0.1:10003")
    monkeypatch.setenv("KUNGFU_PORT_RANGE", "10001-10100")
    assert endpoint._place() == 2
