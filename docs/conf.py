"""Sphinx's settings for the pages in this folder; `docs/build.sh` builds them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

# If MindSpore isn't installed, stand-ins replace its names. ms_kungfu itself must be installed, and compiled.
if importlib.util.find_spec("mindspore") is None:
    import stand_in

    stand_in.install()

from ms_kungfu import __version__  # noqa: E402

project = "ms_kungfu"
author = "the ms_kungfu authors"
copyright = "the ms_kungfu authors, Apache 2.0"
release = version = __version__
language = "en"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "public_surface",
    "links_outside",
]
# A code host shows README.md for this folder; index.md includes README.md.
exclude_patterns = ["README.md", "_build"]
root_doc = "index"

myst_enable_extensions = ["colon_fence", "html_image"]
myst_heading_anchors = 4

# The docstrings put `code` in single backticks.
default_role = "code"
autodoc_default_options = {"member-order": "bysource"}
autodoc_inherit_docstrings = False  # MindSpore's site documents MindSpore's methods
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"ms_kungfu {version}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_search_scorer = str(HERE / "_ext" / "search.js")
html_theme_options = {"navigation_with_keys": True}
