"""Run a job on a Ray cluster. ``kungfu-run -engine ray`` runs this module."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from ms_kungfu._flags import failed
from ms_kungfu.launcher.engine_flags import EngineRequest
from ms_kungfu.launcher.options import PROGRAM, parse_command_line
from ms_kungfu.ray import MISSING


def main() -> int:
    """Run the job. Return the job's exit status, or 1 if the job can't start."""
    request = parse_command_line(sys.argv[1:])
    assert isinstance(request, EngineRequest)
    if find_spec("ray") is None:
        return failed(PROGRAM, MISSING, 1)
    from ms_kungfu.ray.driver import JobError, run

    try:
        return run(request).code
    except JobError as error:
        return failed(PROGRAM, error, 1)


if __name__ == "__main__":
    sys.exit(main())
