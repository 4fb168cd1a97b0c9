"""Programs as people have them, of tests.programs: those that need nothing that the tests don't, and a worker is killed
in each. ``python -m tests.programs`` has the others, and several seeds."""

from __future__ import annotations

import numpy as np
import pytest

from tests.conftest import long
from tests.programs.__main__ import PROGRAMS, try_one
from tests.programs.running import HERE, Command, Job, lines_changed, stock

pytestmark = pytest.mark.timeout(900)  # two runs each, of several processes one after the other

NEAR = {"dcgan": 0.2}  # what is random in a GAN is another one on two workers


@pytest.mark.parametrize("name", [long("own-loop"), long("own-step"), long("lstm"), long("dcgan")])
def test_a_program_trains_as_on_one_device_while_workers_join_and_die(name, tmp_path):
    found = try_one(name, 1, tmp_path)
    assert found.equal, "the workers' weights differ"
    assert found.exact, "a sample was not trained once an epoch"
    assert found.elastic > found.stock - NEAR.get(name, 0.05)


@pytest.mark.parametrize("name", [name for name, each in PROGRAMS.items() if each.tolerance is not None])
def test_small_program_trains_as_on_one_device_while_workers_change(name, tmp_path):
    found = try_one(name, 1, tmp_path)
    assert found.equal, "the workers' weights differ"
    assert found.exact, "a sample was not trained once an epoch"
    assert found.elastic == pytest.approx(found.stock, rel=PROGRAMS[name].tolerance)


def test_a_worker_that_fails_ends_the_trial_with_its_last_lines(tmp_path):
    """The first one goes on, and no rank waits for it."""
    program = tmp_path / "fails_where_others_train.py"
    program.write_text(
        "import pathlib, time, ms_kungfu\n"
        "begun = pathlib.Path('begun')\n"
        "if begun.exists():\n"
        "    raise ValueError('a joiner of no use')\n"
        "ms_kungfu.init()\n"
        "begun.touch()\n"
        "time.sleep(600)\n"
    )
    with Job(Command(program, []), tmp_path / "run", msrun=False, begins=1, size=3) as job:
        job.wait((job.folder / "begun").exists)
        job.resize(3)
        with pytest.raises(
            AssertionError, match=r"^\[kungfu-run\].* exited with code 1(?s:.*)ValueError: a joiner of no use"
        ):
            job.finish()
        assert job.process.poll() is None


IN_PARTS = """
import mindspore as ms, numpy as np
from mindspore import nn

draw = np.random.default_rng(1)
x = np.tile(draw.normal(size=(4, 1, 8, 5)), (1, 3, 1, 1)).reshape(96, 5).astype(np.float32)
y = (x.sum(axis=1) > 0).astype(np.int32)
ms.set_seed(1)
net = nn.SequentialCell(nn.Dense(5, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dense(4, 2))
optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
model = ms.Model(net, nn.CrossEntropyLoss(), optimizer)
model.train(2, ms.dataset.NumpySlicesDataset((x, y), ["x", "y"], shuffle=False).batch(24), dataset_sink_mode=False)
np.savez("after.npz", **{p.name: p.asnumpy() for p in [*net.get_parameters(), *optimizer.get_parameters()]})
print("accuracy: 1", type(model.train_network).__name__)
"""


def test_a_step_in_parts_that_are_alike_is_the_whole_step(tmp_path):
    """Also for the moving statistics, but for the variance, which is of one less than the samples (8/7, 24/23)."""
    (tmp_path / "program.py").write_text(IN_PARTS)
    command = Command(tmp_path / "program.py", [])
    after = {}
    for parts in (1, 3):
        folder = tmp_path / str(parts)
        command.run(folder, parts)
        assert ("InParts" in (folder / "log").read_text()) == (parts == 3)
        after[parts] = np.load(folder / "after.npz")
    assert {name for name in after[1] if "moving" in name} == {"1.moving_mean", "1.moving_variance"}
    for name in set(after[1]) - {"1.moving_variance"}:
        np.testing.assert_allclose(after[3][name], after[1][name], rtol=1e-3, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(after[3]["1.moving_variance"], after[1]["1.moving_variance"], rtol=0.1)


@pytest.mark.parametrize("file", sorted({each.file for each in PROGRAMS.values() if "{" not in each.file}))
def test_the_stock_program_is_the_same_file_without_us(file):
    text = (HERE / file).read_text()
    alone = stock(text)
    compile(alone, file, "exec")
    assert "kf." not in alone
    assert "# elastic" not in alone
    assert "# stock" not in alone
    for_msrun = "# msrun" in text
    assert (lines_changed(text) == 0) == for_msrun
    assert lines_changed(text) <= 8
    assert ("\ninit()  # msrun\n" in text) == for_msrun
    assert "\ninit()\n" not in alone
