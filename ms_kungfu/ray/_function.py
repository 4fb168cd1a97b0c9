"""Run a function in a worker. The workers of `ms_kungfu.ray.run` run ``python -m ms_kungfu.ray._function``."""

from __future__ import annotations

import os
import pickle
import sys
import time
from pathlib import Path
from types import TracebackType

from ray import cloudpickle

from ms_kungfu import env
from ms_kungfu.ray.agent import FUNCTION
from ms_kungfu.ray.ends import End, end_by_error, end_by_value
from ms_kungfu.runtime import cluster_version, current_rank, detached, init


def main() -> None:
    """Run the function. If this worker is in the cluster afterwards, write the result to the agent's folder."""
    sys.excepthook = _tell
    folder = Path(env.RAY_FOLDER.get() or "")
    version, rank, begun = 0, env.RANK_ID.get(), False
    try:
        paths, pickled = pickle.loads((folder / FUNCTION).read_bytes())
        # The folders of the driver's modules come first, so that imports work as in the driver.
        sys.path[:0] = [path for path in paths if path not in sys.path]
        function = pickle.loads(pickled)
        init()
        begun = True
        value = function()
    except BaseException as error:
        asked = isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code)
        if not asked and not detached():
            if begun:
                version, rank = cluster_version(), current_rank()
            _leave(folder, end_by_error(error, version, rank, time.time(), cloudpickle.dumps))
        raise
    if not detached():
        _leave(folder, end_by_value(value, cluster_version(), current_rank(), time.time(), cloudpickle.dumps))


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception. After Ctrl-C print nothing, because the driver reports Ctrl-C."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


def _leave(folder: Path, end: End) -> None:
    part = folder / f"{os.getpid()}.part"
    part.write_bytes(pickle.dumps(end))
    part.rename(part.with_suffix(""))


if __name__ == "__main__":
    main()
