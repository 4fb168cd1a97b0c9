"""Hosts that are network namespaces of this machine: own addresses, own /dev/shm, joined by a bridge that can be cut.

The bridge is in a namespace of its own: nothing of the machine's network is touched, and removing the namespaces has
removed all. A process of its own does that, when the end of a pipe tells it that the tests are over, or were killed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

PORT = 9100  # of the config server: the namespaces are new, and everything is free
_numbers = itertools.count()
_GONE_WITHIN_S = 30.0
# Of the namespace's own: what the machine's processes share through it would not be shared by hosts.
_OWN_SHM = 'mount -t tmpfs tmpfs /dev/shm && hostname "$0" && exec "$@"'


def why_not() -> str | None:
    """Why there can be no such hosts here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "iptables", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} not installed (tests/hosts/run.sh installs them)"
    probe = f"kungfu-probe-{os.getpid()}"
    try:
        _run("ip", "netns", "add", probe)
        try:
            _run("ip", "netns", "exec", probe, "iptables", "-A", "INPUT", "-m", "statistic", "--mode", "random",
                 "--probability", "0.5", "-j", "DROP")  # fmt: skip
            _run("ip", "-n", probe, "link", "add", "v0", "type", "veth", "peer", "name", "v1")
            _run(
                "tc",
                "-n",
                probe,
                *["qdisc", "add", "dev", "v0", "root", "tbf", "rate", "1mbit", "burst", "32kb", "latency", "50ms"],
            )
            _run("ip", "netns", "exec", probe, "unshare", "--mount", "--uts", "sh", "-c", _OWN_SHM, "probe", "true")
        finally:
            _run("ip", "netns", "del", probe)
    except subprocess.CalledProcessError as error:
        return f"not allowed here: {' '.join(error.cmd)}: {(error.stderr or error.stdout).strip()}"
    return None


def _run(*words: object) -> str:
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    return done.stdout


class Network:
    """`count` hosts; `close()` ends all processes in them and removes them. `mtu`: of their cables."""

    def __init__(self, count: int, mtu: int = 1500) -> None:
        self.begun, self.config_port = count, PORT
        self._prefix = f"kungfu-{os.getpid()}-{next(_numbers)}-"
        self._switch = f"{self._prefix}switch"
        self._janitor = subprocess.Popen(
            [sys.executable, __file__, self._prefix], stdin=subprocess.PIPE, start_new_session=True
        )
        self.hosts = [Host(f"{self._prefix}h{i}", self._switch, i) for i in range(count)]
        try:
            _run("ip", "netns", "add", self._switch)
            _run("ip", "-n", self._switch, "link", "add", "br0", "type", "bridge")
            _run("ip", "-n", self._switch, "link", "set", "br0", "up")
            for host in self.hosts:
                host.make(mtu)
            self._wait_for_links()
        except BaseException:
            self.close()
            raise

    def _wait_for_links(self) -> None:
        """Until each one's address of IPv6 is known to be its own, and the bridge forwards."""
        deadline = time.monotonic() + 60
        for host in self.hosts:
            while "tentative" in _run("ip", "-n", host.namespace, "-6", "addr", "show", "dev", "eth0"):
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def close(self) -> None:
        assert self._janitor.stdin is not None
        self._janitor.stdin.close()
        self._janitor.wait(90)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Host:
    """One of them. The bridge's end of its cable is called as the host is numbered."""

    def __init__(self, namespace: str, switch: str, number: int) -> None:
        self.namespace = namespace
        self.name = f"host{number}"
        self.address = f"10.77.0.{number + 1}"
        self.address6 = f"fd00:77::{number + 1:x}"
        self._switch, self._port = switch, f"p{number}"

    def make(self, mtu: int) -> None:
        _run("ip", "netns", "add", self.namespace)
        _run("ip", "-n", self._switch, "link", "add", self._port, "mtu", mtu, "type", "veth",
             "peer", "name", "eth0", "mtu", mtu, "netns", self.namespace)  # fmt: skip
        _run("ip", "-n", self._switch, "link", "set", self._port, "master", "br0", "up")
        for words in ("link set lo up", "link set eth0 up", f"addr add {self.address}/24 dev eth0"):
            _run("ip", "-n", self.namespace, *words.split())
        with contextlib.suppress(subprocess.CalledProcessError):  # a kernel without IPv6
            _run("ip", "-n", self.namespace, "addr", "add", f"{self.address6}/64", "dev", "eth0", "nodad")

    def within(self) -> list[str]:
        """The words before a command that is to run here."""
        return ["ip", "netns", "exec", self.namespace, "unshare", "--mount", "--uts", "sh", "-c", _OWN_SHM, self.name]

    def words(self) -> list[object]:
        """Its launcher needs no flags besides: it is the host that has the address."""
        return []

    def run(self, *words: object) -> str:
        """What a command here prints; CalledProcessError where it fails."""
        return _run(*self.within(), *words)

    def processes(self) -> list[int]:
        return [int(pid) for pid in _run("ip", "netns", "pids", self.namespace).split()]

    def received(self) -> int:
        """How many bytes have come by its cable."""
        return int(self.run("cat", "/sys/class/net/eth0/statistics/rx_bytes"))

    def signal(self, number: int) -> None:
        """All processes here. Twice: one may be starting another."""
        for _ in range(2):
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.signal(signal.SIGCONT)

    # ---- its cable ----

    @contextlib.contextmanager
    def cut(self) -> Iterator[None]:
        """Nothing comes in or goes out. No host is notified: its own end stays up, as behind a switch that fails."""
        with contextlib.ExitStack() as healing:
            for chain in ("INPUT", "OUTPUT"):
                healing.enter_context(self._dropping(chain, "!", "-i" if chain == "INPUT" else "-o", "lo"))
            yield

    @contextlib.contextmanager
    def unplugged(self) -> Iterator[None]:
        """As `cut`, and the host's interface loses its carrier."""
        _run("ip", "-n", self._switch, "link", "set", self._port, "down")
        try:
            yield
        finally:
            _run("ip", "-n", self._switch, "link", "set", self._port, "up")

    @contextlib.contextmanager
    def without_address(self) -> Iterator[None]:
        """As where a network manager takes the addresses of an interface that it takes for unplugged."""
        _run("ip", "-n", self.namespace, "addr", "del", f"{self.address}/24", "dev", "eth0")
        try:
            yield
        finally:
            _run("ip", "-n", self.namespace, "addr", "add", f"{self.address}/24", "dev", "eth0")

    @contextlib.contextmanager
    def deaf_to(self, other: Host, loss: float = 1.0) -> Iterator[None]:
        """What comes from `other` is lost, or that share of its packets; what goes there isn't."""
        share = [] if loss == 1 else ["-m", "statistic", "--mode", "random", "--probability", str(loss)]
        with self._dropping("INPUT", "-i", "eth0", *share, source=other):
            yield

    @contextlib.contextmanager
    def refusing(self, other: Host) -> Iterator[None]:
        """Connections by which `other` sends something here are reset, as by a firewall that has forgotten them."""
        with self._dropping("INPUT", "-p", "tcp", source=other, answer=("REJECT", "--reject-with", "tcp-reset")):
            yield

    @contextlib.contextmanager
    def _dropping(
        self, chain: str, *rule: str, source: Host | None = None, answer: Sequence[str] = ("DROP",)
    ) -> Iterator[None]:
        each = [("iptables", source and source.address), ("ip6tables", source and source.address6)]
        each = [(tool, address) for tool, address in each if shutil.which(tool)]
        with contextlib.ExitStack() as healing:
            for tool, address in each:
                words = [chain, *(["-s", address] if address else []), *rule, "-j", *answer]
                _run("ip", "netns", "exec", self.namespace, tool, "-w", "-A", *words)
                healing.callback(_run, "ip", "netns", "exec", self.namespace, tool, "-w", "-D", *words)
            yield

    @contextlib.contextmanager
    def slowed(self, megabits: float) -> Iterator[None]:
        """To this rate, both ways. A small burst: a larger one would give some MiB for free."""
        ends = [(self.namespace, "eth0"), (self._switch, self._port)]
        shape = f"root tbf rate {megabits}mbit burst 32kb latency 50ms".split()
        with contextlib.ExitStack() as healing:
            for namespace, device in ends:
                _run("tc", "-n", namespace, "qdisc", "add", "dev", device, *shape)
                healing.callback(_run, "tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
            yield


def _namespaces(prefix: str) -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.startswith(prefix)]


def remove(prefix: str) -> None:
    """All processes in the namespaces of that name, and these."""
    for namespace in _namespaces(prefix):
        deadline = time.monotonic() + _GONE_WITHIN_S
        while time.monotonic() < deadline:
            left = _run("ip", "netns", "pids", namespace).split()
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            if not left:
                break
            time.sleep(0.02)
        with contextlib.suppress(subprocess.CalledProcessError):
            _run("ip", "netns", "del", namespace)


def main(arguments: Sequence[str]) -> None:
    """The janitor. It waits for the end of its input, whatever brings it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    remove(arguments[0])
    assert not list(Path("/run/netns").glob(f"{arguments[0]}*"))


if __name__ == "__main__":
    main(sys.argv[1:])
