"""The end of a program whose own end isn't what its test is about."""

import atexit
import os
import sys
import threading


def end():
    """End this process once its threads and exit handlers have: MindSpore's destructors cost 0.4 s of a processor."""
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
