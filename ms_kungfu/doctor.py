"""``python -m ms_kungfu.doctor``."""

from ms_kungfu.tools.doctor.command import main

if __name__ == "__main__":
    raise SystemExit(main())
