"""Several workers that save to one path, as one process plays them."""

from __future__ import annotations

import logging
import os
import socket
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn
from mindspore.train import serialization

from ms_kungfu.ops import _saving


@pytest.fixture
def worker(monkeypatch):
    """This process is one, under `kungfu-run`."""
    monkeypatch.setenv("KUNGFU_BROKER", "none")
    monkeypatch.setattr(_saving, "_told", False)
    monkeypatch.setattr(_saving, "_written", {})


def net_of(value):
    net = nn.Dense(3, 2)
    net.weight.set_data(ms.Tensor(np.full((2, 3), value, np.float32)))
    return net


def saved(path):
    return ms.load_checkpoint(str(path), format=Path(path).suffix[1:])["weight"].asnumpy().tolist()


def amid(monkeypatch, name, what):
    """Calls `what` once, in the midst of the next call of this function of MindSpore's."""
    real, called = getattr(serialization, name), []

    def hooked(*arguments, **named):
        if not called:
            called.append(True)
            what()
        return real(*arguments, **named)

    monkeypatch.setattr(serialization, name, hooked)


@pytest.mark.parametrize("suffix", ["ckpt", "safetensors"])
def test_file_stays_whole_while_another_worker_saves(worker, tmp_path, monkeypatch, suffix):
    path = tmp_path / f"best.{suffix}"
    ms.save_checkpoint(net_of(1), str(path), format=suffix)
    writes = "_write_parameter_bytes_data" if suffix == "ckpt" else "save_file"
    seen = []

    def look():
        seen.append(saved(path))
        assert not (tmp_path / "best.tmp").exists(), "no name that another worker has, too"

    amid(monkeypatch, writes, look)
    ms.save_checkpoint(net_of(2), str(path), format=suffix)
    assert seen == [[[1.0] * 3] * 2]
    assert saved(path) == [[2.0] * 3] * 2
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_two_saves_at_once_leave_the_last_one_whole(worker, tmp_path, monkeypatch):
    path = tmp_path / "best.ckpt"
    amid(monkeypatch, "_write_parameter_bytes_data", lambda: ms.save_checkpoint(net_of(2), str(path)))
    ms.save_checkpoint(net_of(1), str(path))
    assert saved(path) == [[1.0] * 3] * 2


def test_next_save_removes_what_a_killed_worker_has_left(worker, tmp_path):
    path = tmp_path / "best.ckpt"
    ours, theirs = [], []
    with _saving._folder_beside(path) as folder:
        ours.append(folder)
        left = folder.name.replace(f"-{os.getpid()}-", "-4194305-")  # over the largest number of a process
        for name, of in ((left, theirs), (left.replace(socket.gethostname(), "elsewhere"), ours)):
            (tmp_path / name).mkdir()
            (tmp_path / name / "half").touch()
            of.append(tmp_path / name)
        with _saving._folder_beside(path):
            assert all(each.exists() for each in ours), "another thread's, and another host's"
            assert not any(each.exists() for each in theirs)


def test_failed_save_leaves_the_file_and_nothing_else(worker, tmp_path, monkeypatch):
    path = tmp_path / "best.ckpt"
    ms.save_checkpoint(net_of(1), str(path))

    def fail():
        raise OSError("full")

    amid(monkeypatch, "_write_parameter_bytes_data", fail)
    with pytest.raises(OSError, match="full"):
        ms.save_checkpoint(net_of(2), str(path))
    assert saved(path) == [[1.0] * 3] * 2
    assert [each.name for each in tmp_path.iterdir()] == ["best.ckpt"]


@pytest.mark.parametrize("given", ["net", "new/net.mindir"])
def test_export_leaves_a_whole_file_at_its_path(worker, tmp_path, monkeypatch, given):
    monkeypatch.chdir(tmp_path)
    seen = []
    amid(monkeypatch, "_save_together", lambda: seen.append(list(tmp_path.rglob("*.mindir"))))
    ms.export(net_of(1), ms.Tensor(np.ones((1, 3), np.float32)), file_name=given, file_format="MINDIR")
    assert seen == [[]]
    (found,) = tmp_path.rglob("*.mindir")
    assert found == tmp_path / Path(given).with_suffix(".mindir")
    nn.GraphCell(ms.load(str(found)))


@pytest.mark.parametrize(("speaks", "msrun"), [(True, None), (False, None), (True, "3")])
def test_path_that_another_worker_writes_too_is_warned_of_once(worker, tmp_path, monkeypatch, caplog, speaks, msrun):
    monkeypatch.setattr(_saving.membership, "speaks_for_all", lambda: speaks)
    if msrun is not None:
        monkeypatch.setenv("KUNGFU_MSRUN_SIZE", msrun)
    path = tmp_path / "best.ckpt"
    path.write_bytes(b"of an earlier writer")
    with caplog.at_level(logging.WARNING):
        ms.save_checkpoint(net_of(1), str(path))
        ms.save_checkpoint(net_of(1), str(path))
        assert not caplog.records, "one after the other, or the same one again"
        for _ in range(2):
            path.unlink()
            path.write_bytes(b"of another worker, or a copy")
            ms.save_checkpoint(net_of(1), str(path))
    told = [record.getMessage() for record in caplog.records if "after this worker had saved it" in record.getMessage()]
    assert len(told) == (1 if speaks and msrun is None else 0)
    assert all(f"path={path}. Another process" in each for each in told)


def test_outside_of_a_worker_saving_is_that_of_mindspore(tmp_path, monkeypatch):
    monkeypatch.delenv("KUNGFU_BROKER", raising=False)
    names = []
    amid(monkeypatch, "_write_parameter_bytes_data", lambda: names.extend(each.name for each in tmp_path.iterdir()))
    ms.save_checkpoint(net_of(1), str(tmp_path / "best.ckpt"))
    assert names == ["best.tmp"]
