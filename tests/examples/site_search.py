"""What the site's search finds, in the order in which a browser shows it.

`ranked` does what docs/_ext/search.js does, and of Sphinx's `searchtools.js` its performObjectSearch (Sphinx 9), with
the numbers of the former, so that no browser is needed. `test_site.py` compares the two where there is a node.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import snowballstemmer

OBJECT_NAME, OBJECT_PARTIAL, OBJECT_PRIORITY = 11, 6, {0: 15, 1: 5, 2: -5}
SEARCH = Path(__file__).resolve().parents[2] / "docs" / "_ext" / "search.js"
NUMBERS = {name: int(value) for name, value in re.findall(r"^  (\w+): (\d+),", SEARCH.read_text(), re.MULTILINE)}
BEHIND = {start: int(less) for start, less in re.findall(r'"([\w/-]+)": (\d+)', SEARCH.read_text())}


@dataclass(frozen=True)
class Found:
    page: str
    title: str
    anchor: str
    score: int
    kind: str


@dataclass(frozen=True)
class Phrase:
    """A heading of a page, or an entry of the index, and how much each of its words weighs."""

    weights: dict[str, int]
    text: str
    worth: int
    page: int
    anchor: str


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text)


def less(page: str) -> int:
    return next((points for start, points in BEHIND.items() if page.startswith(start)), 0)


class Site:
    def __init__(self, html: Path) -> None:
        text = (html / "searchindex.js").read_text(encoding="utf-8")
        self.index: dict[str, Any] = json.loads(text[len("Search.setIndex(") : text.rindex(")")])
        language = (html / "_static" / "language_data.js").read_text(encoding="utf-8")
        self.stopwords = set(
            json.loads(re.search(r"stopwords = (?:new Set\()?(\[.*?\])", language, re.DOTALL).group(1))
        )
        self.stem = snowballstemmer.stemmer("english").stemWord
        self.names = self.index["docnames"]
        self.has: dict[str, dict[int, float]] = {}
        for kind, much in (("terms", 1), ("titleterms", 2)):
            for word, files in self.index[kind].items():
                for page in files if isinstance(files, list) else [files]:
                    self.has.setdefault(word, {})[page] = much
        found = [
            (title, NUMBERS["heading"], page, anchor)
            for title, places in self.index["alltitles"].items()
            for page, anchor in places
        ]
        for entry, places in self.index["indexentries"].items():
            for page, anchor, is_main in places:
                if is_main:
                    found.append((entry, NUMBERS["entry"], page, anchor))
                    for word in self.bag(entry):
                        self.has.setdefault(word, {})[page] = 2
        self.phrases = [
            Phrase({word: self.weight(word) for word in self.bag(text)}, text, worth, page, anchor or "")
            for text, worth, page, anchor in found
        ]

    def bag(self, text: str) -> list[str]:
        kept = [word.lower() for word in words(text) if word.lower() not in self.stopwords]
        return list(dict.fromkeys(map(self.stem, kept)))

    def places(self, word: str) -> dict[int, float]:
        if word in self.has:
            return self.has[word]
        found: dict[int, float] = {}
        if len(word) > 2:
            for longer, pages in self.has.items():
                if word in longer:
                    for page, much in pages.items():
                        found[page] = max(found.get(page, 0), much / 2)
        return found

    def weight(self, word: str) -> int:
        weight, having = 1, len(self.places(word)) or 1
        while having * 2 <= len(self.names):
            weight, having = weight + 1, having * 2
        return weight

    def ranked(self, query: str) -> list[Found]:
        """The best first."""
        found = list(self._pages(query))
        objects = list(dict.fromkeys(words(query.lower())))
        for term in objects:
            found += self._objects(term, [other for other in objects if other != term])
        best: dict[tuple[str, str, str], Found] = {}
        for each in sorted(found, key=lambda f: (-f.score, f.title.lower())):
            best.setdefault((each.page, each.title, each.anchor), each)
        return list(best.values())

    def _pages(self, query: str) -> Iterator[Found]:
        asked, question = self.bag(query), query.lower().strip()
        weights = {word: self.weight(word) for word in asked}
        whole = sum(weights.values())
        held: dict[int, float] = {}
        covered: dict[int, int] = {}
        for word in asked:
            for page, much in self.places(word).items():
                held[page] = held.get(page, 0) + weights[word] * much
                covered[page] = covered.get(page, 0) + weights[word]
        likest: dict[int, tuple[float, Phrase]] = {}
        for phrase in self.phrases:
            common = sum(weights[word] for word in asked if word in phrase.weights)
            if common == 0:
                continue
            precision, recall = common / sum(phrase.weights.values()), common / whole
            score = (phrase.worth * 2 * precision * recall) / (precision + recall)
            if question in phrase.text.lower() and len(question) >= len(phrase.text) / 2:
                score += NUMBERS["phrase"]
            if phrase.page not in likest or score > likest[phrase.page][0]:
                likest[phrase.page] = (score, phrase)
        found = []
        for page, much in held.items():
            name, title, anchor = self.names[page], self.index["titles"][page], ""
            total = NUMBERS["words"] * much / whole - less(name)
            if page in likest:
                score, phrase = likest[page]
                total = NUMBERS["words"] * much / whole + score - less(name)
                if score * 2 >= phrase.worth:
                    anchor = phrase.anchor
                    if phrase.worth == NUMBERS["heading"] and phrase.text != title:
                        title = f"{title} > {phrase.text}"
            found.append((page, Found(name, title, anchor, math.floor(total + 0.5), "text")))
        best = max((each.score for _, each in found), default=0)
        yield from (each for page, each in found if covered[page] * 2 > whole or each.score * 2 >= best)

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
                score += OBJECT_PRIORITY.get(priority, 0) - less(self.names[page])
                yield Found(self.names[page], full, anchor or full, score, "object")
