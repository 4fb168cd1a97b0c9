"""kungfu-run that writes down when it learns of a death and when it has told the others: a line of JSON for each.

``python -m ms_kungfu.bench.timed_launcher FILE FLAGS...``; the launcher itself measures nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from ms_kungfu.launcher import cli
from ms_kungfu.launcher.broker import Broker
from ms_kungfu.launcher.supervisor import Supervisor


def main(path: str, arguments: list[str]) -> int:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    heard: list[float] = [0.0]
    next_event, mark_lost = Supervisor.next_event, Broker.mark_lost

    def timed_event(self: Supervisor) -> Any:
        event = next_event(self)
        heard[0] = time.monotonic()
        return event

    def timed_mark(self: Broker, *args: Any, **options: Any) -> None:
        mark_lost(self, *args, **options)
        os.write(file, json.dumps({"heard": heard[0], "marked": time.monotonic()}).encode() + b"\n")

    Supervisor.next_event = timed_event  # type: ignore[method-assign]
    Broker.mark_lost = timed_mark  # type: ignore[method-assign]
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
