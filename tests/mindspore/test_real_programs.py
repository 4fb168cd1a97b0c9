"""Programs as people have them, of tests.programs: those that need nothing that the tests don't, and a worker is killed
in each. ``python -m tests.programs`` has the others, and several seeds."""

from __future__ import annotations

import pytest

from tests.conftest import long
from tests.programs.__main__ import PROGRAMS, try_one
from tests.programs.running import HERE, lines_changed, stock

pytestmark = pytest.mark.timeout(900)  # two runs each, of several processes one after the other

NEAR = {"dcgan": 0.2}  # what is random in a GAN is another one on two workers


@pytest.mark.parametrize("name", ["own-loop", long("own-step"), long("lstm"), long("dcgan")])
def test_a_program_trains_as_on_one_device_while_workers_join_and_die(name, tmp_path):
    ((alone, elastic, _),) = try_one(name, [1], tmp_path)
    assert elastic.equal, "the workers' weights differ"
    assert elastic.exact, "a sample was not trained once an epoch"
    assert elastic.accuracy > alone - NEAR.get(name, 0.05)


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
    assert lines_changed(text) <= 7
    assert ("\ninit()  # msrun\n" in text) == for_msrun
    assert "\ninit()\n" not in alone
