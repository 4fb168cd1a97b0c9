"""Exit status 0 where MindSpore's convolutions had better do without AVX-512, as the doctor finds out: tests would take
hours with it."""

import sys

from ms_kungfu.tools.doctor.machine import check_convolutions
from ms_kungfu.tools.doctor.system import System

if __name__ == "__main__":
    sys.exit(not any(finding.remedy for finding in check_convolutions(System())))
