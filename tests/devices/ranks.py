"""ranks.py N PROGRAM ARGUMENT...: runs N ranks of a program on this machine, without a launcher.

For the programs beside it, and where nothing but Python, NumPy and the runtime is installed. Exits with the first
status that isn't 0; the others are told that the rank is lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from ms_kungfu import _core


def main() -> int:
    size = int(sys.argv[1])
    fd = _core.create_segment(size, 1, os.cpu_count() or 1)
    control = _core.SegmentControl(fd)
    ranks = [
        subprocess.Popen(
            [sys.executable, *sys.argv[2:]],
            env={**os.environ, "KUNGFU_TEST_SEGMENT": f"{fd}:{r}"},
            pass_fds=[fd],
        )
        for r in range(size)
    ]
    status = 0
    try:
        left = dict(enumerate(ranks))
        while left:
            for r, process in list(left.items()):
                ended = process.poll()
                if ended is None:
                    continue
                del left[r]
                control.mark_lost(r, f"ended with status {ended}")
                status = status or ended
            time.sleep(0.01)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return status


if __name__ == "__main__":
    sys.exit(main())
