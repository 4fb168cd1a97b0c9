"""Run a job on a Ray cluster. Each node has an agent, which runs the kungfu-run of its host.

The job works like any other job on several hosts. Its head node is the driver's node, which has no slots if no worker
fits there. The agents end when the driver ends. With etcd, leadership can move to another host. The job then continues
without the first host's kungfu-run, but not without the driver.

Ray only provides the list of hosts. A new node joins the job (``-join``), and the driver then requests as many workers
as there are slots. If Ray is about to remove a node, the node's kungfu-run gets a SIGTERM, and its host leaves the job.
Only the controller makes decisions about lost nodes, failures, cluster versions and the end of the job.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError

from ms_kungfu import env
from ms_kungfu._run_time import run_time
from ms_kungfu._tls import from_environment
from ms_kungfu.cluster_store import has_leadership, open_leadership, open_store
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.commands import write_size
from ms_kungfu.launcher.engine_flags import EngineRequest
from ms_kungfu.launcher.options import PROGRAM
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot, may_go_on
from ms_kungfu.ray import cluster
from ms_kungfu.ray.placing import FLAGS, Names, Node, Words, deal, too_small

_LOOK_S = 1.0
_AGENT_S = 120.0  # time limit for Ray to start an agent's process
_AGAIN_S = 10.0  # if a node couldn't join, the driver tries again after this time
_LAST_WORDS_S = 10.0
_SETTLE_S = 5.0  # Ray reports the resources of an ended process as free within this time
_SILENT_S = 5.0  # after this time without an answer from Ray, the driver logs a message
_PORTS = range(12000, 28000)  # below the ephemeral ports of most systems
_TRIED_PORTS = 64
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ASKS_BEFORE_A_KILL = 3
_ADDRESS = "RAY_ADDRESS"  # Ray's own variable, which is used if the user passes no address
_OF_A_JOINING_HOST = ("q", "v", "logdir", "logfile", "prefix", "progress")


class JobError(Exception):
    """The job can't start or continue. The message is for the user."""


@dataclass(frozen=True)
class Outcome:
    """The result of a job.

    `code`: the exit status. `returned`: the results of the function, as pickled `End` objects. `signals`: the signals
    that the driver has received.
    """

    code: int
    returned: list[bytes] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)


@dataclass
class _Host:
    """A host of the job.

    Args:
        node: the ID of its Ray node.
        name: the host's name in the job.
        slots: how many workers it may run.
        group: the reserved resources; None if there are none.
        agent: the agent on the node.
        output: the call that waits for the next lines of output.
        joins: whether the host has been asked to join the job, and the store doesn't list it yet.
        leaves: whether Ray is about to remove the node.
        has_ended: whether the host's kungfu-run has ended.
    """

    node: str
    name: str
    slots: int
    group: Any = None
    agent: Any = None
    output: Any = None
    joins: bool = False
    leaves: bool = False
    has_ended: bool = False

    def listen(self) -> None:
        self.output = self.agent.output.remote()


class Driver:
    """The driver of one job.

    Args:
        request: the command and the resources that the user has requested.
        function: the pickled function that the workers run with `ms_kungfu.ray._function`; None for a command.
        words: the names of flags or arguments for messages.
        is_found: whether the cluster was found on this machine, because the user hasn't named a cluster.
    """

    def __init__(
        self, request: EngineRequest, function: bytes | None = None, words: Words = FLAGS, is_found: bool = False
    ) -> None:
        self._request, self._function, self._words, self._is_found = request, function, words, is_found
        self._quiet = any(word in ("-q=true", "-q=t", "-q=1") for word in request.flags)
        self._secret = env.JOB_SECRET.get() or secrets.token_hex(32)
        self._hosts: dict[str, _Host] = {}  # node ID -> host
        self._head: _Host | None = None  # None after the lease has moved from the first host, because it may move again
        self._not_before: dict[str, float] = {}  # node ID -> the earliest time at which the node may try to join again
        self._told: set[str] = set()  # the messages that `_say_once` has shown
        self._signals: list[int] = []
        self._url, self._port = "", 0
        self._watch, self._is_silent = cluster.Watch(), False
        self._groups: list[Any] = []
        self._returned: list[bytes] = []

    def run(self) -> Outcome:
        """Run the job. When the method returns, no part of the job remains on the nodes.

        Raises:
            JobError: the job can't run.
        """
        with self._catch_signals():
            try:
                code = self._follow() if self._begin() else 128 + self._signals[0]
            except RayError as error:
                raise JobError(f"Ray has failed: {str(error).strip().splitlines()[-1]}") from None
            finally:
                for host in self._hosts.values():
                    cluster.end_agent(host.agent)
                if not cluster.in_time(self._give_back, _LOOK_S if self._is_silent else 2 * _SETTLE_S):
                    self._say("Ray's head (its GCS) doesn't answer, so it isn't notified that the job has ended")
        return Outcome(code, self._returned, self._signals)

    def _give_back(self) -> None:
        with contextlib.suppress(Exception):
            cluster.wish(self._request.needs, 0)
        cluster.give_back(self._groups, _SETTLE_S)

    # ---- start ----

    def _begin(self) -> bool:
        """Begin the job. Return False if a signal has arrived before the job could begin."""
        request = self._request
        cluster.wish(request.needs, request.most)
        nodes = self._wait_for_room()
        if self._signals:
            return False
        own = next((node for node in nodes if node.id == cluster.own_node()), None)
        if own is None:
            raise JobError("Ray has just declared this program's node dead; start the program again on a live node")
        names = self._names = Names(nodes)
        dealt = {own.id: 0, **deal(nodes, request.needs, request.most)}
        for node in sorted((node for node in nodes if node.id in dealt), key=lambda node: node.id != own.id):
            name = names.name(node, [host.name for host in self._hosts.values()])
            if name is not None:
                self._add(node, name, dealt[node.id])
        ports = random.sample(_PORTS, _TRIED_PORTS)
        free = self._ask_all(ports)
        there = sum(host.slots for host in self._hosts.values())
        if self._signals:
            return False
        if own.id not in free or there < request.least:
            raise self._too_small(cluster.nodes())
        common = [port for port in ports if all(port in each for each in free.values())]
        if len(common) < 2:
            raise JobError("no single port is free on every node; check for firewalls between the nodes")
        self._port, config_port = common[:2]
        self._start_all(min(there, request.most), config_port)
        return True

    def _wait_for_room(self) -> list[Node]:
        request, begun = self._request, run_time()
        while True:
            nodes = cluster.nodes()
            room = sum(node.room(request.needs) for node in nodes)
            waited_s = run_time() - begun
            if room >= request.size or self._signals or (waited_s >= request.wait_s and room >= request.least):
                return nodes
            if waited_s >= max(request.wait_s, _SETTLE_S):
                raise self._too_small(nodes)
            if request.wait_s:
                self._say_once(
                    f"waiting until {request.size} workers fit, at most {request.wait_s:g} s ({self._words.wait})"
                )
            time.sleep(_LOOK_S)

    def _too_small(self, nodes: list[Node]) -> JobError:
        request = self._request
        return JobError(
            too_small(
                nodes, request.needs, request.size, request.least, request.wait_s,
                cluster.own_address(), self._is_found, self._words,
            )
        )  # fmt: skip

    def _add(self, node: Node, name: str, slots: int) -> _Host:
        host = self._hosts[node.id] = _Host(node.id, name, slots)
        if slots:
            host.group = cluster.reserve(node.id, self._request.needs, slots)
            self._groups.append(host.group)
        host.agent = cluster.start_agent(node.id, host.group, self._request.needs, slots)
        return host

    def _ask_all(self, ports: list[int]) -> dict[str, list[int]]:
        """Return the free ports of each node, by node ID. Drop a host if Ray hasn't started its agent in time."""
        asked = {host.agent.free_ports.remote(_address(host.name), ports): host for host in self._hosts.values()}
        deadline = run_time() + _AGENT_S
        waiting, free = list(asked), {}
        while waiting and run_time() < deadline and not self._signals:
            done, waiting = ray.wait(waiting, timeout=_LOOK_S)
            for each in done:
                with contextlib.suppress(RayActorError):
                    free[asked[each].node] = ray.get(each)
        for host in list(self._hosts.values()):
            if host.node not in free:
                self._drop(host)
        return free

    def _start_all(self, size: int, config_port: int) -> None:
        request, hosts = self._request, list(self._hosts.values())
        words = [*request.flags, "-w", f"-np={size}", f"-port={self._port}"]
        words.append("-H=" + ",".join(f"{host.name}:{host.slots}" for host in hosts))
        if len(hosts) == 1:
            words.append("-joinable")
        given = [word.partition("=")[2] for word in request.flags if word.startswith("-config-server=")]
        if given:
            self._url = given[-1]
        else:
            words.append(f"-builtin-config-port={config_port}")
            scheme = "http" if from_environment() is None else "https"
            self._url = f"{scheme}://{hosts[0].name}:{config_port}/config"
        self._head = hosts[0]
        for host in hosts:
            self._start(host, [*words, f"-self={host.name}", *request.command])

    def _start(self, host: _Host, words: list[str]) -> None:
        """Start a host's kungfu-run with these arguments. Raise JobError if that fails."""
        try:
            cpus = self._request.needs.get("CPU", 0.0)
            ray.get(host.agent.start.remote(words, self._variables(), os.getcwd(), cpus, self._function))
        except ValueError as error:  # Ray wraps the agent's error in an error of this class
            raise JobError(str(getattr(error, "cause", error))) from None
        host.listen()

    def _variables(self) -> dict[str, str]:
        """Return the user's environment variables that kungfu-run uses."""
        names = [variable.name for variable in env.VARIABLES if "user" in variable.set_by]
        names += [name for name in os.environ if name.startswith("ETCDCTL_")]
        return {**{name: os.environ[name] for name in names if name in os.environ}, env.JOB_SECRET.name: self._secret}

    # ---- the running job ----

    def _follow(self) -> int:
        asked, next_look = 0, run_time() + _LOOK_S
        while True:
            waiting = {host.output: host for host in self._hosts.values() if host.output is not None}
            done, _ = ray.wait(list(waiting), timeout=_LOOK_S / 2)
            for each in done:
                self._hear(waiting[each])
            last = next((host for host in self._hosts.values() if host.has_ended), None)
            if last is not None:
                return self._end(last)
            for number in self._signals[asked:]:
                if asked >= _ASKS_BEFORE_A_KILL - 1:
                    return 128 + number
                self._pass_on(number)
                asked += 1
            if run_time() >= next_look and not asked:
                nodes = self._watch.answer()
                if nodes is not None:
                    self._look(nodes)
                    next_look = run_time() + _LOOK_S
                self._mind_silence()

    def _pass_on(self, number: int) -> None:
        """Send a signal to the head node's kungfu-run, which ends the job on all hosts.

        If the head node isn't known, send the signal to another host, which reports it to the head node.
        """
        if number == signal.SIGTERM and has_leadership(self._url):
            number = signal.SIGINT  # after a SIGTERM, only this host would leave, and the job would continue
        told = self._head or next(iter(self._hosts.values()))
        told.agent.signal.remote(number)

    def _mind_silence(self) -> None:
        is_silent = self._watch.silent_s() > _SILENT_S
        if is_silent and not self._is_silent:
            self._say(
                "Ray's head (its GCS) doesn't answer: training continues, but no node joins or leaves; if the head "
                "is lost for a minute, Ray ends this program and the job"
            )
        elif self._is_silent and not is_silent:
            self._say("Ray's head (its GCS) answers again")
        self._is_silent = is_silent

    def _hear(self, host: _Host) -> None:
        try:
            lines = ray.get(host.output)
        except ActorUnavailableError:  # Ray can't reach the agent, and doesn't know yet whether it has ended
            host.listen()
            return
        except RayActorError:
            if self._ends_job(host):
                raise JobError(f"the agent of {host.name}, the head node, has failed, so the job failed") from None
            what = f"the {'agent on' if self._is_there(host) else 'node of'} {host.name} has failed"
            self._say(f"{what}, with the host's workers")
            self._drop(host)
            if not self._signals and self._still_starts():
                raise JobError(f"{what} before the job has begun; start the job again") from None
            return
        if lines is None:
            host.output, host.has_ended = None, True
            if not self._ends_job(host):
                if host is self._head:
                    self._say(f"{PROGRAM} on {host.name}, the head node, has ended, and the other hosts continue")
                self._drop(host)
            return
        for descriptor, line in lines:
            _show(descriptor, line if host.node == cluster.own_node() else of_host(host.name, line))
        host.listen()

    def _ends_job(self, host: _Host) -> bool:
        """Return whether the job has ended because the kungfu-run or agent of `host` has ended.

        The job has ended if `host` was the last host, or if it was the head node and no other host continues the job.
        """
        if self._head is not None and self._head is not host:
            return False
        if not has_leadership(self._url) or self._signals or len(self._hosts) == 1:
            return True
        try:
            found = open_leadership(self._url, timeout_s=_SILENT_S).look()
            # The snapshot may belong to an earlier job with the same name, which used another port.
            return (
                not may_go_on(found, host.name)
                or LeaderSnapshot.from_json(found.snapshot).first.runners[0].port != self._port
            )
        except (ConfigServerError, ValueError):
            return host is self._head

    def _is_there(self, host: _Host) -> bool:
        """Return whether Ray still lists the host's node. If it does, only the agent has failed."""
        found: list[Node] = []
        cluster.in_time(lambda: found.extend(cluster.nodes()), _SILENT_S)
        return any(node.id == host.node for node in found)

    def _look(self, nodes: list[Node]) -> None:
        for node in nodes:
            host = self._hosts.get(node.id)
            if host is not None and node.leaves and not host.leaves:
                host.leaves = True
                if host.node == cluster.own_node():
                    self._say(f"Ray is about to remove {host.name}, this program's node: the job will end")
                else:
                    self._say(f"Ray is about to remove {host.name}: the host leaves the job")
                    host.agent.signal.remote(signal.SIGTERM)
        now, placed = run_time(), sum(host.slots for host in self._hosts.values())
        coming = [node for node in nodes if node.id not in self._hosts and self._not_before.get(node.id, 0.0) <= now]
        for node_id, slots in deal(coming, self._request.needs, self._request.most - placed).items():
            self._not_before[node_id] = now + _AGAIN_S
            self._join(next(node for node in coming if node.id == node_id), slots)
        if any(host.joins for host in self._hosts.values()):
            self._fill()

    def _join(self, node: Node, slots: int) -> None:
        name = self._names.name(node, [host.name for host in self._hosts.values()])
        if name is None:
            self._say_once(f"a node at {node.address} doesn't join the job: another host has the same address")
            return
        host = self._add(node, name, slots)
        flags = [word for word in self._request.flags if word[1:].partition("=")[0] in _OF_A_JOINING_HOST]
        try:
            done, _ = ray.wait([host.agent.free_ports.remote(_address(name), [])], timeout=_LOOK_S * 15)
            if not done:
                raise JobError(f"Ray hasn't started an agent on {name} yet")
            self._start(host, ["-join", self._url, "-self", f"{name}:{slots}", *flags])
            host.joins = True
        except (JobError, RayActorError) as error:
            self._say_once(f"{name} doesn't join: {str(error).splitlines()[0]}")
            self._drop(host)

    def _fill(self) -> None:
        """If the store lists new hosts, request as many workers as there are slots."""
        with contextlib.suppress(ConfigServerError, ValueError):  # the next check tries again
            store = open_store(self._url, self._secret)
            held = store.get()
            new = [host for host in self._hosts.values() if host.joins and held and host.name in (held.slots or {})]
            if held is not None and new:
                size = min(sum((held.slots or {}).values()), self._request.most)
                if size > held.size:
                    self._say(f"{', '.join(host.name for host in new)}: {write_size(store, size)}")
                for host in new:
                    host.joins = False

    def _still_starts(self) -> bool:
        """Return whether the job's status is still "starting", so that the head node waits for other hosts."""
        with contextlib.suppress(ConfigServerError):
            status = open_store(self._url, self._secret).status()
            return isinstance(status, dict) and status.get("state") == "starting"
        return False

    # ---- end ----

    def _end(self, last: _Host) -> int:
        """Return the exit status of the job, which has ended on the host `last`.

        First wait until the other hosts' kungfu-run has ended, so that their last messages are shown.
        """
        self._head = last
        code = int(ray.get(last.agent.code.remote()))
        if self._signals and code == 128 + signal.SIGINT:
            code = 128 + self._signals[0]  # `_pass_on` may have sent SIGINT instead
        if self._function is not None:
            self._collect(last)
        deadline = run_time() + _LAST_WORDS_S
        while run_time() < deadline:
            waiting = {host.output: host for host in self._hosts.values() if host.output is not None}
            if not waiting:
                break
            done, _ = ray.wait(list(waiting), timeout=_LOOK_S)
            for each in done:
                self._hear(waiting[each])
        return code

    def _collect(self, host: _Host) -> None:
        with contextlib.suppress(RayActorError):
            self._returned += ray.get(host.agent.returned.remote())

    def _drop(self, host: _Host) -> None:
        if host is self._head:
            self._head = None
        if self._function is not None and host.has_ended:  # if kungfu-run is still running, its agent may never answer
            self._collect(host)
        del self._hosts[host.node]
        cluster.end_agent(host.agent)
        if host.group is not None and not self._is_silent:
            cluster.in_time(lambda: cluster.give_back([host.group], 0), _SILENT_S)

    # ---- output ----

    @contextlib.contextmanager
    def _catch_signals(self) -> Iterator[None]:
        """Record signals instead of handling them, if this is the main thread, which alone can set handlers."""
        before: dict[int, Any] = {}

        def note(number: int, frame: FrameType | None) -> None:
            self._signals.append(number)

        if threading.current_thread() is threading.main_thread():
            before = {number: signal.signal(number, note) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _say(self, sentence: str) -> None:
        if not self._quiet:
            _show(2, f"[{PROGRAM}] {time.strftime('%H:%M:%S')} {sentence}\n".encode())

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            self._say(sentence)


def of_host(name: str, line: bytes) -> bytes:
    """Return a line that another host's kungfu-run has printed, with the host's name after the program's name."""
    program = PROGRAM.encode()
    for said, instead in ((b"[%b] ", b"[%b %b] "), (b"%b: ", b"%b on %b: ")):
        if line.startswith(said % program):
            return instead % (program, name.encode()) + line[len(said % program) :]
    return line


def _address(name: str) -> str:
    return name.strip("[]")


def _show(descriptor: int, line: bytes) -> None:
    stream = sys.stdout if descriptor == 1 else sys.stderr
    with contextlib.suppress(OSError):  # if the reader of the output has ended, training continues
        stream.write(line.decode(errors="replace"))
        stream.flush()


def run(
    request: EngineRequest,
    function: bytes | None = None,
    runtime_env: Mapping[str, Any] | None = None,
    words: Words = FLAGS,
) -> Outcome:
    """Run a job on a Ray cluster.

    Raises:
        JobError: the job can't run.
    """
    address, name = request.address, words.address
    if address in (None, "auto") and (named := os.environ.get(_ADDRESS)):
        address, name = named, f"{_ADDRESS}="
    try:
        connection = cluster.connect(address, runtime_env)
    except ConnectionError as error:
        why = "runs here" if address == "auto" else f"answers there ({_first_line(error)})"
        raise JobError(
            f"{name}{address}: no Ray cluster {why}; start one (ray start --head), or omit {name.strip(' =')} "
            "to use a new cluster"
        ) from None
    except Exception as error:  # Ray has no exception class for these errors
        where = "Ray doesn't start" if address is None else f"{name}{address}"
        raise JobError(f"{where}: {_first_line(error)}") from None
    try:
        return Driver(request, function, words, connection.found).run()
    finally:
        if connection.ours:
            ray.shutdown()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [repr(error)])[0]
