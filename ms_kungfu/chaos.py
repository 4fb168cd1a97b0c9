"""``python -m ms_kungfu.chaos``."""

from ms_kungfu.tools.chaos import main

if __name__ == "__main__":
    raise SystemExit(main())
