"""Adapt the pages' texts, links and search words to the site, so that the same files also work on a code host.

A page with the line ``<!-- the text of ../CHANGELOG.md -->`` shows that file. If a page has a line ``<!-- index: exit
status; 137 -->``, the search lists it first for these words. Links in the files are in the form that a code host needs.
On the site, a link to a file that is also a page leads to the page, and a link to another file of the checkout shows
the file's path.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

WHOLE = re.compile(r"^<!-- the text of (\S+) -->$", re.MULTILINE)
INDEX = re.compile(r"^<!-- index: (.+) -->$", re.MULTILINE)
MARKER = re.compile(r"^ *<!-- (?:not run|file|after): .+ -->\n", re.MULTILINE)
LINK = re.compile(r"(?<!!)\[([^\]\[]+)\]\(([^()\s#]+)(#[^()\s]*)?\)")
# Files of the checkout that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "README.zh.md": "start.zh.md",
    "docs/README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/cpp-all-reduce": "cpp.md",
    "examples/kubernetes": "kubernetes.md",
    "examples/kubernetes/README.md": "kubernetes.md",
    "examples/cpp-all-reduce/README.md": "cpp.md",
}


def for_the_site(text: str, page: Path, root: Path) -> str:
    """Return the text of `page` with links in the form that the site needs. `root`: the checkout."""

    def whole(found: re.Match[str]) -> str:
        source = page.parent / found.group(1)
        return outside_of_code(source.read_text(encoding="utf-8"), lambda part: LINK.sub(link_from(source), part))

    def link_from(source: Path) -> Any:
        def link(found: re.Match[str]) -> str:
            shown, target, anchor = found.group(1), found.group(2), found.group(3) or ""
            if "://" in target or target.startswith("mailto:"):
                return found.group(0)
            path = Path(os.path.normpath(source.parent / target))
            if not path.exists():
                raise ValueError(f"{source} links to {target}, which isn't there")
            inside = path.relative_to(root).as_posix()
            if inside in PAGES:
                path = root / "docs" / PAGES[inside]
            if path.suffix in (".md", ".svg", ".png") and path.is_relative_to(root / "docs"):
                return f"[{shown}]({os.path.relpath(path, page.parent)}{anchor})"
            same = shown.strip("`/") in inside
            return f"`{inside}`" if same else f"{shown} (`{inside}`)"

        return link

    text = outside_of_code(text, lambda part: LINK.sub(link_from(page), part))
    # Remove the comments for the tests: a comment isn't shown, and would remove the anchors of index entries before it.
    text = outside_of_code(text, lambda part: MARKER.sub("", part))
    text = INDEX.sub(index, text)
    return WHOLE.sub(whole, text)


def index(found: re.Match[str]) -> str:
    # "!" marks the main entry of the word, which the search lists first.
    return "\n\n".join(f"```{{index}} ! {word.strip()}\n```" for word in found.group(1).split(";"))


def outside_of_code(text: str, change: Any) -> str:
    """Return the text with `change` applied to all parts outside of fenced blocks."""
    parts = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else change(part) for number, part in enumerate(parts))


def read(app: Sphinx, docname: str, content: list[str]) -> None:
    page = Path(app.env.doc2path(docname))
    content[0] = for_the_site(content[0], page, Path(app.srcdir).parent)


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "version": "1"}
