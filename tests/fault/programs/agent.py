"""kungfu-run of which the links die where they are told to: STRUCK_FOLDER, STRUCK_RUNTIME; see `faults.Strike`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tests.fault.programs.faults import Strike, load_runtime

if __name__ == "__main__":
    library = load_runtime(os.environ["STRUCK_RUNTIME"])
    strike = Strike(Path(os.environ["STRUCK_FOLDER"]), library)

    from ms_kungfu.launcher.cli import main

    sys.exit(main())
