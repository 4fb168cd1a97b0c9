"""``python -m ms_kungfu.replay``."""

from ms_kungfu.tools.replay import main

if __name__ == "__main__":
    raise SystemExit(main())
