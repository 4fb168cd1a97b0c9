"""``python -m ms_kungfu.doctor``."""

from __future__ import annotations

import sys

from ms_kungfu.doctor.cli import main

if __name__ == "__main__":
    sys.exit(main())
