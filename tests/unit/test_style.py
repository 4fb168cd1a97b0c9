"""The pages and the docstrings of the public surface follow docs/style.md.

Of pages: sentences, line width, page length and the words of its glossary. Of docstrings the same, and that they name
all arguments and exceptions. ruff checks their format (pyproject.toml). Names of tests have a subject, a length and the
words of the glossary. Comments and docstrings of ms_kungfu have the words of the glossary, and name their actors.
"""

from __future__ import annotations

import ast
import doctest
import functools
import importlib
import inspect
import io
import math
import re
import tokenize
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_WORDS, MAX_COLUMNS, MAX_SENTENCE = 2500, 100, 25
# Pages that aren't rewritten yet and the rules that they may break. Take a line out with its page's rewrite.
UNFINISHED: dict[str, str] = {
    "docs/events.md": "columns",
    "docs/messages.md": "words columns",
}


def pages():
    found = [*ROOT.glob("*.md"), *ROOT.glob("examples/*/README.md"), *(ROOT / "docs").rglob("*.md")]
    # The pages in Chinese have no words of the glossary.
    return sorted(p for p in found if p.name != "style.md" and ".zh" not in p.name and "_build" not in p.parts)


def banned(guide):
    """The words set as code in the right column of the glossary, as one expression."""
    rows = re.findall(r"^\|[^|]+\|([^|]+)\|$", guide[guide.index("## Glossary") :], re.MULTILINE)
    words = [word for row in rows for word in re.findall(r"`([^`]+)`", row)]
    return re.compile(rf"(?<![\w-])(?:{'|'.join(sorted(words, key=len, reverse=True))})(?![\w-])", re.IGNORECASE)


BANNED = banned((ROOT / "docs" / "style.md").read_text(encoding="utf-8"))


def without_code(text):
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def plain(text):
    """Prose as it is read: code is one word, a link is its text."""
    text = re.sub(r"`[^`]+`", "X", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return text.replace("*", "")


def paragraphs(text):
    """Paragraphs and items of lists; no tables, no headings."""
    lines: list[str] = []
    for line in [*text.splitlines(), ""]:
        item = re.match(r"\s*(?:[-*]|\d+\.) (.*)", line)
        if item or not line.strip() or line.lstrip().startswith(("|", "#")):
            if lines:
                yield " ".join(lines)
            lines = [item[1]] if item else []
        else:
            lines.append(line.strip())


def sentences(text):
    for paragraph in paragraphs(text):
        yield from (s for s in re.split(r"(?<=[.!?])[\"')]*\s+(?=[A-Z\"(])", plain(paragraph)) if s)


def findings(text):
    """{rule: what breaks it}"""
    found: dict[str, list[str]] = {}
    if (words := len(text.split())) > MAX_WORDS:
        found["words"] = [f"{words} words"]
    prose = without_code(text)
    # Headings and rows of tables can't be broken, and the address of a link doesn't count.
    wide = [line for line in prose.splitlines() if not re.match(r"\s*[|#]", line)]
    wide = [line for line in wide if len(re.sub(r"\]\([^)]*\)", "]", line)) > MAX_COLUMNS]
    if wide:
        found["columns"] = wide
    lengths = sorted((len(s.split()), s) for s in sentences(prose))
    if lengths and lengths[math.ceil(0.95 * len(lengths)) - 1][0] > MAX_SENTENCE:
        found["sentences"] = [s for length, s in lengths if length > MAX_SENTENCE]
    if words := [m.group() for m in BANNED.finditer(plain(prose))]:
        found["glossary"] = words
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_page_follows_the_style_guide(page):
    found = findings(page.read_text(encoding="utf-8"))
    allowed = UNFINISHED.get(page.relative_to(ROOT).as_posix(), "").split()
    assert {rule: what for rule, what in found.items() if rule not in allowed} == {}
    assert set(allowed) <= set(found), "take these out of UNFINISHED"


def test_changelog_entry_is_one_line():
    entries = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[2].splitlines()[1:]
    assert [line for line in entries if line and not line.startswith(("- ", "## [", "### "))] == []


def test_list_of_unfinished_pages_has_at_most_ten_lines():
    assert len(UNFINISHED) <= 10


LONG = "One two three four five six seven eight nine ten eleven twelve thirteen " * 2 + "end."


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("word\n\n" * 2501, "words"),
        (
            "A line that has more columns than it may have. " * 3,
            "columns",
        ),
        (LONG.replace("six seven", "six\nseven"), "sentences"),
        ("- An item.\n- " + LONG.replace("six seven", "six\n  seven"), "sentences"),
        ("Nobody waits.", "glossary"),
        ("| cell | the worker who fails |", "glossary"),
        ("The state is sent in a [hand-over](page.md).", "glossary"),
    ],
)
def test_broken_rule_is_found(text, rule):
    assert list(findings(text)) == [rule]


@pytest.mark.parametrize(
    "text",
    [
        "The worker logs `hello`.",
        "```text\nwho deals the wish, in output that may have as many columns as a program prints\n```",
        "| " + "a cell " * 20 + "|",
        "A list:\n\n- an item\n- another item",
    ],
)
def test_correct_text_passes(text):
    assert findings(text) == {}


def test_glossary_is_read():
    assert BANNED.search("the outpost waits")
    assert not BANNED.search("the agent waits")


# ---- docstrings ------------------------------------------------------------------------------------------------------

SURFACE = (ROOT / "tests" / "unit" / "public_surface.txt").read_text().splitlines()
SECTIONS = ("Args:", "Returns:", "Yields:", "Raises:")


@dataclass(frozen=True)
class Definition:
    """A public name, or a module: its node in the file that defines it, and its docstring ("" without one)."""

    module: str
    path: str
    node: ast.AST
    doc: str


@functools.cache
def parsed(module):
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return path.relative_to(ROOT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def is_module(name):
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def defined(body, name):
    """The definition of a name among these statements, and its docstring: of an attribute, the text behind it."""
    for statement, behind in zip(body, [*body[1:], None]):
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) and statement.name == name:
            if any(isinstance(each, ast.Name) and each.id == "overload" for each in statement.decorator_list):
                continue
            return statement, ast.get_docstring(statement) or ""
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            is_text = isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant)
            return statement, inspect.cleandoc(behind.value.value) if is_text else ""
    return None


def look_up(module, name):
    """(module, node, docstring) of a name, by way of the imports; None of what isn't ours."""
    _, tree = parsed(module)
    if found := defined(tree.body, name):
        return (module, *found)
    is_package = not ROOT.joinpath(*module.split(".")).with_suffix(".py").is_file()
    for imported in ast.walk(tree):
        if isinstance(imported, ast.ImportFrom) and any(alias.name in (name, "*") for alias in imported.names):
            above = module.split(".")
            above = above[: len(above) - imported.level + is_package] if imported.level else []
            source = ".".join([*above, *filter(None, [imported.module])])
            if source.startswith("ms_kungfu") and is_module(source) and (found := look_up(source, name)):
                return found
    return None


def member(module, cls, name):
    """The same of a class's member: its own, or a base's where that alone has a docstring."""
    own = defined(cls.body, name)
    if own and own[1]:
        return (module, *own)
    for base in cls.bases:
        if isinstance(base, ast.Name) and (above := look_up(module, base.id)) and isinstance(above[1], ast.ClassDef):
            if found := member(above[0], above[1], name):
                return found
    return own and (module, *own)


def public_definitions():
    """{name: Definition}"""
    found = {}
    for line in SURFACE:
        name = line.partition("(")[0]
        parts = name.split(".")
        depth = 2 if len(parts) > 2 and is_module(".".join(parts[:2])) else 1
        module = ".".join(parts[:depth])
        for page in filter(is_module, (module, name)):
            path, tree = parsed(page)
            found[page] = Definition(page, path, tree, ast.get_docstring(tree) or "")
        if not is_module(name):
            at = look_up(module, parts[depth])
            if at and parts[depth + 1 :]:
                at = member(at[0], at[1], parts[-1])
            assert at, f"{name} isn't found"
            found[name] = Definition(module, parsed(at[0])[0], at[1], at[2])
    return found


PUBLIC = public_definitions()


def prose(doc):
    """The sentences of a docstring as a page would have them: no code, and each entry of a section is a list's item."""
    lines, section, code = [], "", False
    for line in doc.replace("``", "`").splitlines():
        if code and (not line.strip() or line.startswith("    ")):
            lines.append("")
            continue
        code = line.rstrip().endswith("::") or line.startswith(">>>")
        if line in SECTIONS:
            section, line = line, ""
        elif line and not line.startswith(" "):
            section = ""
        elif section and re.match(r"    \S", line):
            entry = line.strip() if section in ("Returns:", "Yields:") else line.partition(": ")[2]
            line = f"- {entry}" if section in ("Args:", "Raises:") else entry
        lines.append("" if line.startswith(">>>") else line)
    return "\n".join(lines)


def arguments(node):
    """What a function takes, or a class by its own constructor."""
    if isinstance(node, ast.ClassDef):
        node = next((f for f in node.body if isinstance(f, ast.FunctionDef) and f.name == "__init__"), None)
    if not isinstance(node, ast.FunctionDef):
        return []
    given = node.args
    every = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
    return [arg.arg for arg in every if arg and arg.arg not in ("self", "cls") and not arg.arg.startswith("_")]


def own_raises(node):
    """The exceptions that the function itself raises, or the class's constructor."""
    found = set()
    for raised in ast.walk(node) if isinstance(node, ast.FunctionDef) else ():
        if isinstance(raised, ast.Raise) and isinstance(raised.exc, ast.Call) and isinstance(raised.exc.func, ast.Name):
            found.add(raised.exc.func.id)
    return found


def docstring_findings(node, doc):
    """{rule: what breaks it}"""
    if not doc:
        return {"missing": ["docstring"]}
    found = findings(text := prose(doc))
    if long := [sentence for sentence in sentences(text) if len(sentence.split()) > MAX_SENTENCE]:
        found["sentences"] = long
    if wide := [line for line in doc.splitlines() if len(line) > MAX_COLUMNS]:
        found["columns"] = wide
    is_attribute = isinstance(node, (ast.Assign, ast.AnnAssign))
    if not is_attribute and len(list(sentences(doc.partition("\n")[0]))) > 1:
        found["first line"] = [doc.partition("\n")[0]]
    named = {name for names in re.findall(r"^    ([\w, ]+): ", doc, re.MULTILINE) for name in names.split(", ")}
    lacking = [arg for arg in arguments(node) if arg not in named and f"`{arg}`" not in doc]
    if lacking and "arguments are those of" not in doc:
        found["arguments"] = lacking
    if lacking := sorted(name for name in own_raises(node) if name not in doc and name != "NotImplementedError"):
        found["raises"] = lacking
    returns = getattr(node, "returns", None)
    if isinstance(node, ast.FunctionDef) and returns and ast.unparse(returns) not in ("None", "Iterator[None]"):
        attribute = any("property" in ast.unparse(decorator) for decorator in node.decorator_list)
        if not attribute and not re.search(r"return|yield", doc, re.IGNORECASE):
            found["returns"] = [doc.partition("\n")[0]]
    # Sphinx takes what stands before a colon for the type.
    if returned := re.search(r"^Returns:\n(.*: .*|.*:)$", doc, re.MULTILINE):
        found["returns"] = [returned[1]]
    return found


@pytest.mark.parametrize("module", sorted({each.module for each in PUBLIC.values()}))
def test_docstrings_of_the_public_surface_follow_it(module):
    found = {name: docstring_findings(each.node, each.doc) for name, each in PUBLIC.items() if each.module == module}
    assert {name: broken for name, broken in found.items() if broken} == {}


@pytest.mark.parametrize(
    ("source", "rule"),
    [
        ("def f(size): pass", "missing"),
        ('def f(size):\n    """Change the size."""', "arguments"),
        ('def f(size):\n    """Change the size.\n\n    Args:\n        sizes: the number.\n    """', "arguments"),
        ('class A:\n    """Keep a size."""\n    def __init__(self, size): pass', "arguments"),
        ('def f():\n    """Change the size."""\n    raise ValueError("no")', "raises"),
        ('def f() -> int:\n    """Change the size."""', "returns"),
        ('def f() -> int:\n    """Change.\n\n    Returns:\n        A version: a number.\n    """', "returns"),
        ('def f():\n    """Change the size. Wait for it."""', "first line"),
        ('def f():\n    """Change the size, which nobody waits for."""', "glossary"),
        (f'def f(size):\n    """Change it.\n\n    Args:\n        size: {LONG}\n    """', "sentences"),
        (f'def f():\n    """Change it.\n\n    {"x" * 101}\n    """', "columns"),
    ],
)
def test_broken_rule_of_docstrings_is_found(source, rule):
    (node,) = ast.parse(source).body
    found = docstring_findings(node, ast.get_docstring(node) or "")
    assert rule in found
    assert found.keys() <= {rule, "columns"}


def test_correct_docstring_passes():
    (node,) = ast.parse(
        'def f(size, name) -> int:\n    """Change the size of `name`.\n\n    ::\n\n        nobody(waits)\n\n'
        '    Args:\n        size: the number.\n\n    Returns:\n        The version.\n    """'
    ).body
    assert docstring_findings(node, ast.get_docstring(node)) == {}


def test_linter_reads_the_files_of_the_public_surface():
    """One pattern of pyproject.toml has all files that define a public name, and no others."""
    pattern = re.search(r'^"!ms_kungfu/\{(.*)\}\.py" = \["D"\]$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    linted = {path for each in pattern[1].split(",") for path in ROOT.glob(f"ms_kungfu/{each}.py")}
    assert {path.relative_to(ROOT).as_posix() for path in linted} == {each.path for each in PUBLIC.values()}


def test_examples_in_docstrings_run():
    modules = {d.path[: -len(".py")].replace("/", ".") for d in PUBLIC.values() if ">>>" in d.doc}
    assert modules
    assert [doctest.testmod(importlib.import_module(module)).failed for module in modules] == [0] * len(modules)


# ---- comments and docstrings -----------------------------------------------------------------------------------------

# Beside the words of the glossary.
NO_ACTOR = re.compile(r"\b(?:any|every|some)one\b|\banybody\b|\bno one\b", re.IGNORECASE)


def remarks(source):
    """The comments of a program, and its docstrings, those of attributes too."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string.lstrip("#: ")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield prose(inspect.cleandoc(node.value.value))


def remark_findings(source):
    """The words outside code and quotes that the guide has others for."""
    texts = [re.sub(r'"[^"]*"', "X", plain(text)) for text in remarks(source)]
    return [match.group() for text in texts for words in (BANNED, NO_ACTOR) for match in words.finditer(text)]


def test_comments_and_docstrings_follow_the_style_guide():
    found = {
        path.relative_to(ROOT).as_posix(): words
        for path in sorted((ROOT / "ms_kungfu").rglob("*.py"))
        if (words := remark_findings(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1  # anybody may read it\n", ["anybody"]),
        ("#: The newcomers.\nx = 1\n", ["newcomers"]),
        ('"""Return the board."""\n', ["board"]),
        ('class C:\n    x = 1\n    """What the joiner has."""\n', ["joiner"]),
        ('# The worker logs "nobody waits", and `who` is its name.\nwho = "told by whoever"\n', []),
    ],
)
def test_broken_rule_of_remarks_is_found(source, words):
    assert remark_findings(source) == words


# ---- names of tests --------------------------------------------------------------------------------------------------

MAX_NAME = 70
NO_SUBJECT = re.compile(r"(?:what|whatever|whose|it|its|and)\b")


def name_findings(name):
    """{rule: what breaks it} of `test_name` or `Suite.Name`."""
    found = {}
    if len(name) > MAX_NAME:
        found["length"] = [name]
    words = re.sub(r"_|(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name.removeprefix("test_")).lower()
    words = words.rpartition(".")[2].strip()
    if NO_SUBJECT.match(words):
        found["subject"] = [words.split()[0]]
    if banned_words := [m.group() for m in [*BANNED.finditer(words), *re.finditer(r"\bheads?\b(?! node)", words)]]:
        found["glossary"] = banned_words
    return found


def test_names_of_tests_follow_the_style_guide():
    files = [*(ROOT / "tests").rglob("*.py")]
    names = {
        name for file in files for name in re.findall(r"^ *(?:async )?def (test_\w+)", file.read_text(), re.MULTILINE)
    }
    for file in (ROOT / "tests" / "cpp").glob("*.cc"):
        names |= {
            ".".join(found)
            for found in re.findall(r"^TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", file.read_text(), re.MULTILINE)
        }
    assert {"test_names_of_tests_follow_the_style_guide", "Mesh.RefusesWhatCannotBe"} <= names
    assert {name: broken for name in names if (broken := name_findings(name))} == {}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("test_worker_" + "x" * 59, "length"),
        ("test_what_is_ready_starts", "subject"),
        ("test_its_rank_is_kept", "subject"),
        ("test_worker_that_nobody_started_fails", "glossary"),
        ("test_newcomer_waits", "glossary"),
        ("test_host_outlives_the_head", "glossary"),
        ("Mesh.ItsEndIsSeen", "subject"),
        ("Mesh.NobodyWaits", "glossary"),
    ],
)
def test_broken_rule_of_test_names_is_found(name, rule):
    assert list(name_findings(name)) == [rule]


def test_correct_test_name_passes():
    assert name_findings("test_departed_worker_of_the_head_node_keeps_what_it_" + "x" * 18) == {}
