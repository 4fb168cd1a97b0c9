"""Write the log of logger ``ms_kungfu`` to stderr in a worker whose program doesn't configure logging.

By default Python hides INFO records, which include each resize, failure and checkpoint. Under ``kungfu-run`` such
records are lines on stderr with time and rank, from level ``KUNGFU_LOG_LEVEL`` on. If a program adds a handler to the
root logger or to ``ms_kungfu``, at any time, the program's handlers and levels apply instead. The log includes the
runtime's own messages as warnings, for example which ranks have waited long for which.
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
    """Write to stderr. Remove this handler at the first record after the program has set up logging."""

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
        # Another worker may have this rank by now. (`test_worker_that_has_left_logs_with_its_last_rank`.)
        record.rank = f"{'was ' if membership.is_detached() else ''}rank {self._rank()}"
        # As in logging's last-resort handler: a stream that is closed or full must not end training.
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
    # A separate thread of the runtime calls this, and no collective waits for that thread. The thread needs the GIL.
    # No collective and no MindSpore kernel holds the GIL while it waits.
    _core.set_log(_tell)
