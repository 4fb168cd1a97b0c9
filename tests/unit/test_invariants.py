"""Protocol arguments are numbered invariants, one a paragraph, and the tests that they name exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs"
TRANSPORT = ROOT / "ops_src/collectives/hosts/transport.h"
COLUMNS = 100  # below the formatter's limit: it leaves the lines of a comment alone then


def head(text):
    """The paragraphs of the comment that a file begins with."""
    lines = text[: text.index("#ifndef")].splitlines()
    assert [line for line in lines if len(line) > COLUMNS] == []
    return re.split(r"\n\n", "\n".join(line[2:].strip() for line in lines))


def wrong(paragraphs, tests):
    """What isn't as it has to be."""
    numbered = [(int(found[1]), text) for text in paragraphs if (found := re.match(r"(\d+)\. ", text))]
    if [number for number, _ in numbered] != list(range(1, len(numbered) + 1)):
        yield "the numbers have gaps"
    for number, text in numbered:
        if not re.search(r"^Test: ", text, re.MULTILINE):
            yield f"{number} names no test"
        if re.search(r"^\d+\. ", text.partition("\n")[2], re.MULTILINE):
            yield f"{number} has another one in its paragraph"
    for name in re.findall(r"^Test: (.+)$", "\n".join(paragraphs), re.MULTILINE):
        if name not in tests:
            yield f"{name} is no test"


def cpp_tests():
    text = "\n".join(path.read_text() for path in (ROOT / "tests/cpp").glob("*_test.cc"))
    return {".".join(names) for names in re.findall(r"^TEST(?:_F|_P)?\((\w+), (\w+)\)", text, re.MULTILINE)}


def test_invariants_of_transport_name_tests_that_exist():
    paragraphs = head(TRANSPORT.read_text())
    assert list(wrong(paragraphs, cpp_tests())) == []
    assert sum(bool(re.match(r"\d+\. ", text)) for text in paragraphs) == 13


def comments(text):
    """The paragraphs of all comments that have lines of their own."""
    for block in re.findall(r"(?:^ *//.*\n)+", text, re.MULTILINE):
        yield from re.split(r"\n\n", re.sub(r"^ *// ?", "", block, flags=re.MULTILINE).strip())


def test_invariants_in_comments_name_tests_that_exist():
    tests, numbered = cpp_tests(), 0
    for path in sorted([*(ROOT / "ops_src").rglob("*.h"), *(ROOT / "ops_src").rglob("*.cc")]):
        paragraphs = list(comments(path.read_text()))
        for text in paragraphs:
            is_numbered = re.match(r"\d+\. ", text) is not None
            numbered += is_numbered
            assert not is_numbered or re.search(r"^Test: ", text, re.MULTILINE), (path, text)
        named = re.findall(r"^Test: (.+)$", "\n".join(paragraphs), re.MULTILINE)
        assert [name for name in named if name not in tests] == [], path
        files = re.findall(r"\btests/[\w/]+\.(?:cc|py)\b", "\n".join(paragraphs))
        assert [name for name in files if not (ROOT / name).is_file()] == [], path
    assert numbered > 40


@pytest.mark.parametrize(
    ("paragraphs", "told"),
    [
        (["1. A.", "2. B.\nTest: X.Y"], ["1 names no test"]),
        (["1. A.\nTest: X.Y", "3. B.\nTest: X.Y"], ["the numbers have gaps"]),
        (["1. A.\n2. B.\nTest: X.Y"], ["1 has another one in its paragraph"]),
        (["1. A.\nTest: X.Z"], ["X.Z is no test"]),
    ],
)
def test_invariant_that_breaks_a_rule_is_seen(paragraphs, told):
    assert list(wrong(paragraphs, {"X.Y"})) == told


def items(page):
    """Yield the numbered items of a page in the form of a comment: a line for each test."""
    for text in re.split(r"\n\n(?! )", page):
        found = re.fullmatch(r"(\d+\. .+?)(?:\s*\(Tests:((?:\s*`[^`]+`,?)+)\.\))?", text.strip(), re.DOTALL)
        if found:
            names = re.findall(r"`([^`]+)`", found[2] or "")
            yield "\n".join([" ".join(found[1].split()), *(f"Test: {name}" for name in names)])


def test_invariants_of_recovery_name_tests_that_exist():
    pages = [PAGES / "recovery-protocol.md", PAGES / "control-protocol.md"]
    paragraphs = [item for page in pages for item in items(page.read_text(encoding="utf-8"))]
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert list(wrong(paragraphs, cpp_tests() | files)) == []
    assert len(paragraphs) == 30


def test_item_of_page_without_tests_is_found():
    page = "1. One.\n   More. (Tests: `X.Y`,\n   `tests/unit/test_x.py`.)\n\n2. Two."
    assert list(items(page)) == ["1. One. More.\nTest: X.Y\nTest: tests/unit/test_x.py", "2. Two."]
    assert list(wrong(list(items(page)), {"X.Y", "tests/unit/test_x.py"})) == ["2 names no test"]


def test_rows_of_failure_matrix_name_tests_that_exist():
    page = (PAGES / "recovery.md").read_text(encoding="utf-8")
    matrix = page.partition("## Failure matrix")[2]
    rows = [line for line in matrix.splitlines() if line.startswith("| ") and "What fails" not in line]
    assert len(rows) >= 25
    files = {path.name for path in (ROOT / "tests").rglob("*test*.*")}
    for row in rows:
        named = re.findall(r"`(\w+\.(?:py|cc))`", row.split(" | ")[-1])
        assert named, row
        assert set(named) <= files, row
