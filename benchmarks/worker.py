"""One rank of a baseline: ``python -m benchmarks.worker module:Class folder rank size ...``; see :mod:`.group`.

The rank receives tasks from the socket in `folder` and answers each. Between tasks it is blocked in a read. It ends
when the main process ends.
"""

from __future__ import annotations

import contextlib
import os
import sys
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

from benchmarks.contenders import find
from benchmarks.contenders.base import Contender, Unsupported


def _answer(contender: Contender, task: Any) -> dict[str, Any]:
    try:
        return contender.measure(task)
    except Unsupported as error:
        return {"unsupported": str(error)}
    except Exception as error:  # the main process reports the error; the traceback goes to this rank's log
        import traceback

        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main(arguments: list[str]) -> None:
    name, folder, rank, size, *extra = arguments
    contender = find(name)(int(rank), int(size), *extra)
    with Client(str(Path(folder) / "socket")) as connection, contextlib.suppress(EOFError, ConnectionError):
        connection.send({"rank": contender.rank, "pid": os.getpid()})
        while True:
            connection.send(_answer(contender, connection.recv()))


if __name__ == "__main__":
    main(sys.argv[1:])
