"""kungfu-run before it is kungfu-run: while its modules load."""

import signal
import subprocess
import sys

import pytest

INTERRUPTED = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "ms_kungfu.launcher.options":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
signal.signal(signal.SIGINT, signal.{handler})
from ms_kungfu.launcher.__main__ import main
sys.argv[1:] = ["-np", "1", "true"]
sys.exit(main())
"""


@pytest.mark.parametrize(("handler", "code"), [("default_int_handler", -signal.SIGINT), ("SIG_IGN", 0)])
def test_ctrl_c_while_modules_load_prints_no_traceback(handler: str, code: int) -> None:
    program = INTERRUPTED.format(handler=handler)
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == code, run.stderr
    assert "Traceback" not in run.stderr
