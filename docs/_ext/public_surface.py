"""The directive `public-surface` lists a module's API: the names and members in tests/unit/public_surface.txt.

So a page of the API shows all public names and members, and no others. It also shows members without a docstring.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

LISTED = Path(__file__).resolve().parents[2] / "tests" / "unit" / "public_surface.txt"


@dataclass
class Public:
    """A public name: its signature, as in the list, and its members."""

    signature: str = ""
    members: list[str] = field(default_factory=list)


def public_names(text: str) -> dict[str, dict[str, Public]]:
    """Return {module: {name: Public}} of lines such as `ms_kungfu.elastic.Metrics.loss` or `ms_kungfu.resize(size)`."""
    found: dict[str, dict[str, Public]] = {}
    for line in text.splitlines():
        path, bracket, arguments = line.partition("(")
        parts = path.split(".")
        # The names of `ms_kungfu` itself have no module in their path.
        depth = 2 if len(parts) > 2 and is_module(".".join(parts[:2])) else 1
        module, name, members = ".".join(parts[:depth]), parts[depth], parts[depth + 1 :]
        public = found.setdefault(module, {}).setdefault(name, Public())
        public.members += members
        # MindSpore's classes are replaced by stand-ins with (*args, **kwargs), so use the signature in the list.
        if bracket and not members and "*args" not in arguments:
            public.signature = re.sub(r"^self(, )?", "", arguments[: arguments.rindex(")")])
            public.signature = f"({public.signature})"
    # Submodules have their own pages, and the errors are on the page of `ms_kungfu.errors`.
    elsewhere = [n for n in found["ms_kungfu"] if is_module(f"ms_kungfu.{n}") or n in found["ms_kungfu.errors"]]
    for name in elsewhere:
        del found["ms_kungfu"][name]
    return found


def is_module(path: str) -> bool:
    folder = LISTED.parents[2].joinpath(*path.split("."))
    return folder.is_dir() or folder.with_suffix(".py").is_file()


class PublicSurface(SphinxDirective):
    """The directive, as in ``{public-surface} ms_kungfu.elastic``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        path = self.arguments[0]
        module = import_module(path)
        lines = [f".. automodule:: {path}", "   :no-members:", ""]
        for name, public in public_names(LISTED.read_text(encoding="utf-8"))[path].items():
            item = getattr(module, name)
            if isinstance(item, type):
                lines += [f".. autoclass:: {path}.{name}{public.signature}"]
                lines += ["   :show-inheritance:"] if item.__bases__ != (object,) else []
                lines += [f"   :members: {', '.join(public.members)}"] if public.members else []
                lines += ["   :undoc-members:", ""]
            elif callable(item):
                lines += [f".. autofunction:: {path}.{name}", ""]
            else:
                lines += [f".. autodata:: {path}.{name}", ""]
        # Docstrings are reStructuredText, but the page is Markdown.
        return self.parse_text_to_nodes("```{eval-rst}\n" + "\n".join(lines) + "\n```")


def whole_sentence(app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    """Restore the words before a colon in an attribute's docstring, which napoleon moves to a type field."""
    if what in ("attribute", "property", "data"):
        for number, line in enumerate(lines):
            if line.startswith(":type: "):
                lines[number] = ""
                lines[0] = f"{line[len(':type: ') :]}: {lines[0]}"


def told_by_the_base(app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
    """Give a method without a docstring a reference to the docstring in a base class of ms_kungfu."""
    if what not in ("method", "property") or any(lines):
        return
    path, _, member = name.rpartition(".")
    module, _, own = path.rpartition(".")
    for cls in getattr(import_module(module), own).__mro__:
        if cls.__module__.startswith("ms_kungfu") and getattr(vars(cls).get(member), "__doc__", None):
            lines[:] = [f"As `{cls.__name__}.{member}`: {vars(cls)[member].__doc__.strip().splitlines()[0]}", ""]
            return


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", whole_sentence, priority=600)  # after napoleon (500)
    app.connect("autodoc-process-docstring", told_by_the_base)
    app.add_directive("public-surface", PublicSurface)
    return {"parallel_read_safe": True, "version": "1"}
