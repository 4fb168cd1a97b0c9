"""The LeNet example: as a user starts it, and its parts."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import long

EXAMPLE = Path(__file__).parents[2] / "examples" / "lenet-elastic"
INSTALLED = pytest.mark.skipif(
    shutil.which("kungfu-run", path=str(Path(sys.executable).parent)) is None, reason="not installed"
)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    for name in ("data", "plot", "model", "log", "arguments"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.fixture
def folder(tmp_path):
    """A copy of the example: a run writes beside its files, and others run at the same time."""
    copy = tmp_path / "examples" / "lenet-elastic"
    return shutil.copytree(
        EXAMPLE, copy, ignore=shutil.ignore_patterns("data", "data-drawn", "out", "logs", "__pycache__")
    )


def run(folder, *command, timeout_s=280, **environment):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env={**os.environ, "PATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout_s,
    )


def needs(*modules):
    for module in modules:
        pytest.importorskip(module)


@INSTALLED
@pytest.mark.parametrize(
    ("arguments", "changes", "epochs", "learnt"),
    [(("--epochs", "2", "--schedule", "20:2,70:1"), [1, 2, 1], 2, 0.7), long((), [1, 2, 4, 1], 8, 0.95)],
    ids=["shorter", "without arguments"],
)
def test_a_run_that_grows_and_shrinks(folder, tmp_path, arguments, changes, epochs, learnt):
    needs("mindspore", "sklearn", "matplotlib", "tqdm")
    done = run(folder, "./run-elastic.sh", "--out", tmp_path, *arguments)
    assert done.returncode == 0, done.stdout[-4000:]
    # Nothing is wrong, so there is no warning, and no log line but those of the changes: none that is advice.
    logged = re.findall(r"^.*(?:\bms_kungfu\b|kungfu-run|WARNING|ERROR).*$", done.stdout, re.MULTILINE)
    change = r"\S+ ms_kungfu\[(?:was )?rank \d+\] INFO: (?:resize requested|joined|left|resize): "
    assert [line for line in logged if not re.match(change, line)] == []
    rows = [json.loads(line) for line in (tmp_path / "training.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 47 * epochs + 1))
    assert all(set(row) == {"step", "loss", "cluster_size", "learning_rate", "seconds"} for row in rows)
    sizes = [row["cluster_size"] for row in rows]
    assert [size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]] == changes
    events = [json.loads(line) for line in (folder / "logs" / "events.jsonl").read_text().splitlines()]
    assert {event["total_steps"] for event in events if "total_steps" in event} == {47 * epochs}
    assert [event["epoch"] for event in events if "epoch" in event][-1] == epochs
    accuracy = re.findall(r"^test accuracy (\d\.\d{4})$", done.stdout, re.MULTILINE)
    assert len(accuracy) == 1
    assert float(accuracy[0]) >= learnt
    assert (tmp_path / "training.png").stat().st_size > 20_000
    ledger = done.stdout.splitlines()[-3 - epochs :]
    assert ledger[0] == f"ledger of {max(changes)} workers in 1 job"
    assert ledger[1:-2] == [f"epoch {epoch}: 47 steps, each of 1500 samples once" for epoch in range(epochs)]
    assert ledger[-2] == "contents: 8 of 1500 samples compared, the same on all workers"
    proven = f"exact: each sample was trained once in each of {epochs} finished epochs"
    assert ledger[-1] == f"{proven} (numbers and contents)"


BAD_INPUT = [
    (["--data-path", "nowhere"], "nowhere has no file train-images-idx3-ubyte; give a folder"),
    (["--schedule", "10:0"], "a cluster has at least 1 worker, got size 0"),
    (["--schedule", "20;3"], "train.py: error: "),
    (["--epochs", "many"], "invalid int value: 'many'"),
    (["--resum"], "train.py: error: "),
    (["--shards", "3"], "train.py: error: "),
    (["--ledger", "train.py"], "File exists: the ledger train.py can't be written"),
    (["--global-batch-size", "0"], "global_batch_size must be an integer of 1 or more, got 0"),
    (["--resume"], "resume needs a folder"),
]
# Runs train.py with each list of arguments, in one process: most of a run is importing MindSpore.
SEVERAL = """
import contextlib, io, json, runpy, sys, traceback
for arguments in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        sys.argv = ["train.py", *arguments]
        try:
            runpy.run_path("train.py", run_name="__main__")
            status = 0
        except SystemExit as end:
            status = end.code
            if isinstance(status, str):
                print(status)
        except BaseException:
            status = 1
            traceback.print_exc()
    print("RESULT " + json.dumps([status, said.getvalue()]), flush=True)
"""


def test_bad_input_is_one_sentence(folder, tmp_path):
    needs("mindspore", "sklearn", "matplotlib")
    cases = [["--out", str(tmp_path), *arguments] for arguments, _ in BAD_INPUT]
    (folder / "several.py").write_text(SEVERAL)
    done = run(folder, sys.executable, "several.py", json.dumps(cases), DATA_PATH="")
    assert done.returncode == 0, done.stdout
    results = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert len(results) == len(BAD_INPUT)
    for (arguments, sentence), (status, said) in zip(BAD_INPUT, results):
        assert status not in (0, None), arguments
        assert sentence in said, arguments
        assert "Traceback" not in said, arguments
    assert not (tmp_path / "training.jsonl").exists()


@pytest.mark.long
@INSTALLED
def test_a_run_that_was_cut_off_resumes(folder, tmp_path):
    needs("mindspore", "sklearn", "matplotlib", "tqdm")
    command = ["./run-elastic.sh", "--epochs", "1", "--schedule", "none", "--out", tmp_path / "out"]
    command += ["--checkpoint", tmp_path / "kept"]
    whole = run(folder, *command)
    assert whole.returncode == 0, whole.stdout[-4000:]
    lines = (tmp_path / "out" / "training.jsonl").read_text()
    (tmp_path / "kept" / "step-00000040.ckpt").unlink()
    resumed = run(folder, *command, "--resume")
    assert resumed.returncode == 0, resumed.stdout[-4000:]
    again = (tmp_path / "out" / "training.jsonl").read_text()
    losses = [[(row["step"], row["loss"]) for row in map(json.loads, text.splitlines())] for text in (lines, again)]
    assert losses[1] == losses[0]
    accuracy = [re.findall(r"test accuracy \d\.\d{4}", done.stdout) for done in (whole, resumed)]
    assert accuracy[0] == accuracy[1] != []
    # the audit's, which counts the steps before the cut as well
    assert resumed.stdout.splitlines()[-1] == whole.stdout.splitlines()[-1]


@pytest.fixture
def absent(tmp_path):
    """A PYTHONPATH on which what a plain install-kungfu.sh leaves out is missing."""
    for name in ("matplotlib", "sklearn", "tqdm"):
        text = f"raise ModuleNotFoundError(\"No module named '{name}'\", name='{name}')\n"
        (tmp_path / "absent" / name).mkdir(parents=True)
        (tmp_path / "absent" / name / "__init__.py").write_text(text)
    return tmp_path / "absent"


@pytest.mark.long
def test_example_without_extras_trains_and_reports_missing_picture(folder, absent):
    needs("mindspore")
    done = run(folder, sys.executable, "train.py", "--schedule", "none", "--epochs", "3", PYTHONPATH=str(absent))
    assert done.returncode == 0, done.stdout[-4000:]
    assert "no picture is drawn: there is no matplotlib" in done.stdout
    assert "the digits are drawn: there is no sklearn" in done.stdout
    assert len((folder / "out" / "training.jsonl").read_text().splitlines()) == 3 * 47
    accuracy = re.findall(r"^test accuracy (\d\.\d{4})$", done.stdout, re.MULTILINE)
    assert float(accuracy[0]) > 0.5  # of ten digits
    assert not (folder / "data").exists()


@INSTALLED
@pytest.mark.parametrize(
    "arguments",
    [["--epocs", "3"], ["--chaos", "--epochs", "x"]],
)
def test_a_misspelt_argument_leaves_the_last_ledger_as_it_is(folder, arguments):
    needs("sklearn", "matplotlib", "tqdm")
    (folder / "logs" / "ledger").mkdir(parents=True)
    (folder / "logs" / "ledger" / "proof").write_text("of the last run")
    done = run(folder, "./run-elastic.sh", *arguments)
    assert done.returncode == 2, done.stdout
    assert "train.py: error: " in done.stdout
    assert (folder / "logs" / "ledger" / "proof").read_text() == "of the last run"


@pytest.mark.long
@INSTALLED
def test_paths_are_those_of_the_users_folder(folder, tmp_path):
    """And what isn't there leaves the last ledger as it is, too."""
    needs("sklearn", "matplotlib", "tqdm")
    (folder / "logs" / "ledger").mkdir(parents=True)
    script = folder / "run-elastic.sh"
    done = run(tmp_path, script, "--data-path", "empty")
    assert (done.returncode, done.stdout.split(";")[0]) == (1, "empty has no file train-images-idx3-ubyte")
    assert (folder / "logs" / "ledger").exists()
    done = run(tmp_path, script, "--epochs", "1", "--schedule", "none", "--out", "here", "--ledger", "proof")
    assert done.returncode == 0, done.stdout[-4000:]
    assert done.stdout.splitlines()[-1].startswith("exact: ")
    assert (tmp_path / "here" / "training.png").exists()
    assert not (folder / "out").exists()
    assert list((tmp_path / "proof").iterdir())


@INSTALLED
def test_two_runs_at_a_time_in_one_folder_are_refused(folder):
    needs("sklearn", "matplotlib", "tqdm")
    (folder / "logs" / "ledger").mkdir(parents=True)
    with (folder / "logs" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = run(folder, "./run-elastic.sh", "--epochs", "1")
    assert done.returncode == 1
    assert (
        done.stdout == "run-elastic.sh: another run writes into logs/ of this folder; let it end, or copy the folder\n"
    )
    assert (folder / "logs" / "ledger").exists()


def read_idx(path):
    content = path.read_bytes()
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, 4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def write_digits(folder):
    import data

    data.find_or_make(None, folder)


def test_the_digits_become_idx_files_though_several_write_them(example, tmp_path):
    needs("mindspore", "sklearn", "scipy")
    import data

    writers = [multiprocessing.get_context("fork").Process(target=write_digits, args=(tmp_path,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(n for names in data.NAMES.values() for n in names)
    images, labels = (read_idx(tmp_path / name) for name in data.NAMES["train"])
    assert images.shape == (1500, 28, 28)
    assert labels.shape == (1500,)
    assert images.max() == 255
    assert read_idx(tmp_path / data.NAMES["test"][0]).shape == (297, 28, 28)


def test_stretches_of_one_size(example):
    needs("matplotlib")
    import plot

    assert plot.phases([1, 1, 2, 4, 4, 1]) == [(0, 2, 1), (2, 3, 2), (3, 5, 4), (5, 6, 1)]
    assert plot.phases([3]) == [(0, 1, 3)]


def test_smoothing_keeps_a_constant_and_averages_around(example):
    needs("matplotlib")
    import plot

    np.testing.assert_allclose(plot.smooth([2.0] * 40), 2.0)
    np.testing.assert_allclose(plot.smooth([0, 0, 3, 0, 0], span=3), [0, 1, 1, 1, 0])


@pytest.mark.parametrize("sizes", [[1], [1, 2, 7, 1]])
def test_a_picture_of_any_run(example, tmp_path, sizes):
    needs("matplotlib")
    import plot

    rows = [
        {"step": i + 1, "loss": 1 / (i + 1), "cluster_size": size, "learning_rate": 0.1, "seconds": 0.01}
        for i, size in enumerate(sizes)
    ]
    (tmp_path / "training.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    plot.draw(tmp_path / "training.jsonl", tmp_path / "training.png")
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.glob("*.png")] == ["training.png"]


def test_file_that_a_killed_worker_left_is_not_read_as_digits(example, tmp_path, monkeypatch):
    """It wrote the same file as another one, and had no time to put it in its place."""
    pytest.importorskip("mindspore", reason="MindSpore is not installed")
    import data

    with monkeypatch.context() as patched:
        patched.setattr(data.os, "replace", shutil.copy)
        data.write_digits(tmp_path, *data.drawn_digits(40), n_train=30)
    assert data.samples(tmp_path, "train").get_dataset_size() == 30
