"""The hosts that the tests play with: what separates them, what can be done to their cables, and that they vanish."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ECHO = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
server = socket.socket(family, socket.SOCK_DGRAM)
server.bind((sys.argv[1], 7))
print("listens", flush=True)
while True:
    data, peer = server.recvfrom(100)
    server.sendto(data, peer)
"""
ASK = """
import socket, sys
client = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)
client.settimeout(float(sys.argv[2]))
heard = 0
for i in range(int(sys.argv[3])):
    client.sendto(b"%d" % i, (sys.argv[1], 7))
    try:
        heard += client.recv(100) == b"%d" % i
    except (TimeoutError, socket.timeout):
        pass
print(heard)
"""


class Pair:
    """A server on the first host, and what the second one hears of it."""

    def __init__(self, server, client):
        self.server, self.client = server, client
        self._echoing = []
        for address in (server.address, server.address6):
            words = [*server.within(), sys.executable, "-c", ECHO, address]
            self._echoing.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
            assert self._echoing[-1].stdout.readline() == "listens\n"

    def heard(self, count=1, timeout=0.3, address=None):
        words = [sys.executable, "-c", ASK, address or self.server.address, timeout, count]
        return int(self.client.run(*words))


@pytest.fixture
def pair(network):
    made = Pair(*network(2).hosts)
    yield made
    for process in made._echoing:
        process.kill()
        process.wait()
        process.stdout.close()


def test_hosts_hear_each_other_until_a_cable_is_cut(pair):
    for address in (pair.server.address, pair.server.address6):
        assert pair.heard(2, 5.0, address) == 2
        with pair.server.cut():
            assert pair.heard(1, 0.3, address) == 0
        assert pair.heard(1, 5.0, address) == 1
    with pair.server.unplugged():
        assert pair.heard() == 0
    assert pair.heard(5, 5.0) >= 1  # the bridge has to learn anew


def test_a_direction_may_be_lost_alone(pair):
    with pair.client.deaf_to(pair.server):
        assert pair.heard() == 0
    with pair.server.deaf_to(pair.client):
        assert pair.heard() == 0
    assert pair.heard(1, 5.0) == 1
    with pair.server.deaf_to(pair.client, loss=0.5):
        # 60 fair coins: fewer than 10 or more than 50 heads are one in ten million.
        assert 10 <= pair.heard(60, 0.5) <= 50


def test_a_paused_host_answers_when_it_wakes(pair):
    with pair.server.paused():
        assert pair.heard() == 0
    assert pair.heard(1, 5.0) == 1


def test_a_slow_cable_takes_its_time(network):
    a, b = network(2).hosts
    receive = "import socket as s; c = s.create_server(('', 7)).accept()[0]\nwhile c.recv(1 << 20): pass"
    send = (
        "import socket as s, time\n"
        "for _ in range(1200):\n"
        "    try: c = s.create_connection(('10.77.0.1', 7)); break\n"
        "    except OSError: time.sleep(0.05)\n"
        "begin = time.monotonic(); c.sendall(bytes(2 << 20)); c.shutdown(1); c.recv(1); print(time.monotonic() - begin)"
    )
    with b.slowed(40):  # 2 MiB take 0.42 s
        server = subprocess.Popen([*a.within(), sys.executable, "-c", receive])
        took = float(b.run(sys.executable, "-c", send))
        assert server.wait(60) == 0
    assert took > 0.3
    assert "tbf" not in subprocess.run(["tc", "-n", b.namespace, "qdisc"], capture_output=True, text=True).stdout


def test_hosts_share_neither_memory_nor_sockets_nor_a_name(network):
    a, b = network(2).hosts
    bind = "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0kungfu-test'); print('bound')"
    for host in (a, b):
        assert host.run("sh", "-c", "ls -A /dev/shm; touch /dev/shm/mine; hostname") == f"{host.name}\n"
        assert host.run(sys.executable, "-c", bind) == "bound\n"
    assert not os.path.exists("/dev/shm/mine")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_when_the_tests_are_killed(number, network):
    network(0)  # or skips
    program = (
        "import subprocess, time; from tests.hosts.namespaces import Network\n"
        "n = Network(2); tells = [*n.hosts[1].within(), 'sh', '-c', 'echo $$; exec sleep 987']\n"
        "sleeps = subprocess.Popen(tells, stdout=subprocess.PIPE, text=True)\n"
        "print(n.hosts[0].namespace, sleeps.stdout.readline(), flush=True); time.sleep(600)"
    )
    tests = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    namespace, pid = tests.stdout.readline().split()
    assert os.path.exists(f"/run/netns/{namespace}")
    deadline = time.monotonic() + 20
    while not _lives(pid) and time.monotonic() < deadline:  # while it becomes `sleep` it has no words, either
        time.sleep(0.01)
    assert _lives(pid)
    tests.send_signal(number)
    tests.wait()
    tests.stdout.close()
    deadline = time.monotonic() + 20
    prefix = namespace.removesuffix("h0")
    while any(name.startswith(prefix) for name in os.listdir("/run/netns")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [name for name in os.listdir("/run/netns") if name.startswith(prefix)]
    assert not _lives(pid)


def _lives(pid):
    """Whether it is more than a zombie, which waits for the process that has inherited it."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes() != b""
    except OSError:
        return False
