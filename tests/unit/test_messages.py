"""Texts of ms_kungfu that a user sees have no word that docs/style.md bans, and log lines are events of one table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.unit.test_style import BANNED, ROOT

PACKAGE = ROOT / "ms_kungfu"
LEVELS = {"debug": "DEBUG", "info": "INFO", "warning": "WARNING", "error": "ERROR", "exception": "ERROR"}
EVENT = re.compile(r"([a-z]+(?: [a-z]+)*):(?: |$)")
PEOPLE = re.compile(r"(?:no|some|every)body|whoever")
KEY = re.compile(r"(?<![%\w-])(\w+)=")


def parsed() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


# ---- words -----------------------------------------------------------------------------------------------------------


def texts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Strings with their lines, without docstrings."""
    within = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            within.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            within |= set(map(id, node.values))
        if id(node) not in within and (text := written(node)):
            yield node.lineno, text  # type: ignore[attr-defined]


def written(node: ast.AST) -> str:
    """What a string has in the source, with X for each value; "" for what isn't one."""
    if isinstance(node, ast.JoinedStr):
        return "".join(written(part) if isinstance(part, ast.Constant) else "X" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return written(node.left) + written(node.right)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def banned_words(source: ast.AST) -> list[tuple[int, str]]:
    """A string of one word is a name, such as a key."""
    found = []
    for line, text in texts(source):
        words = BANNED if len(text.split()) > 1 else PEOPLE
        found += [(line, m.group()) for m in words.finditer(re.sub("`[^`]*`", "X", text))]
    return found


def test_texts_have_no_banned_word() -> None:
    assert {path: found for path, tree in parsed() if (found := banned_words(tree))} == {}


@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError("nobody waits")',
        'parser.error(f"{name}: who is it")',
        '_log.info("rank %d is gone", 1)',
        'x = "nobody"',
    ],
)
def test_banned_word_is_found(source: str) -> None:
    assert len(banned_words(ast.parse(source))) == 1


def test_docstrings_and_names_are_no_texts() -> None:
    assert banned_words(ast.parse('"""Nobody waits."""\nfind("told", x["gone"])\nprint("it is `gone`")')) == []


# ---- log lines -------------------------------------------------------------------------------------------------------


def log_lines(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, level, text)"""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or not node.args:
            continue
        name = node.func.attr
        if name == "warn_once":
            yield node.lineno, "WARNING", written(node.args[0])
        elif re.fullmatch(r"_?log(?:ger)?", ast.unparse(node.func.value)) and name in {*LEVELS, "log"}:
            if ast.unparse(node.args[0]) != "line":  # of warn_once
                yield node.lineno, LEVELS.get(name, "INFO"), written(node.args[name == "log"])


def event_of(text: str) -> tuple[str, set[str]] | None:
    """The event and its keys, which end with the first sentence; None if the text is no event."""
    if (found := EVENT.match(text)) is None:
        return None
    pairs = re.split(r"\. (?=[A-Z%])", text[found.end() :])[0]
    return found[1], set(KEY.findall(re.sub(r'"[^"]*"', "", pairs)))


def events() -> dict[str, tuple[set[str], set[str]]]:
    """{event: (levels, keys)} of all files."""
    found: dict[str, tuple[set[str], set[str]]] = {}
    for path, tree in parsed():
        for line, level, text in log_lines(tree):
            event = event_of(text)
            assert event is not None, f"{path}:{line}: {text!r} is no event with key=value pairs"
            levels, keys = found.setdefault(event[0], (set(), set()))
            levels.add(level)
            keys |= event[1]
    return found


def documented(page: str) -> dict[str, tuple[set[str], set[str]]]:
    table = page[page.index("## Log events") :]
    rows = re.findall(r"^\| `([a-z ]+)` \| ([A-Z, ]+) \| (.*) \|$", table, re.MULTILINE)
    return {name: (set(levels.split(", ")), set(re.findall(r"`(\w+)`", keys))) for name, levels, keys in rows}


def test_log_lines_are_the_events_of_the_table() -> None:
    assert documented((ROOT / "docs" / "monitoring.md").read_text(encoding="utf-8")) == events()


@pytest.mark.parametrize(
    ("source", "level", "event"),
    [
        ('_log.info("resize: %d -> %d workers version=%d reason=%s", *a)', "INFO", ("resize", {"version", "reason"})),
        ('_log.error("store full: error=\\"a=%s\\". Use size=3", e)', "ERROR", ("store full", {"error"})),
        ('self.warn_once(f"no answer: hosts={head}. Remedy: x=1")', "WARNING", ("no answer", {"hosts"})),
        ('_log.log(level, "policy: %s step=%d", a, b)', "INFO", ("policy", {"step"})),
        ('_log.warning("%s; the job goes on", error)', "WARNING", None),
        ('_log.info("step %d: joined", step)', "INFO", None),
    ],
)
def test_event_of_a_log_line_is_read(source: str, level: str, event: tuple[str, set[str]] | None) -> None:
    ((_, found, text),) = log_lines(ast.parse(source))
    assert (found, event_of(text)) == (level, event)


def test_table_is_read() -> None:
    assert documented("## Log events\n\n| `left` | INFO, DEBUG | `rank`, `step` |\n") == {
        "left": ({"INFO", "DEBUG"}, {"rank", "step"})
    }
