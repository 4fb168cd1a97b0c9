"""The version of ms_kungfu, in its only place; users read ``ms_kungfu.__version__``. And MindSpore's version."""

from __future__ import annotations

import functools
import sys

VERSION = "0.1.0"


def mindspore_version() -> str:
    """Return the version of the MindSpore that this process has imported, or would import; "" without one."""
    loaded = getattr(sys.modules.get("mindspore"), "__version__", "")
    return str(loaded) if loaded else _installed_mindspore()


@functools.cache
def _installed_mindspore() -> str:
    from importlib import metadata  # takes longer than all else here

    try:
        return metadata.version("mindspore")
    except metadata.PackageNotFoundError:
        return ""
