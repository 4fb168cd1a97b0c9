"""The entry point of kungfu-run. If the user presses Ctrl-C during the imports, kungfu-run ends without a traceback."""

import signal
import sys

# False if SIGINT is ignored or has another handler.
_IS_DEFAULT = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _IS_DEFAULT:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> int:
    """Run `cli.main`."""
    from ms_kungfu.launcher import cli

    if _IS_DEFAULT:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
