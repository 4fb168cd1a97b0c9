"""The pages follow docs/style.md: sentences, line width, page length and the words of its glossary."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MAX_WORDS, MAX_COLUMNS, MAX_SENTENCE = 2500, 100, 25
# Pages that aren't rewritten yet and the rules that they may break. Take a line out with its page's rewrite.
UNFINISHED: dict[str, str] = {
    "docs/architecture.md": "words columns sentences glossary",
    "docs/messages.md": "words columns glossary",
}


def pages():
    found = [*ROOT.glob("*.md"), *ROOT.glob("examples/*/README.md"), *(ROOT / "docs").rglob("*.md")]
    # The changelog is history; the pages in Chinese have no words of the glossary.
    return sorted(
        p
        for p in found
        if p.name not in ("CHANGELOG.md", "style.md") and ".zh" not in p.name and "_build" not in p.parts
    )


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
