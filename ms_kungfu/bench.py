"""Print the location of the benchmarks, which aren't part of the package and run in a checkout."""

from __future__ import annotations

import sys
from pathlib import Path

from ms_kungfu._flags import failed
from ms_kungfu._installation import checkout


def main() -> int:
    source = checkout()
    where = source if source and Path(source, "benchmarks").is_dir() else "a checkout of ms_kungfu"
    return failed(
        "python -m ms_kungfu.bench",
        f"the benchmarks are not part of the package; run python -m benchmarks in {where}",
        2,
    )


if __name__ == "__main__":
    sys.exit(main())
