"""Which host sends to which, by -strategy: as the kernel counts what went over the launchers' connections."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import struct
from collections import Counter

import pytest
from test_hosts import A, B, C, hosts  # noqa: F401

from tests.conftest import long

pytestmark = pytest.mark.timeout(120)

D = "127.0.0.4"
COUNT = 1 << 20
ROUNDS = 4
REDUCES = f"""
import time
import numpy as np
import ms_kungfu as kf
from ms_kungfu import comm

kf.init()
for _ in range({ROUNDS}):
    brought = np.full({COUNT}, kf.current_rank() + 1, np.float32)
    assert (comm.all_reduce(brought, name="sum") == 10).all()
print("reduced", flush=True)
time.sleep(1000)
"""
WHOLE = 4.0 * COUNT * ROUNDS
_PIDFD_GETFD = 438
_BYTES_ACKED = 120  # in the kernel's struct tcp_info


def sent_by(pid: int) -> Counter[str]:
    """What a process has sent, in bytes, by the address of the other end."""
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    sent: Counter[str] = Counter()
    try:
        for name in os.listdir(f"/proc/{pid}/fd"):
            copy = libc.syscall(_PIDFD_GETFD, pidfd, int(name), 0)
            if copy < 0:
                continue  # closed meanwhile
            if not os.readlink(f"/proc/self/fd/{copy}").startswith("socket:"):
                os.close(copy)
                continue
            with socket.socket(fileno=copy) as other, contextlib.suppress(OSError):
                info = other.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                sent[other.getpeername()[0]] += struct.unpack_from("Q", info, _BYTES_ACKED)[0]
    finally:
        os.close(pidfd)
    return sent


# In units of what is reduced.
WAYS = {
    "RING": {A: {B: 1.5}, B: {C: 1.5}, C: {D: 1.5}, D: {A: 1.5}},
    "TREE": {A: {B: 1, C: 1, D: 1}, B: {A: 1}, C: {A: 1}, D: {A: 1}},
    "CLIQUE": {one: {other: 0.5 for other in (A, B, C, D) if other != one} for one in (A, B, C, D)},
    "BINARY_TREE_STAR": {A: {B: 1, C: 1}, B: {A: 1, D: 1}, C: {A: 1}, D: {B: 1}},
}


# `HostsAllReduce.SendsWhatTheAlgorithmOfItsStrategySays` (cpp) tests what each sends, `unit/test_host_flags.py` that
# the flag takes each name: one shows that a job's flag arrives there.
@pytest.mark.parametrize("strategy", ["RING", *map(long, list(WAYS)[1:])])
def test_hosts_send_to_the_hosts_of_the_strategy(hosts, script, strategy):  # noqa: F811
    job = hosts(script(REDUCES), "-np", 4, "-strategy", strategy.lower(), slots=dict.fromkeys((A, B, C, D), 1))
    job.wait_for("^reduced", dict.fromkeys((A, B, C, D), 1))
    for host, expected in WAYS[strategy].items():
        sent = {other: count / WHOLE for other, count in sent_by(job[host].process.pid).items() if other != host}
        found = {other: round(share, 1) for other, share in sent.items() if share > 0.02}
        assert found == expected, (host, sent)
    job[A].signal(signal.SIGINT)
    job.assert_exit(130)
