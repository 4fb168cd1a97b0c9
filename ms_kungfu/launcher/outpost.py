"""The launcher of a host that isn't the head: does for its host what the head's launcher says, and tells what happens.

It decides nothing about the job. What it has is what only its host can have: the supervisor and its processes, a socket
for their requests (which the head answers), segments and links, and the terminal on which its workers' output goes.

Whoever ends, nothing is left: where the head is gone its workers here end, too, for nobody else can say what is to be
done with them; where this process ends, its supervisor kills them, and the head ends the job.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
from typing import Any, Callable

from ms_kungfu import env
from ms_kungfu._version import VERSION, mindspore_version
from ms_kungfu.broker_protocol import ProtocolError, text_field
from ms_kungfu.cluster import Cluster
from ms_kungfu.launcher.affinity import Shares
from ms_kungfu.launcher.broker_server import BrokerServer
from ms_kungfu.launcher.control import Channel, ControlServer, RefusedError, call
from ms_kungfu.launcher.hello import Hello, flags_of
from ms_kungfu.launcher.links import LinkMaker
from ms_kungfu.launcher.lost_hosts import Leases
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.output import Output
from ms_kungfu.launcher.policy import EXIT_TIMEOUT, bug, not_begun, signal_name
from ms_kungfu.launcher.relay import Relay
from ms_kungfu.launcher.sites import CANT_RUN, Launch, LocalSite, told_of_the_host
from ms_kungfu.launcher.startup import StartError, find_devices, serve_status
from ms_kungfu.launcher.status import outline
from ms_kungfu.launcher.supervisor import Exited, Supervisor

_log = logging.getLogger(__name__)
_OUTPUT_GRACE_S = 1.0
_LINKS_LOOK_S = 0.2
_AFTER_PAUSE_S = 0.5  # to read what has come meanwhile
_HEAD_S = 5.0  # for the head to end the job after a signal here
_LET_GO_S = 15.0  # for the head, and for whoever has to be killed at the end of the grace
_HEAD_STATUS_S = 2.0
_MAX_LOOK_S = 10.0
_PATIENCE_S = 5.0  # before somebody hears why the head can't be reached: it may be about to start
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT, signal.SIGWINCH)


class Outpost:
    """Serves one job. The supervisor and the output are the caller's until `run`, which closes both."""

    def __init__(
        self, options: Options, supervisor: Supervisor, output: Output, machine: Machine | None = None
    ) -> None:
        self._options = options
        self._supervisor = supervisor
        self._output = output
        self._machine = Machine() if machine is None else machine
        self._channel: Channel | None = None
        self._pids: dict[int, int] = {}  # of the processes that run, by their keys
        self._making: dict[int, tuple[int, asyncio.Task[None]]] = {}  # version -> attempt
        self._words: dict[int, dict[int, str]] = {}  # version -> rank -> why it can't go on; all that was ever seen
        self._unlinked: set[int] = set()  # versions whose link has failed, of which the head has been told
        self._sync_points: dict[int, int] = {}  # version -> those of which the head has been told, or has told
        self._apart: set[tuple[int, str]] = set()  # the same for hosts that the link of a version can't reach
        self._timers: list[asyncio.TimerHandle] = []
        self._since = 0.0  # when the head was called first
        self._silence = ""  # why it doesn't answer
        self._told: set[str] = set()  # what is only said once
        self._is_told = False  # that it has to end
        self._is_leaving = False
        self._started_at = self._machine.time()
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}  # about the job's status, to the head
        self._numbers = itertools.count(1)

    async def run(self) -> int:
        """The job's exit code. StartError where it never started. Nothing of the job is left here when it returns."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._loop.set_exception_handler(self._on_bug)
        self._catch_signals()
        if self._options.timeout_s is not None:
            self._later(self._options.delay_s + self._options.timeout_s, self._on_timeout, self._options.timeout_s)
        words = ""
        close_status = serve_status(self._machine, self._supervisor, self._status)
        serving = asyncio.ensure_future(self._serve())
        serving.add_done_callback(self._on_served)
        try:
            code, words = await self._ended
            return code
        finally:
            serving.cancel()
            await asyncio.wait([serving])
            for timer in self._timers:
                timer.cancel()
            self._supervisor.wake()
            self._supervisor.close()
            self._output.close(_OUTPUT_GRACE_S, words or None)
            close_status()

    def _end(self, code: int, words: str = "") -> None:
        if not self._ended.done():
            self._ended.set_result((code, words))

    def _on_timeout(self, limit_s: float) -> None:
        """Where there is a job its head ends it."""
        if self._channel is None:
            head = self._options.hosts.head.name
            why = f"{head}, which has it, was not reached" + (f": {self._silence}" if self._silence else "")
            self._end(EXIT_TIMEOUT, f"{PROGRAM}: {not_begun(limit_s, why)}")

    def _on_served(self, serving: asyncio.Future[None]) -> None:
        if not serving.cancelled() and not self._ended.done():
            error = serving.exception()
            if error is not None:
                self._ended.set_exception(error)

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        _log.error("internal error: %s", context["message"], exc_info=error)
        self._end(1, f"{PROGRAM}: internal error: {context['message'] if error is None else bug(error)}")

    # ---- what the job tells of itself ----

    async def _status(self) -> dict[str, Any]:
        """The head's word; this host's own, which is little, where there is none."""
        head, number = self._options.hosts.head.name, next(self._numbers)
        if self._channel is None:
            return outline(self._options, "starts", f"waits for {PROGRAM} on {head}", self._started_at)
        answer = self._questions[number] = self._loop.create_future()
        try:
            self._send("status", number)
            return await asyncio.wait_for(answer, _HEAD_STATUS_S)
        except asyncio.TimeoutError:
            why = f"{PROGRAM} on {head}, which has the job, doesn't answer"
            return outline(self._options, "runs", why, self._started_at)
        finally:
            del self._questions[number]

    # ---- signals ----

    def _catch_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:  # nohup
                continue
            self._loop.add_signal_handler(number, self._on_signal, number)
        for number in _PASSED_ON:
            self._loop.add_signal_handler(number, self._supervisor.signal, number)
        if self._options.in_slurm:
            self._loop.add_signal_handler(signal.SIGUSR1, self._on_signal, signal.SIGTERM)

    def _on_signal(self, number: int) -> None:
        """A SIGTERM has this host leave, where the head finds that the job can do without it: it tells when that is
        over. At any other signal the head ends the job, on all hosts. A second signal of that kind, or a head that
        doesn't: this host ends at once."""
        if self._channel is None or self._is_told or (number == signal.SIGTERM and self._is_leaving):
            self._end(128 + number, f"{PROGRAM}: interrupted by {signal_name(number)}")
            return
        if number == signal.SIGTERM and self._options.watch:
            self._is_leaving = True
            self._channel.send({"leave": True})
            limit_s = self._options.leave_grace_s
            _log.info("this host leaves the job: its workers do after their step, within %g s (-leave-grace)", limit_s)
            late = f"{PROGRAM}: interrupted by SIGTERM, and the head has not let this host go"
            self._later(limit_s + _LET_GO_S, self._end, 128 + number, late)
            return
        self._is_told = True
        self._channel.send({"interrupted": number})
        late = f"{PROGRAM}: interrupted by {signal_name(number)}, and the head has not ended the job"
        self._later(_HEAD_S, self._end, 128 + number, late)

    # ---- the head ----

    async def _serve(self) -> None:
        options, machine = self._options, self._machine
        head, port = options.hosts.head, options.control_port
        try:
            join_timeout_s = env.JOIN_TIMEOUT.get(machine.environ)
            devices = find_devices(options, machine)
        except ValueError as error:
            raise StartError(str(error)) from None
        secret = bytes.fromhex(options.secret or "")
        cores = machine.allowed_cores()
        silent_s = options.host_timeout_s
        self._links = LinkMaker(machine, options.hosts, port, secret, len(cores), silent_s=silent_s)
        try:
            server = ControlServer(machine, secret, self._take)
        except ValueError as error:
            raise StartError(str(error)) from None
        try:
            await server.start(options.host.address, port)
        except OSError as error:
            remedy = "-port gives another port, the same on all hosts"
            if options.joins:
                remedy = f"the job is at this port on all hosts; does another {PROGRAM} of it run here?"
            raise StartError(
                f"{options.host.name}:{port}, where the other hosts call, can't be used: {error.strerror or error}; "
                f"{remedy}"
            ) from None
        logdir = "" if options.logdir is None else str(options.logdir)
        flags = {} if options.joins else flags_of(options)
        hello = Hello(options.host.name, VERSION, mindspore_version(), flags, cores, devices, logdir)
        # -delay is the head's: it listens afterwards.
        wait_s = join_timeout_s + options.delay_s
        self._since = self._loop.time()
        _log.info("calling %s, which has the job, for %g s (KUNGFU_JOIN_TIMEOUT)", head.name, wait_s)
        try:
            try:
                channel = await call(
                    machine, options.host.address, head.address, port, secret, wait_s, self._tell_of_silence
                )
            except RefusedError as error:
                raise StartError(str(error)) from None
            except OSError as error:
                raise StartError(
                    f"{error}, within {wait_s:g} s (KUNGFU_JOIN_TIMEOUT); is {PROGRAM} running there?"
                ) from None
            try:
                await self._obey_all(channel, hello)
            finally:
                self._channel = None
                channel.close()
        finally:
            await server.close()

    def _tell_of_silence(self, why: str) -> None:
        self._silence = why
        if self._loop.time() - self._since >= _PATIENCE_S:
            head, port = self._options.hosts.head.name, self._options.control_port
            self._warn_once(
                f"no answer from {head}:{port} so far: {why}; is {PROGRAM} started there, and port {port} open?"
            )

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            _log.warning("%s", sentence)

    async def _take(self, channel: Channel) -> bool:
        """Another host has called."""
        message = await asyncio.wait_for(channel.receive(), _HEAD_S)
        if "head" in message:
            await self._answer_a_head(channel, message["head"])
            return False
        if "link" not in message:
            channel.send({"refused": f"{self._options.host.name} hasn't got the job; give the same flags on all hosts"})
            await channel.flushed()
            return False
        return await self._links.take(channel, message["link"])

    async def _answer_a_head(self, channel: Channel, asking: Any) -> None:
        """Another host has the job, as it thinks, and asks what this one does."""
        if not isinstance(asking, dict):
            raise ProtocolError("a head says who it is")
        name, theirs, own = text_field(asking, "host"), text_field(asking, "hosts"), self._options.hosts
        is_in_a_job = self._channel is not None
        channel.send({
            "hosts": str(own), "calls": own.head.name, "for_s": self._loop.time() - self._since,
            "in_a_job": is_in_a_job,
        })  # fmt: skip
        await channel.flushed()
        if not is_in_a_job and name != own.head.name:
            self._warn_once(
                f"{PROGRAM} was told -H {theirs} on {name} and waits there for this host, which calls {own.head.name}; "
                f"here it is {own}. Give the same -H, in the same order, on all hosts"
            )

    async def _obey_all(self, channel: Channel, hello: Hello) -> None:
        options = self._options
        head = options.hosts.head.name
        trouble = ""
        try:
            channel.send({"agent": hello.to_json(), **({"slots": options.host.slots} if options.joins else {})})
            message = await channel.receive()
            if "refused" in message:
                raise StartError(str(message["refused"]))
            with self._begun(channel, hello, message["welcome"]):
                while not self._ended.done():
                    for what, value in (await channel.receive()).items():
                        self._obey(what, value)
                # The sockets close before the head does: a worker that asks is gone by now, or about to be.
        except ProtocolError as error:
            trouble = f"{head} says what isn't understood: {error}"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            trouble = f"{head} says something wrongly: {error!r}"
        except OSError as error:
            trouble = f"{PROGRAM} on {head}, which has the job, is gone ({error.strerror or error})"
        if trouble:
            self._end(1, f"{PROGRAM}: {trouble}; the workers here are ended")

    @contextlib.contextmanager
    def _begun(self, channel: Channel, hello: Hello, welcome: dict[str, Any]) -> Any:
        options, machine = self._options, self._machine
        secret = options.secret or str(welcome["secret"])
        self._links.job = str(welcome["job"])
        self._look_s = min(float(welcome["look_s"]), _MAX_LOOK_S)
        relay = self._relay = Relay(channel.send)
        self._links.find_store = relay.stores.find
        server = BrokerServer(relay, bytes.fromhex(secret))
        try:
            self._site = LocalSite(
                hello.host, machine, self._supervisor, self._output, hello.devices,
                Shares(hello.cores, options.cores_per_worker), told_of_the_host(server.address, secret),
                unheard=lambda: len(self._pids) - server.connections(),
            )  # fmt: skip
            self._channel = channel
            self._loop.add_reader(self._supervisor.fileno(), self._on_supervisor)
            self._look()
            self._look_at_links()
            if options.host_timeout_s is not None:
                leases = Leases(options.host_timeout_s, after_pause_s=min(_AFTER_PAUSE_S, options.host_timeout_s))
                channel.set_silence(options.host_timeout_s)
                self._look_for_the_head(channel, leases)
            _log.info("this host takes part in the job of %s", options.hosts.head.name)
            yield
        finally:
            self._loop.remove_reader(self._supervisor.fileno())
            for _, making in self._making.values():
                making.cancel()
            server.close()
            relay.close()

    def _send(self, what: str, message: object) -> None:
        if self._channel is not None:
            self._channel.send({what: message})

    def _obey(self, what: str, value: Any) -> None:
        relay = self._relay
        if what == "answer":
            relay.answer(int(value["number"]), value["message"])
        elif what == "lost":
            segment = relay.segment(int(value["version"]))
            if segment is not None:
                segment.mark_lost(
                    int(value["rank"]), str(value["reason"]), bool(value["recover"]), bool(value["reaped"])
                )
        elif what == "lose_host":
            segment = relay.segment(int(value["version"]))
            if segment is not None:
                segment.lose_host(str(value["host"]))
        elif what == "beat":
            pass
        elif what == "status":
            question = self._questions.get(int(value["number"]))
            if question is not None and not question.done():
                question.set_result(dict(value["job"]))
        elif what == "announce":
            segment = relay.segment(int(value["version"]))
            if segment is not None:
                segment.announce(int(value["newer"]))
        elif what == "sync":
            version, number = int(value["version"]), int(value["number"])
            segment = relay.segment(version)
            if segment is not None and number > self._sync_points.get(version, 0):
                self._sync_points[version] = number
                segment.request_sync_point(number)
        elif what == "start":
            self._start(Launch.from_json(value))
        elif what == "signal":
            self._site.signal(int(value["number"]), None if value["key"] is None else int(value["key"]))
        elif what == "pin":
            pid = self._pids.get(int(value["key"]))
            if pid is not None:
                self._site.pin(int(value["key"]), pid, [int(core) for core in value["cores"]])
        elif what == "release":
            self._site.release(str(value))
        elif what == "make":
            version, attempt = int(value["version"]), int(value["attempt"])
            cluster = Cluster.from_json(value["cluster"])
            self._drop(version)
            making = asyncio.ensure_future(self._make(cluster, attempt, bool(value["recovers"])))
            self._making[version] = (attempt, making)
        elif what == "close":
            self._drop(int(value["version"]))
        elif what == "end":
            if value["left"]:
                _log.info("this host has left the job")
            self._end(int(value["code"]), str(value["words"] or ""))
        else:
            raise ProtocolError(f"{what!r} means nothing")

    # ---- segments ----

    async def _make(self, cluster: Cluster, attempt: int, recovers: bool) -> None:
        error = ""
        try:
            segment = await self._links.make(cluster, attempt, recovers)
            self._relay.add(cluster.version, segment)
        except Exception as trouble:  # whatever the runtime, the kernel or another host has against it
            error = str(trouble) or repr(trouble)
        if self._making.get(cluster.version, (None,))[0] == attempt:
            del self._making[cluster.version]
        self._send("made", {"version": cluster.version, "attempt": attempt, "error": error})

    def _drop(self, version: int) -> None:
        if version in self._making:
            self._making.pop(version)[1].cancel()
        self._relay.drop(version)
        self._words.pop(version, None)
        self._unlinked.discard(version)
        self._sync_points.pop(version, None)
        self._apart = {(v, host) for v, host in self._apart if v != version}

    def _look_at_links(self) -> None:
        for version, segment in self._relay.segments().items():
            if segment.sync_points() > self._sync_points.get(version, 0):
                self._sync_points[version] = segment.sync_points()
                self._send("syncs", {"version": version, "number": self._sync_points[version]})
            if version not in self._unlinked and (why := segment.failure()):
                self._unlinked.add(version)
                self._send("unlinked", {"version": version, "why": why})
            for host, why in segment.unreachable():
                if (version, host) not in self._apart:
                    self._apart.add((version, host))
                    self._send("unreachable", {"version": version, "host": host, "why": why})
        self._timers[:] = [
            timer for timer in self._timers if not timer.cancelled() and timer.when() > self._loop.time()
        ]
        self._later(_LINKS_LOOK_S, self._look_at_links)

    def _look_for_the_head(self, channel: Channel, leases: Leases) -> None:
        """And says that this host is there. A host that the head has given up must not go on for long."""
        self._send("beat", True)
        head = self._options.hosts.head.name
        if leases.run_out(self._loop.time(), {head: channel.heard}):
            self._end(1, (
                f"{PROGRAM}: nothing came from {head}, which has the job, for {self._options.host_timeout_s:g} s "
                "(-host-timeout); the workers here are ended"
            ))  # fmt: skip
        self._later(leases.period_s, self._look_for_the_head, channel, leases)

    def _later(self, seconds: float, function: Callable[..., None], *arguments: object) -> None:
        now = self._loop.time()
        self._timers = [timer for timer in self._timers if timer.when() > now]
        self._timers.append(self._loop.call_later(seconds, function, *arguments))

    # ---- processes ----

    def _start(self, launch: Launch) -> None:
        try:
            self._site.start(launch)
        except OSError as error:
            self._loop.call_soon(self._tell_exited, Exited(launch.key, CANT_RUN, str(error.strerror)))

    def _on_supervisor(self) -> None:
        event = self._supervisor.next_event()
        if event is None:
            self._loop.remove_reader(self._supervisor.fileno())
            self._send("guardless", True)
        elif isinstance(event, Exited):
            self._pids.pop(event.key, None)
            self._tell_exited(event)
            self._relay.forget_the_dead()
        else:
            self._pids[event.key] = event.pid
            self._send("started", vars(event))

    def _tell_exited(self, event: Exited) -> None:
        # What it may have said before it ended comes first.
        self._send("exited", {**vars(event), "gave_up": self._new_words()})

    def _new_words(self) -> dict[int, dict[int, str]]:
        """Why ranks of this host can't go on, where the head hasn't been told."""
        news: dict[int, dict[int, str]] = {}
        for version, segment in self._relay.segments().items():
            known = self._words.setdefault(version, {})
            for rank in segment.ranks():
                if rank not in known and (why := segment.gave_up(rank)):
                    known[rank] = news.setdefault(version, {})[rank] = why
        return news

    def _look(self) -> None:
        """The head judges who stands still, by this clock and these counts."""
        beats = {
            version: {rank: segment.heartbeat(rank) for rank in segment.ranks()}
            for version, segment in self._relay.segments().items()
        }
        progress = {
            version: {rank: told for rank in segment.ranks() if (told := segment.progress(rank)) is not None}
            for version, segment in self._relay.segments().items()
        }
        stopped = [key for key, pid in self._pids.items() if self._machine.is_stopped(pid)]
        self._send("looked", {
            "now": self._loop.time(), "beats": beats, "gave_up": self._new_words(), "stopped": stopped,
            "progress": progress,
        })  # fmt: skip
        self._later(self._look_s, self._look)
