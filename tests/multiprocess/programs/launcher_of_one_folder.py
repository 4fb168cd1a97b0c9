"""kungfu-run that finds only jobs in its XDG_RUNTIME_DIR and TMPDIR, and none of other users of /tmp."""

from __future__ import annotations

import sys

from ms_kungfu.config_server import secret_file
from ms_kungfu.launcher.cli import main

secret_file._EVERYBODYS = ()

if __name__ == "__main__":
    sys.exit(main())
