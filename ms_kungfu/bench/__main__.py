"""``python -m ms_kungfu.bench``."""

from __future__ import annotations

import sys

from ms_kungfu.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
