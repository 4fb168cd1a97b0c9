"""A worker without the runtime: asks its broker for its place in each version that the config server has, and says what
came with it. SIGUSR1 ends it."""

import os
import signal
import stat
import sys
import time

from ms_kungfu.broker_protocol import BrokerClient, Detached
from ms_kungfu.cluster import PeerID
from ms_kungfu.cluster_store import StoreUnreachableError, open_store

me, incarnation = PeerID.parse(os.environ["KUNGFU_SELF"]), int(os.environ["KUNGFU_INCARNATION"])
signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
client = BrokerClient.from_environment()
store = open_store(os.environ["KUNGFU_CONFIG_SERVER"])


def enter(member_of, version):
    answer = client.request_segment(me, incarnation, member_of, version, 60)
    if isinstance(answer, Detached):
        print(f"detached {me} incarnation {incarnation}", flush=True)
        sys.exit()
    fds = [answer.fd, *answer.between_hosts]
    kinds = "".join("s" if stat.S_ISSOCK(os.fstat(fd).st_mode) else "m" for fd in fds)
    for fd in fds:
        os.close(fd)
    cluster = answer.cluster
    print(
        f"in version {cluster.version} rank {answer.rank} of {cluster.size} pid {os.getpid()} has {kinds}", flush=True
    )
    return cluster


cluster = enter(None, None)
while True:
    time.sleep(0.02)
    try:
        found = store.get()
        if found is None or found.version <= cluster.version:
            continue
        # Members of the runtime agree on a version. These go to the last of those that follow each other at once.
        time.sleep(0.5)
        settled = store.get()
    except StoreUnreachableError:  # the job ends
        continue
    if settled is not None and settled.version == found.version:
        cluster = enter(cluster.version, found.version)
