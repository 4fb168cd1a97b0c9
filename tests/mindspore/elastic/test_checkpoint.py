"""Checkpoints of a cluster of one: what is in the file, what survives, and what goes on from it."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import Callback, CheckpointConfig, EarlyStopping, History, Model, ModelCheckpoint, serialization

from ms_kungfu import membership
from ms_kungfu.callbacks import KungFuElasticCallback
from ms_kungfu.callbacks.epoch_outputs import EpochOutputs
from ms_kungfu.dataset import ElasticDataset
from ms_kungfu.elastic import ElasticTraining, program
from ms_kungfu.elastic.checkpoint import CheckpointFolder, restore_tensors, take_snapshot
from ms_kungfu.elastic.misuse_warnings import MisuseWarnings
from ms_kungfu.elastic.state import TrainingState
from ms_kungfu.errors import KungFuError
from ms_kungfu.monitoring import Monitor
from tests.conftest import long


@pytest.fixture
def new_process(monkeypatch):
    """A function after which training begins as in a process of its own."""

    def forget():
        program.use(program.Program())

    forget()
    return forget


def parameter(values, name, dtype=ms.float32):
    return ms.Parameter(ms.Tensor(values, dtype), name=name)


def of(*parameters, **buffers):
    return TrainingState(parameters, (), buffers)


def files(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith(".job-"))


KINDS = [
    ([1.5, -2.25], ms.float32),
    ([0.1, 3e4], ms.float16),
    ([1.5, 2.0], ms.bfloat16),
    ([0.1], ms.float64),
    (7, ms.int64),
    ([[1, 2], [3, 2**31 - 1]], ms.int32),
    ([200], ms.uint8),
    ([True, False], ms.bool_),
    (2.5, ms.float32),
]


def test_values_of_every_kind_come_back(tmp_path):
    saved = of(*(parameter(v, f"p{i}", t) for i, (v, t) in enumerate(KINDS)), calls=ms.Tensor([3.0, 4.0]))
    folder = CheckpointFolder(tmp_path)
    folder.save(take_snapshot(12, saved, {"answer": [1, 0.1, "ü"]}))
    folder.wait()
    assert files(tmp_path) == ["step-00000012.ckpt"]
    path, entries, host = folder.load()
    assert host == {"answer": [1, 0.1, "ü"]}
    zeros = of(
        *(parameter(np.zeros_like(v), f"p{i}", t) for i, (v, t) in enumerate(KINDS)), calls=ms.Tensor([0.0, 0.0])
    )
    restore_tensors(zeros, entries, path)
    for before, after in zip(saved.parameters, zeros.parameters):
        assert (before.asnumpy() == after.asnumpy()).all(), before.dtype
    assert zeros.buffers["calls"].asnumpy().tolist() == [3.0, 4.0]


def test_a_snapshot_is_not_changed_by_the_next_step(tmp_path):
    weight = parameter([1.0, 2.0], "w")
    snapshot = take_snapshot(1, of(weight), {})
    ms.ops.assign(weight, ms.Tensor([5.0, 6.0]))
    folder = CheckpointFolder(tmp_path)
    folder.save(snapshot)
    folder.wait()
    assert folder.load()[1]["w"].asnumpy().tolist() == [1.0, 2.0]


def test_parameters_of_one_name_are_distinguished(tmp_path):
    saved, empty = (of(parameter([a], "global_step"), parameter([b], "global_step")) for a, b in ((3, 4), (0, 0)))
    folder = CheckpointFolder(tmp_path)
    folder.save(take_snapshot(1, saved, {}))
    folder.wait()
    path, entries, _ = folder.load()
    restore_tensors(empty, entries, path)
    assert [float(p.asnumpy()[0]) for p in empty.parameters] == [3, 4]


def test_mindspore_itself_reads_the_file(tmp_path):
    net = nn.Dense(3, 2)
    folder = CheckpointFolder(tmp_path)
    folder.save(take_snapshot(1, of(*net.get_parameters()), {}))
    folder.wait()
    other = nn.Dense(3, 2)
    ms.load_param_into_net(other, ms.load_checkpoint(str(tmp_path / "step-00000001.ckpt")))
    assert (other.weight.asnumpy() == net.weight.asnumpy()).all()


def test_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    order = []
    replace = os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: order.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
    monkeypatch.setattr(os, "replace", lambda *names: (order.append("renamed"), replace(*names)))
    folder = CheckpointFolder(tmp_path)
    folder.save(take_snapshot(5, of(parameter([1.0], "w")), {}))
    folder.wait()
    (file,) = files(tmp_path)
    assert order == [f"{folder._unfinished}{file}", "renamed", tmp_path.name]


def test_the_last_ones_are_kept(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (5, 10, 15, 20):
        folder.save(take_snapshot(step, of(parameter([step], "w")), {}))
        folder.wait()
    assert files(tmp_path) == ["step-00000015.ckpt", "step-00000020.ckpt"]


def test_training_does_not_wait_for_a_slow_disk(tmp_path, monkeypatch, caplog):
    begun, go_on = threading.Event(), threading.Event()
    write = ms.save_checkpoint

    def slow(*args, **kwargs):
        begun.set()
        assert go_on.wait(30)
        write(*args, **kwargs)

    monkeypatch.setattr(ms, "save_checkpoint", slow)
    folder = CheckpointFolder(tmp_path)
    folder.save(take_snapshot(1, of(parameter([1.0], "w")), {}))
    assert begun.wait(30)
    with caplog.at_level(logging.WARNING):
        for step in (2, 3):
            folder.save(take_snapshot(step, of(parameter([step], "w")), {}))
    go_on.set()
    folder.wait()
    assert files(tmp_path) == ["step-00000001.ckpt", "step-00000003.ckpt"]
    assert "checkpoint skipped: step=2 " in caplog.text


FULL_DISK = """
import logging, resource, sys
import numpy as np, mindspore as ms
from ms_kungfu.elastic.checkpoint import CheckpointFolder, take_snapshot
from ms_kungfu.elastic.state import TrainingState

logging.basicConfig(stream=sys.stdout)
folder = CheckpointFolder(sys.argv[1], keep=1)
state = TrainingState([ms.Parameter(ms.Tensor(np.arange(100_000, dtype=np.float32)), name="w")], ())
folder.save(take_snapshot(1, state, {}))
folder.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, resource.RLIM_INFINITY))  # the system refuses to write more
folder.save(take_snapshot(2, state, {}))
folder.wait()
print("went on")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print("left", [path.name for path in folder.paths()], folder.load()[1]["w"].asnumpy()[-1])
folder.save(take_snapshot(3, state, {}))
folder.wait()
"""


def test_a_full_disk_is_a_warning_and_the_earlier_one_stays(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(FULL_DISK)
    folder = tmp_path / "checkpoints"
    done = subprocess.run(
        [sys.executable, program, folder], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert "went on" in done.stdout
    assert "checkpoint failed: step=2 " in done.stdout
    assert "File too large" in done.stdout
    assert "left ['step-00000001.ckpt'] 99999.0" in done.stdout
    assert files(folder) == ["step-00000003.ckpt"]
    path, entries, _ = CheckpointFolder(folder).load()
    assert (path.name, entries["w"].asnumpy()[-1]) == ("step-00000003.ckpt", 99_999)


def with_host(folder, text):
    """A checkpoint of step 1, and one of step 2 whose JSON is `text`."""
    folder.save(take_snapshot(1, of(parameter([1.0], "w")), {"step": 1}))
    folder.wait()
    entries = [{"name": "w", "data": ms.Tensor([2.0])}]
    ms.save_checkpoint(entries, str(folder.folder / "step-00000002.ckpt"), append_dict={"kungfu": text}, crc_check=True)


def test_a_file_from_before_formats_were_numbered_is_read(tmp_path):
    folder = CheckpointFolder(tmp_path)
    with_host(folder, '{"components": {}, "own": []}')
    assert folder.load()[2] == {"components": {}, "own": []}


def test_a_file_of_a_newer_format_is_refused_by_its_version_and_left_alone(tmp_path):
    folder = CheckpointFolder(tmp_path)
    with_host(folder, '{"format": 3, "written_by": "7.8.9", "components": {}}')
    with pytest.raises(
        KungFuError, match=r"step-00000002.ckpt has format 3 and was written by ms_kungfu 7\.8\.9, .* 1 to 2"
    ):
        folder.load()
    assert files(tmp_path) == ["step-00000001.ckpt", "step-00000002.ckpt"]


def test_a_folder_that_is_not_shared_is_noticed(tmp_path):
    folder = CheckpointFolder(tmp_path)
    assert folder.newest() == (0, 0)
    folder.save(take_snapshot(3, of(parameter([1.0], "w")), {}))
    folder.wait()
    assert folder.newest() == (1, 3)
    folder.check_is_shared({0: (1, 3), 1: [1, 3]}, 0)
    folder.check_is_shared({1: (1, 3), 2: (0, 0)}, 1)  # a host without what the others have
    folder.check_is_shared({}, 0)
    with pytest.raises(
        KungFuError, match="rank 2 finds a checkpoint of step 5 in .*, but rank 0 finds step 3: share the folder"
    ):
        folder.check_is_shared({0: (1, 3), 1: (1, 3), 2: (1, 5)}, 0)
    with pytest.raises(
        KungFuError, match="rank 2 finds a checkpoint of step 2 in .*, but rank 0 finds step 3: share the folder"
    ):
        folder.check_is_shared({0: (1, 3), 2: (2, 2)}, 0)
    with pytest.raises(KungFuError, match="but rank 1 finds no checkpoint: share the folder"):
        folder.check_is_shared({1: (0, 0), 2: (1, 5)}, 1)


def saved(folder, step):
    folder.save(take_snapshot(step, of(parameter([float(step)], "w")), {"job": folder.job}))
    folder.wait()


def test_checkpoint_of_an_abandoned_job_does_not_count(tmp_path, caplog, monkeypatch):
    """Its host slept: the job went on elsewhere from its last checkpoint, and then it wakes."""
    given_up, goes_on = (CheckpointFolder(tmp_path, keep=2) for _ in range(2))
    given_up.job = given_up.take_job()
    saved(given_up, 10)
    goes_on.job = goes_on.take_job()
    assert (given_up.job, goes_on.job) == (1, 2)
    saved(goes_on, 12)
    saved(given_up, 14)
    assert 'job=1 reason="job 2 has begun to use the folder"' in caplog.text
    assert files(tmp_path) == ["step-00000010.ckpt", "step-00000012.job2.ckpt"]
    # It slept just between that look and its writing.
    monkeypatch.setattr(given_up, "_newest_job", lambda: 1)
    for step in (12, 14):
        saved(given_up, step)
        assert goes_on.load()[2] == {"job": 2}
        assert goes_on.newest() == (2, 12)
    saved(goes_on, 13)
    assert files(tmp_path) == ["step-00000012.job2.ckpt", "step-00000013.job2.ckpt"]


def test_jobs_that_begin_at_once_take_different_numbers(tmp_path):
    taken, start = [], threading.Barrier(8)

    def take():
        start.wait()
        taken.append(CheckpointFolder(tmp_path).take_job())

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == list(range(1, 9))
    assert CheckpointFolder(tmp_path).take_job() == 9


def test_a_job_follows_those_of_which_there_are_only_files(tmp_path):
    saved(CheckpointFolder(tmp_path), 3)  # of an earlier ms_kungfu, or a copy without what begins with a dot
    assert CheckpointFolder(tmp_path).take_job() == 2


def test_a_folder_that_nothing_can_be_written_to_is_a_warning(tmp_path, caplog):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert CheckpointFolder(blocked / "folder").take_job() == 1
    assert "checkpoint failed: folder=" in caplog.text


def test_a_damaged_file_gives_way_to_the_one_before(tmp_path, caplog):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(take_snapshot(step, of(parameter(np.arange(1000.0), "w")), {"step": step}))
        folder.wait()
    newest = tmp_path / "step-00000002.ckpt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.unlink()
    newest.write_bytes(content)
    assert folder.load()[2] == {"step": 1}
    assert files(tmp_path) == ["step-00000001.ckpt", "step-00000002.ckpt.damaged"]
    assert (
        f'checkpoint damaged: path={newest} renamed={newest.name}.damaged next=step-00000001.ckpt error="'
    ) in caplog.text
    (tmp_path / "step-00000001.ckpt").unlink()
    (tmp_path / "step-00000001.ckpt").write_bytes(b"")
    for _ in range(2):  # a scheduler restarts the job
        with pytest.raises(KungFuError, match="none of the 2 checkpoints in .* can be read; restore one as step-"):
            folder.load()
    assert files(tmp_path) == ["step-00000001.ckpt.damaged", "step-00000002.ckpt.damaged"]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), MemoryError("no memory")])
def test_intact_file_that_is_not_read_keeps_its_name(tmp_path, monkeypatch, caplog, error):
    folder = CheckpointFolder(tmp_path)
    for step in (1, 2):
        folder.save(take_snapshot(step, of(parameter([1.0], "w")), {"step": step}))
        folder.wait()
    read, failing = serialization._ckpt_fs.open, ["step-00000002.ckpt"]

    def opened(path, *args):
        if os.path.basename(path) in failing:
            raise error
        return read(path, *args)

    monkeypatch.setattr(serialization._ckpt_fs, "open", opened)
    assert folder.load()[2] == {"step": 1}
    assert f'path={tmp_path / "step-00000002.ckpt"} next=step-00000001.ckpt error="{error}"' in caplog.text
    failing.append("step-00000001.ckpt")
    with pytest.raises(KungFuError, match="none of the 2 checkpoints"):
        folder.load()
    failing.clear()
    assert folder.load()[2] == {"step": 2}


def test_a_fifo_and_a_nested_document_give_way_to_the_one_before(tmp_path, caplog):
    folder = CheckpointFolder(tmp_path)
    folder.save(take_snapshot(1, of(parameter([1.0], "w")), {"step": 1}))
    folder.wait()
    os.mkfifo(tmp_path / "step-00000002.ckpt")  # MindSpore would wait for its writer
    ms.save_checkpoint(
        [{"name": "w", "data": ms.Tensor([1.0])}], str(tmp_path / "step-00000003.ckpt"), crc_check=True,
        append_dict={"kungfu": "[" * 5000},
    )  # fmt: skip
    assert folder.load()[2] == {"step": 1}
    assert "it is a FIFO, not a regular file" in caplog.text
    assert "nested" in caplog.text


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        ([parameter([1.0, 2.0], "w"), parameter([1.0], "b")], "'b' is in this program only"),
        ([], "'w' is in the checkpoint only"),
        ([parameter([1.0, 2.0, 3.0], "w")], r"'w' is Float32\(2,\) in it and Float32\(3,\) in this program"),
        ([parameter([1.0, 2.0], "w", ms.float16)], "'w' is Float32"),
    ],
)
def test_another_programs_checkpoint_is_refused(tmp_path, now, sentence):
    folder = CheckpointFolder(tmp_path)
    folder.save(take_snapshot(1, of(parameter([5.0, 6.0], "w")), {}))
    folder.wait()
    path, entries, _ = folder.load()
    with pytest.raises(KungFuError, match=sentence):
        restore_tensors(of(*now), entries, path)


@pytest.mark.parametrize("batch", [4, 8])
def test_other_list_of_rates_is_refused_with_its_likely_cause(tmp_path, batch):
    def training(size):
        data = SimpleNamespace(name="dataset", capture=lambda: {"batch": [None, size]})
        return TrainingState((parameter([0.1] * (16 // size), "learning_rate"),), (data,), {})

    folder = CheckpointFolder(tmp_path)
    folder.save(take_snapshot(1, training(2), {}))
    folder.wait()
    path, entries, _ = folder.load()
    with pytest.raises(KungFuError) as refused:
        restore_tensors(training(8), entries, path, {"batch": [None, batch]})
    cause = (
        "The list's length probably follows from the batch size, which was global_batch_size=4 and is "
        "global_batch_size=8 in this program: resume with global_batch_size=4, then call "
        "ElasticDataset.set_batch_size(global_batch_size=8)"
    )
    assert "resume with the original list of rates" in str(refused.value)
    assert (cause in str(refused.value)) == (batch == 4)


class Stop(Callback):
    """Stops after a step, as if the machine went then, and notes what each step did."""

    def __init__(self, at):
        super().__init__()
        self.at, self.seen = at, []

    def on_train_step_end(self, run_context):
        params = run_context.original_args()
        weights = [p.asnumpy().tolist() for p in params.train_network.get_parameters()]
        batch = params.train_dataset_element[0].asnumpy().ravel().tolist()
        where = (params.cur_epoch_num, params.cur_step_num)
        self.seen.append((where, batch, float(params.net_outputs), weights, np.random.rand()))
        if params.cur_step_num == self.at:
            run_context.request_stop()


class QuickDisk(Callback):
    """Each checkpoint is written before the next step: one that a busy machine leaves out is another test's."""

    def __init__(self, elastic):
        super().__init__()
        self.elastic = elastic

    def on_train_step_end(self, run_context):
        if self.elastic.training._checkpoints.folder is not None:
            self.elastic.training._checkpoints.folder.wait()


def model_and_data(seed):
    net = nn.SequentialCell(nn.Dense(1, 3), nn.BatchNorm1d(3), nn.Dense(3, 1))
    optimizer = nn.Momentum(net.trainable_params(), [0.1 / (i + 1) for i in range(20)], 0.9)
    x = np.arange(20, dtype=np.float32)[:, None] / 20
    data = ElasticDataset(ms.dataset.NumpySlicesDataset((x, 2 * x), ["x", "y"], shuffle=False), 4, seed=seed)
    return Model(net, nn.MSELoss(), optimizer), data


def train(stop_at=None, seed=1, calls=1, before=(), after=(), fresh=False, **options):
    """Trains 4 epochs of 5 steps, in as many calls, with callbacks before and after the elastic one. `fresh`: each call
    has a network, an optimizer and a dataset of its own."""
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(seed)
    (model, data), stop = model_and_data(seed), Stop(stop_at)
    elastic = KungFuElasticCallback(**options)
    for _ in range(calls):
        if fresh:
            model, data = model_and_data(seed)
        callbacks = [stop, *before, elastic, QuickDisk(elastic), *after]
        model.train(4 // calls, data, callbacks=callbacks, dataset_sink_mode=False)
    if elastic.training._checkpoints.folder is not None:
        elastic.training._checkpoints.folder.wait()
    return stop.seen


@pytest.mark.parametrize(("calls", "fresh"), [(1, False), long(2, False), (2, True)])
def test_a_resumed_training_goes_on_bit_for_bit(tmp_path, new_process, calls, fresh):
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 3, "resume": True, "calls": calls, "fresh": fresh}
    whole = train(calls=calls, fresh=fresh)
    assert len(whole) == 20
    new_process()
    assert train(stop_at=14 if calls == 1 else None, **options)[:14] == whole[:14]  # with nothing to resume from
    for newer in tmp_path.glob("step-0000001[58].ckpt"):
        newer.unlink()
    new_process()
    assert train(seed=2, **options) == whole[12:]


class Losses(Callback):
    """Of each epoch, as a program prints them."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_epoch_end(self, run_context):
        params = run_context.original_args()
        self.seen.append((params.cur_epoch_num, float(params.net_outputs.asnumpy())))


@pytest.mark.parametrize(("is_older", "calls"), [(False, 1), (True, 2), long(False, 2), long(True, 1)])
def test_resume_at_the_end_of_an_epoch_ends_it_with_its_outputs(tmp_path, new_process, monkeypatch, calls, is_older):
    whole, losses, history = Losses(), Losses(), History()
    if is_older:  # a checkpoint without the outputs
        monkeypatch.setattr(EpochOutputs, "keep", lambda *_: None)
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 5, "resume": True, "calls": calls}
    train(before=[whole], **options)
    assert len(whole.seen) == 4
    for newer in (path for path in tmp_path.glob("step-*.ckpt") if "00015" in path.name or "00020" in path.name):
        newer.unlink()
    new_process()
    train(before=[losses], after=[history], **options)
    assert losses.seen == whole.seen[2 if is_older else 1 :], "as if it had never been interrupted"
    assert None not in history.history["net_output"]


@pytest.mark.parametrize(("first", "calls"), [(True, 4), (False, 1), long(True, 1), long(False, 4)])
def test_resume_restores_callback_state_and_keeps_program_arguments(tmp_path, new_process, first, calls):
    """The first loss is the best, and epochs 2 and 3 don't better it by 100. Until step 12 every second was saved."""

    def go(folder, every, patience, **options):
        config = CheckpointConfig(save_checkpoint_steps=every)
        stopping = EarlyStopping("loss", patience=patience, min_delta=100)
        callbacks = [ModelCheckpoint(folder, str(tmp_path / folder), config), stopping]
        options["before" if first else "after"] = callbacks
        seen = train(checkpoint_dir=tmp_path / "elastic", checkpoint_every=3, resume=True, calls=calls, **options)
        return [step for (_, step), *_ in seen], stopping

    go("old", every=2, patience=50)
    for newer in (tmp_path / "elastic").glob("step-0000001[58].ckpt"):
        newer.unlink()
    shutil.rmtree(tmp_path / "old")
    new_process()
    steps, stopping = go("new", every=3, patience=2)
    assert not (tmp_path / "old").exists()
    assert stopping.patience == 2
    if calls == 1:  # each call begins anew, with its steps and what callbacks have learnt
        assert steps == [13, 14, 15]
        saved = ["new-3_5.ckpt"] if first else ["new-3_3.ckpt", "new-3_5.ckpt"]  # those that stand last saw 11 steps
        assert [name for name in files(tmp_path / "new") if name.endswith(".ckpt")] == saved


def test_a_resume_under_other_conditions_says_what_differs(tmp_path, new_process, monkeypatch, caplog):
    def training(shards=4):
        data = ElasticDataset(ms.dataset.NumpySlicesDataset([1.0] * 8, ["x"]), global_batch_size=8, shards=shards)
        net = nn.Dense(1, 1)
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        return ElasticTraining(net, optimizer, dataset=data, checkpoint_dir=tmp_path, resume=True)

    first = training()
    first.begin()
    first.checkpoint()
    first._checkpoints.folder.wait()
    (entry,) = (ms.load_checkpoint(str(path))["kungfu"] for path in tmp_path.glob("*.ckpt"))
    found = json.loads(entry)["conditions"]
    assert {"mindspore", "numpy", "ms_kungfu", "isa", "cpu", "cores", "shards", "global_batch", "seed"} == set(found)
    assert (found["shards"], found["global_batch"], found["seed"], found["cores"]) == (4, 8, 0, 1)
    new_process()
    training().begin()
    assert "numeric environment differs: " not in caplog.text
    new_process()
    monkeypatch.setattr("ms_kungfu.dataset.elastic.of_machine", lambda cores: {**found, "isa": "MMX"})
    training(shards=2).begin()
    (told,) = (record.message for record in caplog.records if "numeric environment differs: " in record.message)
    assert f"instruction set {found['isa']} there and MMX here" in told
    assert "shards" not in told, "the dataset continues with the checkpoint's shards"
    (told,) = (record.message for record in caplog.records if "Training continues with" in record.message)
    assert "global_batch_size=8, shards=4 instead of the program's global_batch_size=8, shards=2." in told


def test_a_checkpoint_begins_after_ledgers_are_on_the_disk(tmp_path, new_process, monkeypatch):
    order = []

    class Folder(CheckpointFolder):
        def save(self, snapshot):
            order.append("checkpoint")

    source = ms.dataset.NumpySlicesDataset([1.0] * 8, ["x"], shuffle=False)
    data = ElasticDataset(source, global_batch_size=2, ledger=tmp_path / "ledger")
    net = nn.Dense(1, 1)
    optimizer, folder = nn.Momentum(net.trainable_params(), 0.1, 0.9), Folder(tmp_path / "checkpoints")
    elastic = ElasticTraining(net, optimizer, dataset=data, checkpoint_dir=folder, checkpoint_every=2)
    sync = data._recording.ledger.sync
    monkeypatch.setattr(data._recording.ledger, "sync", lambda: (order.append("ledger"), sync()))
    for _ in elastic.epochs(1):
        for _ in data:
            elastic.step_end()
    assert order == ["ledger", "checkpoint"] * 2
    lines = [json.loads(line) for line in next((tmp_path / "ledger").iterdir()).read_text().splitlines()]
    folder, number = lines[1]["training"]
    assert [line["training"] for line in lines[1:]] == [[folder, number]] * 5  # four steps and the epoch's end
    assert number == 1


@pytest.mark.parametrize("there", [{"batch_size": 2}, {"global_batch_size": 4}])
def test_a_resume_says_whose_batch_goes_on(tmp_path, new_process, caplog, there):
    def training(**batch):
        data = ElasticDataset(ms.dataset.NumpySlicesDataset([1.0] * 8, ["x"]), **batch)
        net = nn.Dense(1, 1)
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        return ElasticTraining(net, optimizer, dataset=data, checkpoint_dir=tmp_path, resume=True)

    first = training(**there)
    first.begin()
    first.checkpoint()
    first._checkpoints.folder.wait()
    for again in (there, {"global_batch_size": 2}):
        new_process()
        resumed = training(**again)
        resumed.begin()
        told = [record.message.partition(". ")[2] for record in caplog.records if "the checkpoint's" in record.message]
        ((name, count),) = there.items()
        text = (
            f"Training continues with the checkpoint's {name}={count} instead of the program's global_batch_size=2. "
            "To change the batch size, call ElasticDataset.set_batch_size(global_batch_size=2) on all workers at the "
            "beginning of an epoch"
        )
        assert told == ([] if again == there else [text])
    data = resumed.dataset
    for epoch in resumed.epochs(2):
        if epoch == 1:
            data.set_batch_size(global_batch_size=2)
        assert {len(x) for (x,) in data if resumed.step_end()} == {next(iter(there.values())) if epoch == 0 else 2}


def test_loop_without_step_end_is_warned_of_once(new_process, caplog, monkeypatch):
    monkeypatch.setattr(MisuseWarnings, "_told", set())
    data, net = ElasticDataset(ms.dataset.NumpySlicesDataset([1.0] * 8, ["x"]), 2), nn.Dense(1, 1)
    training = ElasticTraining(net, nn.Momentum(net.trainable_params(), 0.1, 0.9), dataset=data)
    training.begin()
    assert membership.current().ended_steps.last is not None, "the launcher knows that training has begun"
    for _ in training.epochs(2):
        assert len(list(data)) == 4
    assert caplog.text.count("misuse: check=steps. ") == 1
    caplog.clear()
    MisuseWarnings._told.clear()
    for _ in training.epochs(2):
        for _ in data:
            training.step_end()
    assert "misuse: check=steps. " not in caplog.text


def test_a_resume_with_other_callbacks_says_what_differs(tmp_path, new_process, caplog):
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 10, "resume": True}
    train(after=[EarlyStopping("loss", patience=50)], **options)
    new_process()
    train(after=[History()], **options)
    assert 'checkpoint differs: callbacks="EarlyStopping/0, History/0"' in caplog.text
    assert "check=callbacks" not in caplog.text


@pytest.mark.parametrize("first", [{"monitor": True}, {}], ids=["it watched", "it did not"])
def test_a_resume_may_watch_the_training_in_another_way(tmp_path, new_process, caplog, first):
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 10, "resume": True}

    def watched(monitor=False, **more):
        return train(**options, **more, **({"monitor": Monitor(update_ratio_interval=0)} if monitor else {}))

    whole = watched(**first)
    (tmp_path / "step-00000020.ckpt").unlink()
    new_process()
    assert watched(monitor=not first) == whole[10:]
    assert 'state="monitor"' in caplog.text


def test_checkpoints_are_written_at_the_steps_asked_for(tmp_path, new_process):
    train(checkpoint_dir=tmp_path / "new" / "folder", checkpoint_every=4, keep_checkpoints=9)
    assert files(tmp_path / "new" / "folder") == [f"step-000000{step:02}.ckpt" for step in (4, 8, 12, 16, 20)]


def test_a_folder_of_another_training_is_not_overwritten(tmp_path, new_process):
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 10}
    train(**options)
    new_process()
    with pytest.raises(KungFuError, match="has 2 checkpoints of an earlier training; resume from them"):
        train(**options)
    assert files(tmp_path) == ["step-00000010.ckpt", "step-00000020.ckpt"]


def test_unfinished_files_of_a_killed_job_are_removed(tmp_path, new_process):
    (tmp_path / ".unfinished-77-step-00000005.tmp").write_bytes(b"half")
    train(stop_at=2, checkpoint_dir=tmp_path, checkpoint_every=2)
    assert files(tmp_path) == ["step-00000002.ckpt"]


def test_a_checkpoint_whenever_the_program_wants(tmp_path, new_process):
    net = nn.Dense(1, 1)
    elastic = ElasticTraining(net, checkpoint_dir=tmp_path, resume=True)
    elastic.begin()
    elastic.step_end()
    elastic.checkpoint()
    elastic._checkpoints.folder.wait()
    assert files(tmp_path) == ["step-00000001.ckpt"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"checkpoint_every": 5}, "checkpoint_every needs a folder"),
        ({"resume": True}, "resume needs a folder"),
        ({"checkpoint_dir": "x", "checkpoint_every": 0}, "checkpoint_every must be an integer of 1 or more, got 0"),
        (
            {"checkpoint_dir": "x", "keep_checkpoints": True},
            "keep_checkpoints must be an integer of 1 or more, got True",
        ),
        ({"checkpoint_dir": __file__, "resume": True}, "checkpoint_dir: .* is not a folder"),
    ],
)
def test_bad_arguments_are_one_sentence(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        KungFuElasticCallback(**options)


@pytest.mark.long  # the next test ends with this failure
def test_the_last_checkpoint_is_written_anew_where_its_writer_dies(run_elastic, tmp_path):
    reports = run_elastic("deaths.py", "end", str(tmp_path / "checkpoints"), np=3, ledger=False)
    assert files(tmp_path / "checkpoints") == ["step-00000001.ckpt"]
    assert "checkpoint lost: step=1 " in reports.output


@pytest.mark.parametrize("place", [long("texts"), long("first"), "write"])
def test_failure_during_a_checkpoint_keeps_survivors_and_the_checkpoint(run_elastic, tmp_path, place):
    folder = tmp_path / "checkpoints"
    reports = run_elastic("deaths.py", place, str(folder), np=3, ledger=False)
    steps = reports.by_step("step")
    last = max(steps)
    assert list(steps) == list(range(1, last + 1))
    assert len(steps[last]) == 2, "both survivors train on to the end"
    assert all(len({row["parameters"] for row in rows}) == 1 for rows in steps.values())
    written = files(folder)
    if place == "write":
        lost = re.search(r"checkpoint lost: step=4 next_step=(\d+) ", reports.output)
        assert lost, reports.output
        assert written == [f"step-{int(lost[1]):08}.ckpt", f"step-{last + 1:08}.ckpt"]
        assert f"checkpoint lost: step={last + 1} " in reports.output
    else:
        assert written == ["step-00000004.ckpt"]


def test_checkpoint_of_a_later_call_is_read_at_first_and_in_that_call(tmp_path, new_process, monkeypatch):
    def call():
        net = nn.Dense(1, 1)
        optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
        training = ElasticTraining(net, optimizer, checkpoint_dir=tmp_path, resume=True)
        training.begin()
        return training

    for _ in range(4):
        training = call()
    training.checkpoint()
    training._checkpoints.folder.wait()
    new_process()
    loads, load = [], CheckpointFolder.load
    monkeypatch.setattr(CheckpointFolder, "load", lambda folder: (loads.append(folder), load(folder))[1])
    behind, read = [], []
    for _ in range(5):
        behind.append(call().should_stop)
        read.append(len(loads))
    assert behind == [True] * 3 + [False] * 2
    assert read == [1, 1, 1, 2, 2]
