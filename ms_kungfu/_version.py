"""Provide the versions of ms_kungfu (for users: ``ms_kungfu.__version__``) and of MindSpore."""

from __future__ import annotations

import functools
import sys

VERSION = "0.2.0"


def mindspore_version() -> str:
    """Return the version of the MindSpore that is imported or installed; "" if there is none."""
    loaded = getattr(sys.modules.get("mindspore"), "__version__", "")
    return str(loaded) if loaded else _installed_mindspore()


@functools.cache
def _installed_mindspore() -> str:
    from importlib import metadata  # slow to import

    try:
        return metadata.version("mindspore")
    except metadata.PackageNotFoundError:
        return ""
