"""``python -m ms_kungfu.fusion``"""

import sys

from ms_kungfu.fusion.cli import main

if __name__ == "__main__":
    sys.exit(main())
