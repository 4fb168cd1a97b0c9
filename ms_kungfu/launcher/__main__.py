import sys

from ms_kungfu.launcher.cli import main

sys.exit(main())
