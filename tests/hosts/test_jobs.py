"""Jobs on hosts that are network namespaces."""

from __future__ import annotations

import sys
import time

PROGRAM = """
import os, numpy as np, ms_kungfu as kf
from ms_kungfu import comm
kf.init()
total = comm.all_reduce(np.arange(3.0) + kf.current_rank(), name="total")
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
print("worker", *total, os.environ["KUNGFU_SELF"], *(os.environ[name] for name in names), flush=True)
"""


def test_a_job_on_one_host_of_several_has_its_address(jobs, network):
    hosts = network(2).hosts
    for host in hosts:  # the same names and ports on both, at the same time
        words = ["-np", 2, "-nic", "eth0", "-w", "-builtin-config-port", 9100, sys.executable, "-c", PROGRAM]
        host.job = jobs.start(host, "ms_kungfu.launcher", *words)
    for host in hosts:
        host.job.assert_exit(0, 60)
        host.job.assert_gone(time.monotonic())
        told = sorted(line for line in host.job.stdout if line.startswith("worker"))
        expected = [f"worker 1.0 3.0 5.0 {host.address}:{10000 + rank} {rank} {rank} 2 2" for rank in range(2)]
        assert told == expected
