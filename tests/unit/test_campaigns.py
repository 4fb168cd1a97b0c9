"""The driver of the campaigns, and that what isn't a campaign draws no seed."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests.campaigns import __main__ as campaigns
from tests.campaigns.__main__ import CAMPAIGNS, Campaign
from tests.campaigns.mutant_table import MUTANTS
from tests.campaigns.mutants import ROOT, Mutant, WrongMutantError, of_pytest

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", CAMPAIGNS)
def test_campaign_starts_something_that_exists_with_count_and_seed(name, monkeypatch):
    monkeypatch.setattr(campaigns, "build_cpp", lambda: Path("build"))
    campaign = CAMPAIGNS[name]
    words, environment = campaign.start(7, 11)
    said = " ".join([*words, *(f"{key}={value}" for key, value in environment.items())])
    assert "{" not in said
    assert ("11" in re.findall(r"\d+", said)) == campaign.seeded
    assert ("7" in re.findall(r"\d+", said)) == (not campaign.unit.startswith("any"))
    if words[1:2] == ["-m"]:
        assert find_spec(words[2]) is not None, words
    for word in words:
        path, _, test = word.partition("::")
        if path.startswith("tests/") and path != "tests/unit":
            assert (TESTS.parent / path).exists(), word
            assert not test or f"def {test}(" in (TESTS.parent / path).read_text(), word
    sources = "\n".join(path.read_text() for kind in ("*.py", "*.h", "*.cc") for path in TESTS.rglob(kind))
    for variable in environment:
        assert re.search(rf'(environ\.get|getenv)\("{variable}"', sources), f"nothing reads {variable}"
    for flag in words if words[2:] and words[2].startswith("tests.") else ():
        assert not flag.startswith("--") or re.search(rf'add_argument\(\s*"{flag}"', sources), flag


@pytest.mark.parametrize(("status", "figure"), [(0, "3 killed"), (3, "FAILED (exit status 3): 3 killed")])
def test_campaign_ends_with_its_row_and_its_status(status, figure, monkeypatch, capfd):
    program = f"print('=== 3 killed ==='); raise SystemExit({status})"
    campaign = Campaign("kills", "kills", 3, lambda count, seed: ([sys.executable, "-c", program], {}))
    monkeypatch.setitem(CAMPAIGNS, "kills", campaign)
    assert campaigns.main(["kills", "--seed", "4"]) == status
    row = capfd.readouterr().out.splitlines()[-1]
    assert re.fullmatch(
        rf"\| \d{{4}}-\d\d-\d\d \| \S.* \| .+ cores \| `python -m tests.campaigns kills --count 3 --seed 4` "
        rf"\| {re.escape(figure)} \|",
        row,
    )


@pytest.mark.parametrize("words", [["nothing"], ["kills", "--count", "0"], ["soak", "--seed", "1"]])
def test_campaign_with_wrong_arguments_is_refused(words):
    with pytest.raises(SystemExit) as refused:
        campaigns.main(words)
    assert refused.value.code == 2


def test_mutants_have_names_of_their_own_and_name_tests_that_exist():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    for mutant in MUTANTS:
        assert mutant.old != mutant.new, mutant.name
        assert mutant.tests, mutant.name
        for test in of_pytest(mutant.tests):
            path, _, name = test.partition("::")
            assert f"def {name}(" in (TESTS.parent / path).read_text() if name else (TESTS.parent / path).exists(), test


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_one_place_of_the_code(mutant):
    assert mutant.applied_to((ROOT / mutant.file).read_text(encoding="utf-8"))


@pytest.mark.parametrize("text", ["a c", "b b"])
def test_mutant_that_fits_no_or_several_places_is_refused_by_name(text):
    mutant = Mutant("b-is-c", "file.py", "b", "c", ("tests/unit",))
    assert mutant.applied_to("a b") == "a c"
    with pytest.raises(WrongMutantError, match="mutant b-is-c: its old text occurs . times in file.py"):
        mutant.applied_to(text)


def test_no_test_draws_a_seed_from_the_machine():
    drawing = [
        str(path.relative_to(TESTS))
        for kind in ("test_*.py", "*_test.cc", "cpp/*.h")
        for path in TESTS.rglob(kind)
        if path != Path(__file__).resolve()
        and path.name != "test_replayed_training.py"  # it records a seed that is drawn
        and re.search(r"SystemRandom|random_device|random\.seed\(\)|time\.time_ns", path.read_text())
    ]
    assert drawing == []
    assert settings.default.derandomize
