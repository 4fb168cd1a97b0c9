"""Model.fit on clusters that change: evaluations, MindSpore's own callbacks and their state, ordinary datasets."""

from __future__ import annotations

import json

import pytest

from tests.conftest import long


@pytest.fixture
def fit(run_elastic):
    def run(np=2, **options):
        keys = {k: options.pop(k) for k in ("status", "timeout_s") if k in options}
        return run_elastic("fit.py", json.dumps(options), np=np, ledger=False, **keys)

    return run


def epochs(reports):
    """The workers' reports of each epoch, having checked that they agree in all but their ranks."""
    found = {}
    for row in reports.of("epoch"):
        found.setdefault(row["epoch"], []).append(row)
    for epoch, rows in found.items():
        for key in ("step", "seen", "results", "loss", "statistics", "rate", "state"):
            values = {json.dumps(row[key]) for row in rows}
            assert len(values) == 1, f"{key} in epoch {epoch}: {values}"
    return found


@pytest.mark.parametrize(
    ("mode", "valid", "np"),
    [
        long("graph", "same", 2),
        long("pynative", "same", 3),
        long("graph", "shuffled", 2),
        long("graph", "sharded", 3),
        ("pynative", "elastic", 2),
        long("pynative", "elastic", 3),
    ],
)
def test_every_worker_gets_the_same_numbers(fit, mode, valid, np):
    reports = fit(np, mode=mode, valid=valid, epochs=2)
    found = epochs(reports)
    assert {epoch: len(rows) for epoch, rows in found.items()} == {1: np, 2: np}
    for rows in found.values():
        # each sample counts once, whichever rank evaluated it
        assert sorted(rows[0]["seen"]) == sorted([*range(26), *([0] if valid == "sharded" else [])])
        if valid == "same":
            assert rows[0]["seen"] == list(range(26))
    if valid == "elastic":  # batches of 7, dealt as 4 and 3, are one again before their losses are averaged
        for row in reports.of("dealt"):
            assert row["dealt"] == pytest.approx(row["whole"], rel=1e-5)
    assert len({row["parameters"] for row in reports.of("end")}) == 1
    # the statistics are the mean when training is over, so each may evaluate alone
    assert len({json.dumps(row["results"]) for row in reports.of("again")}) == 1


@pytest.mark.long
def test_evaluation_of_a_failed_rank_is_done_by_another(fit):
    """In batch 3 of the second evaluation rank 0 dies, in the third rank 1, which is then the lowest but one."""
    reports = fit(4, mode="graph", epochs=3, deaths=[["eval:2:3", 0], ["eval:3:2", 1]])
    found = epochs(reports)
    assert {epoch: len(rows) for epoch, rows in found.items()} == {1: 4, 2: 3, 3: 2}
    assert [rows[0]["seen"] for rows in found.values()] == [list(range(26))] * 3
    assert len({row["parameters"] for row in reports.of("end")}) == 1
    assert len(reports.of("end")) == 2


@pytest.mark.long  # test_reporting_and_writing_workers_fail_and_the_next_goes_on begins with this failure
@pytest.mark.parametrize("valid", ["shuffled", "elastic"])
def test_the_next_one_tells_when_the_one_that_tells_dies(fit, valid):
    reports = fit(3, valid=valid, epochs=2, deaths=[["eval:2:3", 0]])
    found = epochs(reports)
    assert {epoch: len(rows) for epoch, rows in found.items()} == {1: 3, 2: 2}
    for rows in found.values():
        assert sorted(rows[0]["seen"]) == list(range(26))


def test_reporting_and_writing_workers_fail_and_the_next_goes_on(fit):
    """Rank 0 fails in the evaluation of epoch 1, and the next writer while it writes a file of epoch 3."""
    callbacks = ["ModelCheckpoint", "SummaryCollector"]
    deaths = [["eval:1:3", 0], ["save:15", "first"]]
    reports = fit(3, valid="shuffled", epochs=3, callbacks=callbacks, save=5, deaths=deaths)
    found = epochs(reports)
    assert {epoch: len(rows) for epoch, rows in found.items()} == {1: 2, 2: 2, 3: 1}
    for rows in found.values():
        assert sorted(rows[0]["seen"]) == list(range(26))
    assert len(reports.of("end")) == 1
    (kept,), (trained,) = reports.of("kept"), reports.of("trained")
    # A step that still assigns samples to the failed worker adds a step to the epoch.
    last = max(row["step"] for row in reports.of("step"))
    begins = min(row["step"] for row in reports.of("step") if row["epoch"] == 3)
    assert (kept["file"], kept["parameters"]) == (f"net-3_{last - begins + 1}.ckpt", trained["parameters"])
    # Two files stay, of any writer, and each writer has one file of records.
    saved = {path.name for path in (reports.folder / "saved").glob("*.ckpt")}
    assert len(saved) == 2, saved
    assert kept["file"] in saved
    records = [path.name for path in (reports.folder / "summary").glob("*.summary.*_MS")]
    assert len(records) == 3, records


OWN = ["ReduceLROnPlateau", "EarlyStopping", "History", "LossMonitor", "TimeMonitor"]


@pytest.mark.long  # that one has one failed writer
@pytest.mark.parametrize("every", [5, 3], ids=["in the last step", "when training is over"])
def test_the_last_file_is_there_though_its_writer_died_in_it(fit, every):
    reports = fit(
        3, epochs=2, callbacks=["ModelCheckpoint"], save=every, keep=9, deaths=[["save:10", 0], ["save:10", 1]]
    )
    assert [row["rank"] for row in reports.of("end")] == [2]
    (kept,), (trained,) = reports.of("kept"), reports.of("trained")
    assert (kept["file"], kept["parameters"]) == ("net-2_5.ckpt", trained["parameters"])
    saved = {path.name for path in (reports.folder / "saved").glob("*.ckpt")}
    assert saved == ({"net-1_5.ckpt"} if every == 5 else {f"net-{n}.ckpt" for n in ("1_3", "2_1", "2_4")}) | {
        "net-2_5.ckpt"
    }


@pytest.mark.parametrize("last", [False, long(True)], ids=["elastic callback first", "elastic callback last"])
def test_joining_worker_decides_like_the_others(fit, last):
    """It joins after the last step of epoch 2, and so does another one in the midst of epoch 4."""
    reports = fit(1, schedule="10:2,17:3", epochs=8, callbacks=[*OWN, "Counter", "Carried"], min_delta=100.0, last=last)
    found = epochs(reports)
    assert {epoch: len(rows) for epoch, rows in found.items()} == {1: 1, 2: 2, 3: 2, 4: 3, 5: 3}, "stops after epoch 5"
    rates = [rows[0]["rate"] for rows in found.values()]
    assert rates == pytest.approx([0.05, 0.05, 0.025, 0.025, 0.0125])
    assert len({row["parameters"] for row in reports.of("end")}) == 1
    assert {row["step"] for row in reports.of("end")} == {25}
    warned = [line for line in reports.output.splitlines() if "misuse: check=callbacks" in line]
    assert len(warned) == 1
    assert "Counter (count)" in warned[0]
    assert "Carried" not in warned[0]
    assert "History" not in warned[0]


@pytest.mark.long
def test_stopping_by_the_loss_is_agreed_on(fit):
    reports = fit(2, epochs=30, callbacks=["EarlyStopping on loss"], rate=0.5)
    last = max(epochs(reports))
    assert last < 30
    assert len({(row["step"], row["parameters"]) for row in reports.of("end")}) == 1


@pytest.mark.long  # the same in graph mode, with failures between the files
def test_one_worker_writes_and_the_next_one_goes_on(fit):
    """Rank 0 dies in step 6, rank 1 in step 11."""
    callbacks = ["ModelCheckpoint", "SummaryCollector"]
    reports = fit(3, epochs=3, callbacks=callbacks, deaths=[[6, 0], [11, 0]], mode="graph")
    assert len(reports.of("end")) == 1
    # Every second step is saved, under one name, and the end; two files stay.
    saved = sorted(path.name for path in (reports.folder / "saved").glob("*.ckpt"))
    last = max(row["step"] for row in reports.of("step"))
    begins = min(row["step"] for row in reports.of("step") if row["epoch"] == 3)
    assert last % 2 == 1
    assert saved == [f"net-3_{last - begins}.ckpt", f"net-3_{last - begins + 1}.ckpt"], "the last due, and the end's"
    # One file of records for each of those that wrote.
    records = [path.name for path in (reports.folder / "summary").glob("*.summary.*_MS")]
    assert len(records) == 3, records


@pytest.mark.long
@pytest.mark.parametrize("last", [long(False), True], ids=["elastic callback first", "elastic callback last"])
def test_files_and_steps_are_numbered_within_their_epoch(fit, last):
    """A worker joins in step 4 of 10 and one more in step 11, and rank 0 dies in step 13; an epoch is shorter so."""
    options = {"train": "per worker", "batch": 4, "callbacks": ["ModelCheckpoint"], "save": 1, "keep": 99}
    reports = fit(1, schedule="4:2,11:3", epochs=4, deaths=[[13, 0]], last=last, **options)
    steps = reports.by_step("step")
    epochs_of = {step: rows[0]["epoch"] for step, rows in steps.items()}
    first = {epoch: min(s for s in epochs_of if epochs_of[s] == epoch) for epoch in range(1, 5)}
    lengths = [list(epochs_of.values()).count(epoch) for epoch in range(1, 5)]
    assert len(set(lengths)) > 1, lengths
    named = set()
    for step, rows in steps.items():
        epoch, (within,) = epochs_of[step], {row["step_in_epoch"] for row in rows}
        assert within == step - first[epoch] + 1
        named.add(f"net-{epoch}_{within}.ckpt")
    # Of each step, under its own name; the one that its writer died in, the step's survivors may lack.
    saved = {path.name for path in (reports.folder / "saved").glob("*.ckpt")}
    assert saved <= named
    assert len(named - saved) <= 1


@pytest.mark.parametrize(
    ("schedule", "sizes"), [("13:2", [1] * 13 + [2] * 17), long("13:2,24:3", [1] * 13 + [2] * 11 + [3] * 6)]
)
def test_an_ordinary_dataset_ends_at_one_step(fit, schedule, sizes):
    """A share of one of two, or of three, beside whole ones of the workers that began alone."""
    reports = fit(1, train="sharded", schedule=schedule, epochs=3, batch=4)
    steps = reports.by_step("step")
    assert list(steps) == list(range(1, 31))
    assert [len(rows) for rows in steps.values()] == sizes
    assert {row["batch_num"] for row in reports.of("step")} == {10}
    assert {epoch: len(rows) for epoch, rows in epochs(reports).items()} == {1: 1, 2: 2, 3: sizes[-1]}
    assert {row["step"] for row in reports.of("end")} == {30}
    assert len({row["parameters"] for row in reports.of("end")}) == 1


@pytest.mark.long
def test_worker_waits_while_others_evaluate(fit, monkeypatch):
    """13 s at rank 0 alone, by a callback of the program's, and as long by all; no rank waits longer than 8 s."""
    monkeypatch.setenv("KUNGFU_COLLECTIVE_TIMEOUT", "8")
    reports = fit(2, epochs=1, valid="slow", callbacks=["Alone"])
    assert {epoch: len(rows) for epoch, rows in epochs(reports).items()} == {1: 2}
