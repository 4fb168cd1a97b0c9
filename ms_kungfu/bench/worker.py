"""One rank of a contender: ``python -m ms_kungfu.bench.worker module:Class folder rank size ...``; see :mod:`.group`.

It reads one JSON task a line from the socket in `folder` and answers each with a line; between tasks it is blocked in
that read. It ends when the other side does.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from ms_kungfu.bench.contenders import find
from ms_kungfu.bench.contenders.base import Contender, Unsupported


def _answer(contender: Contender, task: dict[str, Any]) -> dict[str, Any]:
    try:
        return contender.measure(task)
    except Unsupported as error:
        return {"unsupported": str(error)}
    except Exception as error:  # the other side reports it; the traceback goes to this rank's log
        import traceback

        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def main(arguments: list[str]) -> None:
    name, folder, rank, size, *extra = arguments
    contender = find(name)(int(rank), int(size), *extra)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(Path(folder) / "socket"))
        with connection.makefile("rw") as lines:
            answer: dict[str, Any] = {"rank": contender.rank, "pid": os.getpid()}
            while True:
                lines.write(json.dumps(answer) + "\n")
                lines.flush()
                line = lines.readline()
                if not line:
                    return
                answer = _answer(contender, json.loads(line))


if __name__ == "__main__":
    main(sys.argv[1:])
