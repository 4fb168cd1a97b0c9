"""The pages of reference have every flag, metric and error that the code has, and none that it hasn't.

docs/environment.md is written by `python -m ms_kungfu.env` and compared in test_env.py.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import io
import os
import re
from dataclasses import fields
from pathlib import Path

import pytest

from benchmarks import __main__ as bench
from ms_kungfu import cluster, env, errors
from ms_kungfu._flags import UsageError
from ms_kungfu.elastic.policy import Metrics
from ms_kungfu.launcher import distribute, host_flags, options, secret
from ms_kungfu.monitoring import endpoint
from ms_kungfu.monitoring.record import StepRecord

DOCS = Path(__file__).resolve().parents[2] / "docs"

# Heading on the page -> how the program is asked for its help: a module with a main, and the words for it.
(_COMMANDS,) = (a for a in bench._parser()._actions if isinstance(a, argparse._SubParsersAction))
BENCH = tuple(_COMMANDS.choices)
PROGRAMS = {
    "kungfu-run": [("ms_kungfu.launcher.cli", ["-help"])],
    "kungfu-run resize, kungfu-run evict": [
        ("ms_kungfu.launcher.cli", ["resize", "-help"]),
        ("ms_kungfu.launcher.cli", ["evict", "-help"]),
    ],
    "kungfu-run status, top, explain, report, trace": [
        ("ms_kungfu.launcher.cli", ["status", "-help"]),
        ("ms_kungfu.launcher.cli", ["top", "-help"]),
        ("ms_kungfu.launcher.cli", ["explain", "-help"]),
        ("ms_kungfu.launcher.cli", ["report", "-help"]),
        ("ms_kungfu.launcher.cli", ["trace", "-help"]),
    ],
    "kungfu-distribute": [("ms_kungfu.launcher.distribute", ["-help"])],
    "kungfu-config-server": [("ms_kungfu.config_server.cli", ["-help"])],
    "python -m ms_kungfu.doctor": [("ms_kungfu.doctor", ["--help"])],
    "python -m ms_kungfu.dataset.audit LOGDIR": [("ms_kungfu.dataset.audit", ["--help"])],
    "python -m ms_kungfu.replay LEDGER -- program": [("ms_kungfu.replay", ["--help"])],
    "python -m ms_kungfu.chaos -- program": [("ms_kungfu.chaos", ["--help"])],
    "python -m ms_kungfu.fusion TARGET": [("ms_kungfu.fusion.__main__", ["--help"])],
    "python -m ms_kungfu.devices.rank_table FILE": [("ms_kungfu.devices.rank_table", ["--help"])],
    "python -m ms_kungfu.c_api": [("ms_kungfu.c_api", ["--help"])],
    "python -m benchmarks COMMAND": [("benchmarks.__main__", [name, "--help"]) for name in BENCH],
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


def parser_of(module, words):
    """The parser whose help is asked for."""
    asked = []
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()):
        patch.setattr(argparse.ArgumentParser, "print_help", lambda parser, file=None: asked.append(parser))
        with pytest.raises(SystemExit) as ended:
            importlib.import_module(module).main(words)
    assert ended.value.code in (0, None)
    return asked[0]


def flags_of(module, words):
    return {flag for action in parser_of(module, words)._actions for flag in action.option_strings}


def told_defaults(heading):
    """{flag: the text of its default}, where the section's table has a column for it."""
    section = sections("flags.md")[heading]
    if not re.search(r"^\| flag \| default \|", section, re.MULTILINE):
        return {}
    return {flag: row[1] for row in rows(section) for flag in FLAG.findall(row[0])}


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


def test_the_commands_of_the_bench_are_named():
    bench_section = sections("flags.md")["python -m benchmarks COMMAND"]
    (named,) = re.findall(r"^Commands: (.+?)\. ", bench_section, re.MULTILINE | re.DOTALL)
    assert tuple(re.findall(r"`(\w+)`", named)) == BENCH


# Defaults that the page tells and the parser doesn't know: they follow from something else.
BY_ITSELF = {
    ("python -m benchmarks COMMAND", "--ranks"): lambda command: bench._RANKS.get(command, [2]),
    ("python -m benchmarks COMMAND", "--step-ms"): lambda command: 1.0,
    ("kungfu-run resize, kungfu-run evict", "-port-range"): lambda command: cluster.WORKER_PORTS,
}
IN_WORDS = {"never": ("-ttl", 0.0), "this one": ("-dir", os.getcwd())}


@pytest.mark.parametrize("heading", [h for h in PROGRAMS if h != "kungfu-run" and told_defaults(h)])
def test_the_defaults_that_the_page_tells_are_the_programs(heading):
    """A cell is one value, `5; `resize` 3` where a command has another one, or says where it comes from."""
    wrong = []
    for module, words in PROGRAMS[heading]:
        for action in parser_of(module, words)._actions:
            if not action.option_strings or set(action.option_strings) & {"-h", "-help"}:
                continue
            flag, default = action.option_strings[-1], action.default
            if (heading, flag) in BY_ITSELF:
                default = BY_ITSELF[heading, flag](words[0])
            told = told_defaults(heading)[action.option_strings[0]]
            if not is_told(told, words[0], action, default):
                wrong.append(f"{' '.join(words[:1])} {flag}: {told}, and it is {default!r}")
    assert wrong == []


def is_told(told, command, action, default):
    first, *others = told.replace("`", "").split("; ")
    own = {name: value for name, _, value in (other.partition(" ") for other in others)}
    text = own.get(command, first).partition(", or ")[0]
    if text == "all":  # of a list
        return isinstance(default, list) and len(default) >= 3
    if text in IN_WORDS:
        return (action.option_strings[-1], default) == IN_WORDS[text]
    if default in (None, []):
        # Words, or nothing; no number that the program hasn't.
        return text in ("-", "none") or not re.match(r"[\d.]+\w?$|\d", text)
    if isinstance(default, bool):
        return text == ("on" if default else "off")
    return (action.type or str)(text) == default


NOT_OF_A_JOB = {"-wait"}  # -engine's
# What else a flag needs.
ONE_HOST = ([], ["-w"], ["-w", "-recover", "replace"])
SEVERAL = [
    "-H",
    "10.0.0.1:2,10.0.0.2:2",
    "-self",
    "10.0.0.1",
    "-secret-file",
    "x",
    "-builtin-config-port",
    "9100",
    "-w",
]


def test_the_defaults_that_the_page_tells_are_those_of_kungfu_run(monkeypatch):
    """With the flag and that value a job is what it is without."""
    monkeypatch.setattr(options, "check_program", lambda command: None)
    monkeypatch.setattr(host_flags, "identify", lambda hosts, own, interface: hosts[0].name)
    monkeypatch.setattr(secret, "read_secret_file", lambda file: "5ec7e7" * 8)
    compared, wrong = set(), []
    for flag, told in told_defaults("kungfu-run").items():
        text = re.sub(r"^KUNGFU_\w+, else ", "", told.replace("`", ""))
        value = {"on": "true", "off": "false"}.get(text, text)
        if not re.fullmatch(r"true|false|\d+s?|\d+-\d+|[A-Z]+|auto|even", value) or flag in NOT_OF_A_JOB:
            continue
        compared.add(flag)
        for context in (*ONE_HOST, SEVERAL):
            plain = options.parse_command_line([*context, "python", "train.py"])
            with contextlib.suppress(UsageError):
                if options.parse_command_line([*context, f"{flag}={value}", "python", "train.py"]) == plain:
                    break
        else:
            wrong.append(f"{flag}: {told}")
    assert wrong == []
    names = {f"-{each.metadata['name']}" for each in fields(options.Options) if each.metadata}
    plain = {
        "-np",
        "-w",
        "-port",
        "-port-range",
        "-strategy",
        "-host-timeout",
        "-standby",
        "-max-restarts",
        "-affinity",
    }
    assert plain <= compared & names


@pytest.mark.parametrize(("flags", "default"), [([], "fail"), (["-w"], "shrink")])
def test_the_default_of_recover_is_the_pages(flags, default, monkeypatch):
    monkeypatch.setattr(options, "check_program", lambda command: None)
    assert told_defaults("kungfu-run")["-recover"] == "`shrink` with `-w`, else `fail`"
    assert options.parse_command_line([*flags, "python", "train.py"]).recover == options.Recover(default)


def test_every_error_is_on_its_page_with_meaning_and_remedy():
    page = (DOCS / "errors.md").read_text(encoding="utf-8").partition("## Misuse warnings\n")[0]
    table = {row[0].strip("`"): row[1:] for row in rows(page)}
    real = {
        name for name, item in vars(errors).items() if isinstance(item, type) and issubclass(item, errors.KungFuError)
    }
    assert set(table) - {"error"} == real
    assert [name for name, cells in table.items() if len(cells) != 2 or not all(cells)] == []


def unit_of(name, text):
    """As the name says it, which Prometheus wants there, or the text that it serves."""
    for pattern, unit in (
        ("bytes_per_second$", "bytes/s"), ("bytes$", "bytes"), ("seconds$|_times?$", "s"),
        ("communication_ratio$", "0 to 1"), ("samples$|batch_size$", "samples"), ("steps_at_size$", "steps"),
    ):  # fmt: skip
        if re.search(pattern, name):
            return unit
    words = re.search("^Steps|^Workers|samples", text)
    return words[0].lower() if words else ""


def test_every_metric_is_on_its_page():
    page = sections("metrics.md")
    of_a_step = rows(page["Step metrics"])
    names = {code for row in of_a_step for code in re.findall(r"`([^`]+)`", row[0])}
    assert {each.name for each in fields(StepRecord)} | {"slowest", "slowdown"} == names
    served = {code.partition("{")[0] for row in of_a_step for code in re.findall(r"`(kungfu_[^`]+)`", row[1])}
    assert {f"kungfu_{name}" for name, *_ in (*endpoint._GAUGES, *endpoint._BY_RANK)} | {"kungfu_rank"} == served
    served = [(name, text, of) for name, text, of in (*endpoint._GAUGES, *endpoint._BY_RANK)]
    named = StepRecord(**{each.name: each.name for each in fields(StepRecord)})
    assert {(of(named), f"kungfu_{name}", unit_of(name, text)) for name, text, of in served} == {
        (row[0].strip("`"), row[1].strip("`").partition("{")[0], row[2])
        for row in of_a_step
        if "`kungfu_" in row[1] and row[0] != "-"
    }
    units = {row[0].strip("`"): row[1] for row in rows(page["What a policy sees"])[1:]}
    assert units == {name: unit_of(name, "") for name in units}
    of_policies = {code for row in rows(page["What a policy sees"]) for code in re.findall(r"`([^`]+)`", row[0])}
    assert {each.name for each in fields(Metrics)} - names | {"local_batch_size"} == of_policies


def read_from_the_environment(tree):
    """Names, as in `environ["A"]`, `environ.get("A")`, `"A" in environ`, `{"A": ..., **environ}`, `getenv("A")`."""
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }

    def is_environment(node):
        return re.search(r"\benviron(ment)?$", ast.unparse(node)) is not None

    for node in ast.walk(tree):
        named = []
        if isinstance(node, ast.Subscript) and is_environment(node.value) and isinstance(node.ctx, ast.Load):
            named = [node.slice]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if is_environment(node.func.value) or node.func.attr == "getenv":
                named = node.args[:1]
        elif isinstance(node, ast.Compare) and is_environment(node.comparators[0]):
            named = [node.left]
        elif isinstance(node, ast.Dict) and any(
            k is None and is_environment(v) for k, v in zip(node.keys, node.values)
        ):
            named = [key for key in node.keys if key is not None]
        for each in named:
            value = constants.get(each.id) if isinstance(each, ast.Name) else getattr(each, "value", None)
            if isinstance(each, ast.Attribute) and ast.unparse(each.value) == "env":
                value = getattr(env, each.attr)
            if isinstance(value, str):
                yield value


def test_every_variable_that_the_code_reads_is_in_a_table():
    """What docs/environment.md is written from; test_env.py compares the two."""
    root, named = DOCS.parent, {}
    for path in sorted((root / "ms_kungfu").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        found = [*re.findall(r"""["'](KUNGFU_[A-Z_]+)["']""", text), *read_from_the_environment(ast.parse(text))]
        named.update(dict.fromkeys(found, path))
    for path in (path for folder in ("ops_src", "kernels") for path in sorted((root / folder).rglob("*.cc"))):
        named.update(dict.fromkeys(re.findall(r'getenv\("(\w+)"', path.read_text()), path))
    for path in (root / "CMakeLists.txt", *sorted((root / "cmake").rglob("*.cmake"))):
        named.update(dict.fromkeys(re.findall(r"ENV\{(\w+)\}", path.read_text()), path))
    others = {name for name, *_ in env.OTHERS}
    assert {"KUNGFU_SELF", "ASCEND_RT_VISIBLE_DEVICES"} <= set(named)
    # And what every program is given.
    known = {v.name for v in env.VARIABLES} | others | {"HOME", "PATH"}
    assert {name: path for name, path in named.items() if name not in known} == {}
    assert others <= set(named)


def test_readme_has_at_most_700_words():
    assert len((DOCS.parent / "README.md").read_text(encoding="utf-8").split()) <= 700


def test_pages_tell_the_pythons_and_mindspores_that_the_package_takes():
    project = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    (least, beyond) = map(int, re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', project).groups())
    (oldest, next_one) = re.search(r'"mindspore>=([\d.]+),<2\.(\d+)"', project).groups()
    pythons = rf"3\.{least} (?:to|至) 3\.{beyond - 1}\b"
    mindspores = rf"{re.escape(oldest)} (?:to|至) 2\.{int(next_one) - 1}\b"
    for page in ("README.md", "README.zh.md", "docs/start.md", "docs/start.zh.md", "docs/limits.md"):
        text = (DOCS.parent / page).read_text(encoding="utf-8")
        assert re.search(pythons, text), page
        assert re.search(mindspores, text), page
        # Of all that is told of Pythons: these, or those that MindSpore 2.10 has wheels for.
        told = set(re.findall(r"3\.\d+ (?:to|至) 3\.\d+", text))
        assert {each.replace("至", "to") for each in told} <= {f"3.{least} to 3.{beyond - 1}", "3.10 to 3.12"}, page


@pytest.mark.parametrize("page", ["errors.md", "resizing.md", "limits.md"])
def test_pages_tell_how_many_workers_a_job_can_have(page):
    told = [line for line in (DOCS / page).read_text(encoding="utf-8").splitlines() if re.search(r"\b1,024\b", line)]
    numbers = {int(each.replace(",", "")) for line in told for each in re.findall(r"\b(1,024|25\d)\b", line)}
    assert numbers == {cluster.MAX_WORKERS, cluster.MAX_WORKERS_OF_HOSTS, cluster.MAX_WORKERS_OF_EACH}


def test_missing_line_of_a_reference_page_is_found(tmp_path, monkeypatch):
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


@pytest.mark.parametrize(
    ("page", "line", "wrong", "check"),
    [
        ("flags.md", "| `-port PORT` | 9100 |", "9101", "kungfu-config-server"),
        ("flags.md", "| `-ttl TIME` | never |", "10m", "kungfu-config-server"),
        ("flags.md", "| `-for S` | 120 |", "60", "python -m ms_kungfu.chaos -- program"),
        ("flags.md", "| `--batch BATCH` | 32 |", "64", "python -m benchmarks COMMAND"),
        ("flags.md", "`step` 1; `parts` 1,2; `shards` 2,4 |", "2; `step` 1", "python -m benchmarks COMMAND"),
        ("flags.md", "| `--rounds ROUNDS` | 5; `resize` 3 |", "5", "python -m benchmarks COMMAND"),
        ("flags.md", "| `-recover HOW` | `shrink` with `-w`, else `fail` |", "`fail`", "recover"),
        ("flags.md", "| `-strategy NAME` | `AUTO` |", "`RING`", "kungfu-run"),
        ("flags.md", "| `-port-range A-B` | 10000-11000 |", "10000-12000", "kungfu-run"),
        ("flags.md", "| `-peer-timeout TIME` | `KUNGFU_PEER_TIMEOUT`, else 30s |", "20s", "kungfu-run"),
        ("metrics.md", "| `seconds` | `kungfu_step_seconds` | s |", "ms", "metrics"),
        ("metrics.md", "| `step_time` | s |", "ms", "metrics"),
    ],
)
def test_wrong_line_of_a_reference_page_is_found(page, line, wrong, check, tmp_path, monkeypatch):
    text = (DOCS / page).read_text(encoding="utf-8")
    # In flags.md the section, as flags of several programs have one name.
    start = text.index(f"\n## {check}\n") if check in PROGRAMS else 0
    at = text.index(line, start)
    cells = line.strip(" |").split(" | ")
    changed = " | ".join([*cells[:-1], wrong])
    (tmp_path / page).write_text(text[:at] + line.replace(" | ".join(cells), changed) + text[at + len(line) :], "utf-8")
    monkeypatch.setattr(f"{__name__}.DOCS", tmp_path)
    checks = {
        "metrics": test_every_metric_is_on_its_page,
        "recover": lambda: test_the_default_of_recover_is_the_pages([], "fail", monkeypatch),
        "kungfu-run": lambda: test_the_defaults_that_the_page_tells_are_those_of_kungfu_run(monkeypatch),
    }
    with pytest.raises(AssertionError):
        checks.get(check, lambda: test_the_defaults_that_the_page_tells_are_the_programs(check))()


def test_every_misuse_warning_is_on_the_page_of_errors():
    checks = set()
    for path in (DOCS.parent / "ms_kungfu").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
                text = str(node.args[0].value)
                checks |= set(re.findall(r"^misuse: check=(\w+)", text))
                if path.stem == "misuse_warnings" and getattr(node.func, "attr", "") == "_say":
                    checks.add(text)
    section = (DOCS / "errors.md").read_text(encoding="utf-8").partition("## Misuse warnings\n")[2]
    assert len(checks) >= 12
    assert {name for row in rows(section)[1:] for name in re.findall(r"`(\w+)`", row[0])} == checks
