"""A joiner under an unmodified Model.train: what training has changed anywhere is the same at it, or is listed here."""

from __future__ import annotations

import collections
import random
import types

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Callback, Model

from ms_kungfu import membership
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import program, state_transfer
from ms_kungfu.optimizers import KungFuMomentum
from tests.mindspore.elastic.test_state import capture, restore

# What may be something else at a joiner, and why.
ALLOWED = {
    "params.cur_epoch_num": "MindSpore sets it when the first epoch begins, and the callback then adds to it",
    "params.train_dataset_element": "the batch of the last step",
    "dataset._order._known": "the permutation of an epoch, a function of (seed, epoch), made when it is needed",
    "membership.outcomes.of_nobody._commits": "this process's reductions since somebody asked; of no step to come",
    "membership.activity": "what this process does now, for the live page; a hook of a callback captures the state",
    "membership.training_step": "for the launcher's lines, noted anew at each step's end",
    "membership.ended_steps._durations": "how long the last steps took, for kungfu-run status",
    "membership.ended_steps._began": "likewise, when the present step began",
    "membership.ended_steps.last": "likewise, the number of the last step",
    "process.told.compiled_s": "how long this process had compiled when the last step ended, for its log",
    "dataset.driven.reductions": "how many there were in the last step",
    "elastic.training.changes.steps_here": "counts from the change of the cluster, which sets it to 0 at all",
    "model._current_epoch_num": "tells MindSpore's log where it is",
    "model._current_step_num": "likewise",
}
# The same for all that lies below a path.
ALLOWED_BELOW = {
    "elastic.training.changes.statistics.": "times of this worker's last steps, for the event log",
    "elastic._assignment[": "for which the callback computed `batch_num`; compared at each step's end",
    "membership.spent.": "this worker's time in the dataset, checkpoints and compilations, for the event log",
}
# What a cell keeps of its compilation; every process compiles for itself.
COMPILATION = {
    "__compile_cell_hook__",
    "_compile_phase",
    "_compiled",
    "_is_check_and_refresh",
    "_phase_cache",
    "current_phase",
}


def leaves(roots):
    """{path: value} of every plain value, array, tensor and generator that can be reached from the roots."""
    found, seen = {}, set()

    def walk(path, item):
        if isinstance(item, (bool, int, float, str, bytes, type(None), np.generic)):
            found[path] = item
            return
        if id(item) in seen:
            return
        seen.add(id(item))
        if isinstance(item, (ms.Tensor, np.ndarray)):
            values = item.asnumpy() if isinstance(item, ms.Tensor) else item
            found[path] = (values.dtype.str, values.shape, values.tobytes())
        elif isinstance(item, ms.Generator):
            found[path] = item.get_state().asnumpy().tobytes()
        elif isinstance(item, random.Random):
            found[path] = item.getstate()
        elif isinstance(item, dict):
            for key, value in item.items():
                walk(f"{path}.{key}", value)
        elif isinstance(item, (list, tuple, collections.deque)):
            for i, value in enumerate(item):
                walk(f"{path}[{i}]", value)
        elif not isinstance(item, (type, types.ModuleType, types.FunctionType, types.MethodType)):
            walk_attributes(path, item)

    def walk_attributes(path, item):
        for name, value in getattr(item, "__dict__", {}).items():
            walk(f"{path}.{name}", value)

    for name, root in roots.items():
        walk(name, root)
    return found


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.noise = ms.Generator().manual_seed(0)
        self.register_buffer("calls", ms.Tensor(np.zeros(2), ms.float32))

    def construct(self, x):
        ms.ops.assign(self.calls, self.calls + 1)
        return self.norm(self.dense(x)) * self.calls.mean()


class Watch(Callback):
    """After the elastic callback: looks at everything, where a joiner comes in."""

    def __init__(self, job, joins_at, stops_at):
        super().__init__()
        self.job, self.joins_at, self.stops_at = job, joins_at, stops_at

    def on_train_begin(self, run_context):
        self.job.began = self.job.look(run_context.original_args())

    def on_train_step_end(self, run_context):
        params, job = run_context.original_args(), self.job
        job.net.noise._step(ms.Tensor(10, ms.int64))
        if params.cur_step_num == self.joins_at:
            job.captured = capture(job.elastic.training)
            job.went_on = job.look(params)
        if params.cur_step_num == self.stops_at:
            job.last = {
                "batch": params.train_dataset_element[0].asnumpy().tolist(),
                "loss": float(params.net_outputs),
                "parameters": [p.asnumpy().tolist() for p in job.elastic.training.parameters],
                "random": (random.random(), np.random.rand(), ms.get_rng_state().asnumpy().tolist()),
            }
            run_context.request_stop()


class Job:
    """Trains until `stops_at`. A joiner has the state of another one from `joins_at` on."""

    def __init__(self, seed, captured=None, joins_at=13, stops_at=14, dataset=ElasticDataset):
        ms.set_context(mode=ms.GRAPH_MODE)
        ms.set_seed(seed)
        ms.manual_seed(seed)
        random.seed(seed)
        self.captured, self.began, self.went_on, self.last = captured, {}, {}, {}
        self.net = Net()
        schedule = nn.ExponentialDecayLR(0.1, 0.9, 4)
        optimizer = KungFuMomentum(self.net.trainable_params(), schedule, 0.9)
        self.model = Model(self.net, nn.MSELoss(), optimizer)
        x = np.random.RandomState(0).randn(30, 3).astype(np.float32)
        source = ms.dataset.NumpySlicesDataset((x, x[:, :2]), ["x", "y"], shuffle=False)
        self.data = dataset(source, batch_size=4, seed=seed)
        self.elastic = KungFuElasticCallback(lr_rule="sqrt", global_batch_size=5)
        self.model.train(
            4, self.data, callbacks=[self.elastic, Watch(self, joins_at, stops_at)], dataset_sink_mode=False
        )

    def look(self, params):
        roots = {"process": vars(program.current()), "membership": vars(membership.current()), "dataset": self.data}
        roots |= {"elastic": dict(vars(self.elastic)), "model": self.model, "params": dict(params)}
        roots["membership"] = dict(roots["membership"])
        # This test's own callbacks and MindSpore's profiler; the model, which has its own root; the process's clock.
        for owner, others in (
            ("params", "list_callback"), ("elastic", "_others"), ("elastic", "_bound"), ("membership", "ports")
        ):  # fmt: skip
            roots[owner].pop(others)
        return leaves(roots)


@pytest.fixture
def as_joining_worker(monkeypatch):
    """``as_joining_worker(veteran, **options)``: the job of a worker that joins with what the veteran captured."""

    def forget():
        program.use(program.Program())

    forget()

    def join(veteran, **options):
        forget()
        monkeypatch.setattr(membership, "is_joining", lambda: True)
        monkeypatch.setattr(state_transfer, "share_state", lambda now: restore_into(now, veteran.captured))
        return Job(seed=2, captured=veteran.captured, **options)

    def restore_into(now, captured):
        restore(types.SimpleNamespace(training_state=now), captured)
        return True

    return join


def left_behind(veteran, joining):
    """The paths of what training has changed at the veteran and is something else at the joiner, all of them."""
    before, after, there = veteran.began, veteran.went_on, joining.began
    changed = [path for path in before.keys() | after.keys() if before.get(path) != after.get(path)]
    assert "dataset._cursor.epoch" in changed
    assert "process.calls" not in changed
    return {
        path.partition("[")[0] if path.partition("[")[0] in ALLOWED else path
        for path in changed
        if after.get(path) != there.get(path)
    }


def unlisted(paths):
    known = {*ALLOWED, *(path for path in paths if path.startswith(tuple(ALLOWED_BELOW)))}
    return sorted(path for path in paths if path not in known and not COMPILATION & set(path.split(".")))


def test_nothing_that_training_changes_is_left_behind(as_joining_worker):
    veteran = Job(seed=1)
    joining = as_joining_worker(veteran)
    paths = left_behind(veteran, joining)
    assert unlisted(paths) == []
    assert set(ALLOWED) - paths == set(), "listed, and carried all the same"
    assert [below for below in ALLOWED_BELOW if not any(path.startswith(below) for path in paths)] == []
    assert joining.last == veteran.last


def test_new_state_that_is_not_carried_over_is_found(as_joining_worker):
    class Counting(ElasticDataset):
        commits = 0

        def commit(self, participants=None):
            super().commit(participants)
            self.commits += 1

    veteran = Job(seed=1, dataset=Counting)
    assert unlisted(left_behind(veteran, as_joining_worker(veteran, dataset=Counting))) == ["dataset.commits"]
