"""What the site's search finds, in the order in which a browser shows it.

`ranked` does what Sphinx's `searchtools.js` does (Search._parseQuery, _performSearch, performObjectSearch and
performTermsSearch, Sphinx 9) with the numbers of docs/_ext/scorer.js, so that no browser is needed. `test_site.py`
compares the two where there is a node.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import snowballstemmer

OBJECT_NAME, OBJECT_PARTIAL, OBJECT_PRIORITY = 11, 6, {0: 15, 1: 5, 2: -5}
TITLE, PARTIAL_TITLE, TERM, PARTIAL_TERM = 15, 7, 5, 2
SCORER = Path(__file__).resolve().parents[2] / "docs" / "_ext" / "scorer.js"
HEADING = int(re.search(r"heading: (\d+)", SCORER.read_text()).group(1))
BEHIND = {start: int(less) for start, less in re.findall(r'"([\w/]+)": (\d+)', SCORER.read_text())}


@dataclass(frozen=True)
class Found:
    page: str
    title: str
    anchor: str
    score: int
    kind: str


def rounded(value: float) -> int:
    """JavaScript's Math.round."""
    return int(value + 0.5)


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def weighed(found: Found) -> Found:
    """scorer.js's `score`."""
    if found.kind == "title":
        return replace(found, score=found.score + HEADING)
    less = next((less for start, less in BEHIND.items() if found.page.startswith(start)), 0)
    return found if found.kind == "index" else replace(found, score=found.score - less)


class Site:
    def __init__(self, html: Path) -> None:
        text = (html / "searchindex.js").read_text(encoding="utf-8")
        self.index: dict[str, Any] = json.loads(text[len("Search.setIndex(") : text.rindex(")")])
        language = (html / "_static" / "language_data.js").read_text(encoding="utf-8")
        self.stopwords = set(
            json.loads(re.search(r"stopwords = (?:new Set\()?(\[.*?\])", language, re.DOTALL).group(1))
        )
        self.stem = snowballstemmer.stemmer("english").stemWord

    def ranked(self, query: str) -> list[Found]:
        """The best first."""
        query = query.strip()
        terms = dict.fromkeys(
            self.stem(word.lower())
            for word in words(query)
            if word.lower() not in self.stopwords and not re.fullmatch("[0-9]+", word)
        )
        objects = list(dict.fromkeys(words(query.lower())))
        found = [*self._titles(query.lower()), *self._index_entries(query.lower())]
        for term in objects:
            found += self._objects(term, [other for other in objects if other != term])
        found += self._terms(list(terms))
        best: dict[tuple[str, str, str, bool], Found] = {}
        for each in sorted(map(weighed, found), key=lambda f: (-f.score, f.title.lower())):
            best.setdefault((each.page, each.title, each.anchor, each.kind == "object"), each)
        return list(best.values())

    def _titles(self, query: str) -> Iterator[Found]:
        titles = self.index["titles"]
        for title, places in self.index["alltitles"].items():
            if query in title.lower().strip() and len(query) >= len(title) / 2:
                for page, anchor in places:
                    shown = title if titles[page] == title else f"{titles[page]} > {title}"
                    boost = 1 if titles[page] == title else 0
                    yield self._at(page, shown, anchor or "", rounded(TITLE * len(query) / len(title)) + boost, "title")

    def _index_entries(self, query: str) -> Iterator[Found]:
        for entry, places in self.index["indexentries"].items():
            if query in entry and len(query) >= len(entry) / 2:
                for page, anchor, is_main in places:
                    if is_main:  # the others come behind everything
                        score = rounded(100 * len(query) / len(entry))
                        yield self._at(page, self.index["titles"][page], anchor, score, "index")

    def _objects(self, term: str, others: list[str]) -> Iterator[Found]:
        for prefix, matches in self.index["objects"].items():
            for page, kind, priority, anchor, name in matches:
                full = f"{prefix}.{name}" if prefix else name
                last = full.lower().split(".")[-1]
                if term not in full.lower():
                    continue
                kind_name = self.index["objnames"][str(kind)][2]
                haystack = f"{prefix} {name} {kind_name} {self.index['titles'][page]}".lower()
                if any(other not in haystack for other in others):
                    continue
                score = OBJECT_NAME if term in (full.lower(), last) else OBJECT_PARTIAL if term in last else 0
                yield self._at(page, full, anchor or full, score + OBJECT_PRIORITY.get(priority, 0), "object")

    def _terms(self, terms: list[str]) -> Iterator[Found]:
        scores: dict[int, dict[str, int]] = {}
        for word in terms:
            kinds = (("terms", TERM, PARTIAL_TERM), ("titleterms", TITLE, PARTIAL_TITLE))
            records = [(self.index[kind].get(word), whole) for kind, whole, _ in kinds]
            for kind, _, part in kinds:
                if len(word) > 2 and word not in self.index[kind]:
                    records += [(files, part) for term, files in self.index[kind].items() if word in term]
            for files, score in records:
                for page in [] if files is None else files if isinstance(files, list) else [files]:
                    scores.setdefault(page, {})[word] = score
        for page, of_words in scores.items():
            if len(of_words) in (len(terms), sum(len(term) > 2 for term in terms)):
                yield self._at(page, self.index["titles"][page], "", max(of_words.values()), "text")

    def _at(self, page: int, title: str, anchor: str, score: int, kind: str) -> Found:
        return Found(self.index["docnames"][page], title, anchor, score, kind)
