"""The pages of reference have every flag, metric and error that the code has, and none that it hasn't.

docs/environment.md is written by `python -m ms_kungfu.env` and compared in test_env.py.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import re
from dataclasses import fields
from pathlib import Path

import pytest

from ms_kungfu import env, errors
from ms_kungfu._version import VERSION
from ms_kungfu.elastic.policy import Metrics
from ms_kungfu.launcher import distribute, options
from ms_kungfu.monitoring import endpoint
from ms_kungfu.monitoring.record import StepRecord

DOCS = Path(__file__).resolve().parents[2] / "docs"

# Heading on the page -> how the program is asked for its help: a module with a main, and the words for it.
BENCH = ("all_reduce", "broadcast", "gradients", "step", "optimizers", "resize", "shards", "plot", "all")
PROGRAMS = {
    "kungfu-run": [("ms_kungfu.launcher.cli", ["-help"])],
    "kungfu-run resize, kungfu-run evict": [
        ("ms_kungfu.launcher.cli", ["resize", "-help"]),
        ("ms_kungfu.launcher.cli", ["evict", "-help"]),
    ],
    "kungfu-run status": [("ms_kungfu.launcher.cli", ["status", "-help"])],
    "kungfu-distribute": [("ms_kungfu.launcher.distribute", ["-help"])],
    "kungfu-config-server": [("ms_kungfu.config_server.cli", ["-help"])],
    "python -m ms_kungfu.doctor": [("ms_kungfu.doctor.__main__", ["--help"])],
    "python -m ms_kungfu.dataset.audit LOGDIR": [("ms_kungfu.dataset.audit", ["--help"])],
    "python -m ms_kungfu.replay LEDGER -- program": [("ms_kungfu.replay", ["--help"])],
    "python -m ms_kungfu.chaos -- program": [("ms_kungfu.chaos", ["--help"])],
    "python -m ms_kungfu.fusion TARGET": [("ms_kungfu.fusion.__main__", ["--help"])],
    "python -m ms_kungfu.devices.rank_table FILE": [("ms_kungfu.devices.rank_table", ["--help"])],
    "python -m ms_kungfu.c_api": [("ms_kungfu.c_api", ["--help"])],
    "python -m ms_kungfu.bench COMMAND": [("ms_kungfu.bench.__main__", [name, "--help"]) for name in BENCH],
}
FLAG = re.compile(r"(?<![\w-])--?[a-zA-Z][\w-]*")


def rows(text):
    """The tables' rows: lists of cells."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip().strip("|").split(" |")] for line in lines]


def sections(page):
    parts = re.split(r"^## (.+)$", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2]))


def documented(section):
    return {flag for row in rows(section) for code in re.findall(r"`([^`]+)`", row[0]) for flag in FLAG.findall(code)}


def flags_of(module, words):
    """Those of the parser whose help is asked for."""
    asked = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(argparse.ArgumentParser, "print_help", lambda parser, file=None: asked.append(parser))
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main(words)
    assert ended.value.code in (0, None)
    return {flag for action in asked[0]._actions for flag in action.option_strings}


@pytest.mark.parametrize("heading", PROGRAMS)
def test_every_flag_is_on_its_page_and_no_other(heading):
    real = set().union(*(flags_of(*program) for program in PROGRAMS[heading]))
    if heading.startswith("python"):  # argparse's own
        real -= {"-h", "--help"}
    else:
        real |= {"-h", "-help"}
    assert documented(sections("flags.md")[heading]) == real


@pytest.mark.parametrize(
    ("heading", "refused"), [("kungfu-run", options._NO_FLAGS), ("kungfu-distribute", distribute._NO_FLAGS)]
)
def test_flags_that_are_refused_are_named(heading, refused):
    """One that is refused in torchrun's older spelling, too, is named in the newer one."""
    names = {dashed if (dashed := name.replace("_", "-")) in refused else name for name in refused}
    section = sections("flags.md")[heading]
    assert [name for name in names if f"`-{name}`" not in section] == []


def test_no_section_of_the_page_is_of_an_unknown_program():
    assert set(sections("flags.md")) == set(PROGRAMS)


def test_the_defaults_that_the_page_tells_are_the_programs():
    told = {
        FLAG.findall(row[0])[0]: row[1].strip("`")
        for row in rows(sections("flags.md")["kungfu-run"])
        if FLAG.findall(row[0])
    }
    for each in fields(options.Options):
        if not each.metadata:
            continue
        name, default = f"-{each.metadata['name']}", each.default
        if isinstance(default, bool):
            assert told[name] == {"-affinity": "auto"}.get(name, "on" if default else "off"), name
        elif isinstance(default, (int, float)):
            assert told[name].rstrip("s") == f"{default:g}", name


def test_every_error_is_on_its_page_with_meaning_and_remedy():
    table = {row[0].strip("`"): row[1:] for row in rows((DOCS / "errors.md").read_text(encoding="utf-8"))}
    real = {
        name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, errors.KungFuError)
    }
    assert set(table) - {"error"} == real
    assert [name for name, cells in table.items() if len(cells) != 2 or not all(cells)] == []


def test_every_metric_is_on_its_page():
    page = sections("metrics.md")
    of_a_step = rows(page["Of a step"])
    names = {code for row in of_a_step for code in re.findall(r"`([^`]+)`", row[0])}
    assert {each.name for each in fields(StepRecord)} | {"slowest", "slowdown"} == names
    served = {code.partition("{")[0] for row in of_a_step for code in re.findall(r"`(kungfu_[^`]+)`", row[1])}
    assert {f"kungfu_{name}" for name, *_ in (*endpoint._GAUGES, *endpoint._BY_RANK)} | {"kungfu_rank"} == served
    of_policies = {code for row in rows(page["What a policy sees"]) for code in re.findall(r"`([^`]+)`", row[0])}
    assert {each.name for each in fields(Metrics)} - names | {"local_batch_size"} == of_policies


def test_every_variable_that_the_code_names_is_in_the_table():
    """What docs/environment.md is written from; test_env.py compares the two."""
    root, named = DOCS.parent, {}
    for path in sorted((root / "ms_kungfu").rglob("*.py")):
        named.update(dict.fromkeys(re.findall(r"""["'](KUNGFU_[A-Z_]+)["']""", path.read_text()), path))
    for path in (path for folder in ("ops_src", "kernels") for path in sorted((root / folder).rglob("*.cc"))):
        named.update(dict.fromkeys(re.findall(r'getenv\("(\w+)"', path.read_text()), path))
    assert {"KUNGFU_SELF", "ASCEND_RT_VISIBLE_DEVICES"} <= set(named)
    assert {name: path for name, path in named.items() if name not in {v.name for v in env.VARIABLES}} == {}


def test_the_citation_has_the_packages_version():
    (cited,) = re.findall(r"^version: (.+)$", (DOCS.parent / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited == VERSION


def test_what_is_missing_is_seen(tmp_path, monkeypatch):
    """Each of the above can fail: a page that lacks one line."""
    for page, gone in (
        ("errors.md", "| `ResizeError`"),
        ("metrics.md", "| `hidden_fraction`"),
        ("flags.md", "| `-standby N`"),
    ):
        lines = (DOCS / page).read_text(encoding="utf-8").splitlines()
        fewer = [line for line in lines if not line.startswith(gone)]
        assert len(fewer) == len(lines) - 1
        (tmp_path / page).write_text("\n".join(fewer), encoding="utf-8")
    monkeypatch.setattr(f"{__name__}.DOCS", tmp_path)
    for check in (
        test_every_error_is_on_its_page_with_meaning_and_remedy,
        test_every_metric_is_on_its_page,
        lambda: test_every_flag_is_on_its_page_and_no_other("kungfu-run"),
    ):
        with pytest.raises(AssertionError):
            check()
