"""Collections of garbage in a process that has imported all tests, where a whole one takes half a second."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collected() -> Iterator[None]:
    """What has come into being within, and has no use any more, is collected at the end. All else isn't looked at."""
    gc.freeze()
    try:
        yield
        gc.collect()
    finally:
        gc.unfreeze()
