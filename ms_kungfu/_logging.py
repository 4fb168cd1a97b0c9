"""Write the records of the logger ``ms_kungfu`` to stderr if a worker's program doesn't configure logging.

By default Python hides INFO records, but ms_kungfu logs each resize, failure and checkpoint as INFO. Under
``kungfu-run``, records of level ``KUNGFU_LOG_LEVEL`` or higher are therefore written to stderr, with time and rank. If
the program adds a handler to the root logger or to ``ms_kungfu``, the program's handlers and levels apply instead. The
C++ runtime's messages are logged as warnings.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Callable

from . import _core, env, membership

_logger = logging.getLogger("ms_kungfu")
_FORMAT = "%(asctime)s ms_kungfu[%(rank)s] %(levelname)s: %(message)s"


class _UntilTheProgramLogs(logging.Handler):
    """Write records to stderr until the program sets up logging. The next record after that removes this handler."""

    def __init__(self, rank: Callable[[], int]) -> None:
        super().__init__()
        self._rank = rank
        self.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        if _programs_handlers():
            _logger.removeHandler(self)
            if not os.environ.get(env.LOG_LEVEL.name):
                _logger.setLevel(logging.NOTSET)
            return
        # After this worker has left, its rank may belong to another worker.
        # (`test_worker_that_has_left_logs_with_its_last_rank`.)
        record.rank = f"{'was ' if membership.is_detached() else ''}rank {self._rank()}"
        # If stderr is closed or its disk is full, training must continue.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()


def _programs_handlers() -> bool:
    handlers = [*logging.getLogger().handlers, *_logger.handlers]
    return any(not isinstance(handler, _UntilTheProgramLogs) for handler in handlers)


def _tell(line: str) -> None:
    _logger.warning("runtime: %s", line)
    membership.report("runtime_message", reason=line)


def set_up(rank: Callable[[], int]) -> None:
    """Set up logging in a worker. Idempotent. Raise ValueError for an invalid KUNGFU_LOG_LEVEL."""
    level = env.LOG_LEVEL.get()
    if _logger.level == logging.NOTSET and (os.environ.get(env.LOG_LEVEL.name) or not _programs_handlers()):
        _logger.setLevel(level)
    if not _logger.handlers and not _programs_handlers():
        _logger.addHandler(_UntilTheProgramLogs(rank))
    # A separate thread of the runtime calls `_tell` and waits for the GIL. This wait can't cause a deadlock: no
    # collective waits for the thread, and no collective or MindSpore kernel holds the GIL while it waits.
    _core.set_log(_tell)
