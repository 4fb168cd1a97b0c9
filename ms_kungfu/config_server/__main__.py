import sys

from ms_kungfu.config_server.cli import main

sys.exit(main())
