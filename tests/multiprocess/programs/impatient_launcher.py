"""kungfu-run that waits only for a moment before it says that no worker follows a change."""

from __future__ import annotations

import sys

from ms_kungfu.launcher.cli import main
from ms_kungfu.launcher.controller import following

following._UNFOLLOWED_S = 0.5

if __name__ == "__main__":
    sys.exit(main())
