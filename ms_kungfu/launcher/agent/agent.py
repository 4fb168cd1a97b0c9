"""Run a host's launcher, which obeys the job's controller and reports to it.

The controller may run in the same process. The launcher owns what exists only on its host: processes, file descriptors
and the terminal. It consists of these modules:

- `host`: the workers, their shared memory, and their requests.
- `succession`: which host controls the job.
- `leading`: the controller, while it runs on this host.
- `departure`: signals to the launcher.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from typing import Any, Callable

from msgspec.structs import replace as replace_fields

from ms_kungfu import env
from ms_kungfu._decoding import ProtocolError
from ms_kungfu._words import printable
from ms_kungfu.devices.rank_table import RankTableError
from ms_kungfu.launcher import signals
from ms_kungfu.launcher.agent.departure import Departure
from ms_kungfu.launcher.agent.host import HostOfJob
from ms_kungfu.launcher.agent.job_status import JobStatusAnswer, serve_status
from ms_kungfu.launcher.agent.leading import OwnController
from ms_kungfu.launcher.agent.output import Output
from ms_kungfu.launcher.agent.progress import keep_showing
from ms_kungfu.launcher.agent.segments import HostSegment, HostSegments
from ms_kungfu.launcher.agent.succession import Succession
from ms_kungfu.launcher.agent.supervisor import Supervisor
from ms_kungfu.launcher.agent.transports import Transports
from ms_kungfu.launcher.channel import AnyChannel, Channel
from ms_kungfu.launcher.control import ControlServer
from ms_kungfu.launcher.cpu_isa import NATIVE
from ms_kungfu.launcher.devices import GPU, DeviceListError, Devices
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.registration import first_workers, flags_of, registration_of
from ms_kungfu.launcher.state.leader_snapshot import Term, moves
from ms_kungfu.launcher.state.local_controller import MakeController
from ms_kungfu.launcher.state.lost_hosts import Leases
from ms_kungfu.launcher.state.policy import EXIT_TIMEOUT, bug, not_begun
from ms_kungfu.launcher.state.start_error import StartError
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

_log = logging.getLogger(__name__)
_ENDED_HERE = "the workers on this host are ended"
_OUTPUT_GRACE_S = 1.0
_AFTER_PAUSE_S = 0.5  # time to read the messages that arrived during a pause
_FIRST_WORDS_S = 5.0
# The longest time from a controller's failure until this host calls the next controller, in lease durations.
_LEASES = 3


class Agent:
    """Serve one job. `run` closes the supervisor and the output; until then the caller owns both."""

    def __init__(
        self, options: Options, supervisor: Supervisor, output: Output, make_controller: MakeController,
        machine: Machine | None = None,
    ) -> None:  # fmt: skip
        self._options, self._supervisor, self._output, self._make = options, supervisor, output, make_controller
        self._machine = Machine() if machine is None else machine
        self._channel: AnyChannel | None = None
        self._host: HostOfJob | None = None  # set once a controller has registered this host
        self.own = OwnController(self._end, self._fail)
        self._departure = Departure(
            options, self.own, self._send, self._end, is_alone=self._is_alone,
            wait_s=lambda: 0.0 if self.succession.since is None else _LEASES * self.succession.lease_s,
        )  # fmt: skip
        self.succession = Succession(
            options, self._machine, self._departure, self._lead, own=lambda: self.own.controller,
            call_itself=lambda: self._server.call_itself(), end=self._end, has_ended=lambda: self._ended.done(),
        )  # fmt: skip
        self._status = JobStatusAnswer(
            options, self._machine.time(), self.own, self.succession, self._send,
            is_connected=lambda: self._channel is not None,
        )  # fmt: skip

    async def run(self) -> int:
        """Serve the job until none of its processes is left on this host. Return the job's exit code.

        Raises:
            StartError: the job never began.
        """
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[int, str, int | None]] = self._loop.create_future()
        self._loop.set_exception_handler(self._on_bug)
        in_slurm, catch = self._options.in_slurm, self._machine.catch_signal
        signals.hear(self._loop, self._departure.on_signal, self._supervisor.signal, in_slurm, catch)
        if self._options.timeout_s is not None:
            limit_s = self._options.timeout_s
            self._loop.call_later(self._options.delay_s + limit_s, self._on_timeout, limit_s)
        code, words, failed = 1, "", None
        close_status = serve_status(self._machine, self._supervisor, self._status.ask)
        showing = asyncio.ensure_future(keep_showing(self._options, self._output, self._status.ask))
        serving = asyncio.ensure_future(self._serve())
        serving.add_done_callback(self._on_served)
        try:
            code, words, failed = await self._ended
            return code
        finally:
            showing.cancel()
            await self.own.leave()
            serving.cancel()
            await asyncio.wait([serving, showing])
            await self.own.close()
            self._supervisor.wake()
            self._supervisor.close()
            await _close_output(self, code, words, failed)
            close_status()

    def _end(self, code: int, words: str = "", failed: int | None = None) -> None:
        if not self._ended.done():
            self._ended.set_result((code, words, failed))

    def _fail(self, error: BaseException) -> None:
        if not self._ended.done():
            self._ended.set_exception(error)

    def _is_alone(self) -> bool:
        """Return whether this host isn't in a job. A host that waits for the next controller is still in its job."""
        return self._channel is None and self.own.controller is None and self.succession.since is None

    def _on_timeout(self, limit_s: float) -> None:
        """End this launcher if its host isn't in a job. Otherwise, the current or the next controller ends the job."""
        if self._is_alone():
            silence = self.succession.silence
            why = f"its head node, {self.succession.head_name}, was not reached" + (f": {silence}" if silence else "")
            self._end(EXIT_TIMEOUT, f"{PROGRAM}: {not_begun(limit_s, why)}")

    def _on_served(self, serving: asyncio.Future[None]) -> None:
        if not serving.cancelled() and (error := serving.exception()) is not None:
            self._fail(error)

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        head = self.own.for_ever
        if head is not None and not head.is_over:
            head.on_bug(loop, context)  # the controller ends the job
            return
        error = context.get("exception")
        _log.error('internal error: where=agent error="%s"', context["message"], exc_info=error)
        self._end(1, f"{PROGRAM}: internal error: {context['message'] if error is None else bug(error)}")

    # ---- connections ----

    async def _serve(self) -> None:
        options, machine = self._options, self._machine
        self.succession.begun = self._loop.time()
        try:
            join_timeout_s = env.JOIN_TIMEOUT.get(machine.environ)
            devices = _find_devices(options, machine)
        except ValueError as error:
            raise StartError(str(error)) from None
        self._claims = machine.claim_cores(options.affinity)
        cores, taken = self._claims.begin(options.cores_per_worker, first_workers(options))
        secret = bytes.fromhex(options.secret or "")
        self._transports = Transports(
            machine, options.hosts, options.control_port, secret,
            silent_s=options.host_timeout_s, strategy=options.strategy,
        )  # fmt: skip
        await self._listen(secret)
        cpu_isa = await machine.cpu_isa(NATIVE if options.joins else options.cpu_isa)
        self._registration = registration_of(options, devices, cores, taken, cpu_isa)
        if options.hosts.is_head and not options.joins:
            self._lead(options, self.succession.first_term())
        try:
            # With -delay, the controller begins to listen later.
            await self._obey_all(await self.succession.first(join_timeout_s + options.delay_s))
        finally:
            self._channel = None
            try:
                await self.own.leave()
            finally:
                await self._server.close()

    async def _listen(self, secret: bytes) -> None:
        options = self._options
        then = lambda: self.own.controller.then() if self.own.controller else ""  # noqa: E731
        server = self._server = ControlServer(self._machine, secret, self._take, then)
        try:
            if options.hosts.is_several:  # in a job with one host, no other host connects
                await server.start(options.host.address, options.control_port)
        except ValueError as error:
            raise StartError(str(error)) from None
        except OSError as error:
            remedy = "set another port with -port (the same port on all hosts)"
            if options.joins:
                remedy = f"the job uses this port on all hosts; is another {PROGRAM} of the job running on this host?"
            raise StartError(
                f"{options.host.name}:{options.control_port}, the address that the other hosts call, can't "
                f"be used: {error.strerror or error}; {remedy}"
            ) from None

    def _lead(self, options: Options, term: Term | None) -> None:
        """Start the controller of the job on this host."""
        words, at_end = replace_fields(self._registration, flags=flags_of(options)), self._supervisor.remove_at_end
        self.own.begin(self._make(options, self._machine, words, at_end, self._departure.stop_job, term))

    async def _take(self, channel: AnyChannel) -> bool:
        """Accept a connection from another host."""
        said = await within(_FIRST_WORDS_S, channel.receive(m.FIRST_WORDS))
        if isinstance(said, m.TransportConnection):
            return isinstance(channel, Channel) and await self._transports.take(channel, said)
        if self.own.controller is not None:
            return await self.own.controller.serve(channel, said)
        if isinstance(said, m.WaitingController):
            await self.succession.answer_a_controller(channel, said, is_in_a_job=self._channel is not None)
        elif isinstance(said, m.Ask) or not self._may_lead_for(said):
            why = f"{self._options.host.name} isn't the head node of the job; give the same flags on all hosts"
            channel.send(m.RegistrationRejected(why))
            await channel.flushed()
        return False  # the calling host then looks up again which host has the lease

    def _may_lead_for(self, said: m.Agent) -> bool:
        """Return whether the host that sent `said` may have read in the store that this host has the lease.

        This host might not know that yet, or might be about to start a controller. Only two kinds of hosts read the
        store: hosts that send a resync report, and hosts that join a job whose controller can move to another host.
        """
        return said.report is not None or (said.slots is not None and moves(self._options))

    # ---- obeying a controller ----

    async def _obey_all(self, channel: AnyChannel | None) -> None:
        """Obey the controller, and after its failure the next controller, until the job has ended on this host."""
        options, succession = self._options, self.succession
        joining = m.Agent(self._registration, slots=options.host.slots)  # the controller sends the job's command
        words = m.Agent(self._registration)  # a controller on this host already has the command
        if options.joins:
            words = joining
        elif not succession.obeys_itself:
            words = m.Agent(self._registration, list(map(os.fsencode, options.command)))
        with contextlib.ExitStack() as begun:
            while channel is not None:
                try:
                    trouble = await self._obey_one(channel, words, begun)
                finally:
                    self._channel = None
                    channel.close()
                head = self.own.controller
                if self._ended.done() or not trouble or (head is not None and head.has_left):
                    return
                if succession.since is None and succession.joins_one_that_moves:
                    channel = await succession.to_join(env.JOIN_TIMEOUT.get(self._machine.environ))
                    continue
                if succession.since is None or self._host is None:
                    await self.own.wait()
                    self._end(1, f"{PROGRAM}: {trouble}; the workers on this host are ended")
                    return
                _log.warning('controller lost: reason="%s". The workers here wait for the next controller', trouble)
                self._host.wait_for_a_controller()
                channel = await succession.next(trouble, self._host)
                words = m.Agent(self._registration, report=self._host.report()) if succession.is_known else joining

    async def _obey_one(self, channel: AnyChannel, words: m.Agent, begun: contextlib.ExitStack) -> str:
        """Obey a controller until the connection ends. Return why the connection ended; "" if the job has ended."""
        succession = self.succession
        head = succession.head_name
        try:
            registered = await self._register(channel, words)
            if isinstance(registered, m.RegistrationRejected):
                if succession.since is None:
                    raise StartError(registered.reason)
                self._end(1, f"{PROGRAM}: {registered.reason}")
                return ""
            self._begin(channel, registered, begun)
            succession.since = registered.lease
            if head != self._registration.host:
                _log.info("host registered: head_node=%s", head)
            if registered.warning:
                succession.warn_once(f'hosts differ: host={head} reason="{printable(registered.warning)}"')
            while not self._ended.done():
                self._obey(await channel.receive(m.FROM_CONTROLLER))
            # The job has ended on this host. A worker that is still waiting for an answer has exited, or exits soon.
        except asyncio.TimeoutError:
            return f"{PROGRAM} on {head} doesn't answer"
        except ProtocolError as error:
            return f"{head} sent an invalid message: {error}"
        except OSError as error:
            return f"{PROGRAM} on {head}, the head node, has ended ({error.strerror or error})"
        except StartError:
            raise
        except Exception as error:  # handle the error like any other end of the connection to this controller
            _log.error(
                'internal error: where=message from=%s error="%r". The launcher closes the connection',
                head, error, exc_info=error,
            )  # fmt: skip
            return f"internal error: message from {head}: {error!r}"
        return ""

    async def _register(self, channel: AnyChannel, words: m.Agent) -> m.Registered | m.RegistrationRejected:
        channel.send(words)
        lease_s = self.succession.lease_s
        if words.report is not None:
            # Don't wait long: if this controller has failed or is paused, the next one waits for this host's report.
            return await within(lease_s / 2, channel.receive(m.REGISTERED))
        channel.set_silence(lease_s)  # while the controller waits for other hosts, it may fail or become unreachable
        return await channel.receive(m.REGISTERED)

    def _begin(self, channel: AnyChannel, registered: m.Registered, begun: contextlib.ExitStack) -> None:
        """Begin to obey a controller that has registered this host."""
        is_first, self._channel = self._host is None, channel
        if self._host is None:
            host = self._host = self._new_host(channel, registered)
            begun.callback(host.close)
            host.segments.begin()
        else:
            self._send(m.Beat())  # the controller waits for this message (`HostGathering.gather_again`)
            self._host.go_over_to(channel)
        if self._options.host_timeout_s is not None:
            limit_s = self._options.host_timeout_s
            channel.set_silence(limit_s)
            self._watch_controller(channel, Leases(limit_s, after_pause_s=min(_AFTER_PAUSE_S, limit_s)))
        if not is_first:
            self._departure.tell_again()

    def _new_host(self, channel: AnyChannel, registered: m.Registered) -> HostOfJob:
        return HostOfJob(
            self._registration, self._machine, self._supervisor, self._output, self._transports, channel, self._send,
            registered, self._options.secret or registered.secret or "", self._claims,
        )  # fmt: skip

    def _send(self, message: m.FromHost) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _obey(self, said: m.FromController) -> None:
        host = self._host
        if type(said) in HEARD:
            HEARD[type(said)](self, said)
        elif host is not None and type(said) in OBEYED:
            OBEYED[type(said)](host, said)
        elif host is not None and (segment := host.segments.open.get(said.version)) is not None:  # type: ignore[union-attr]
            OF_A_VERSION[type(said)](host.segments, segment, said)

    def _hear_the_end(self, said: m.End) -> None:
        if self.own.for_ever is not None:
            return  # the controller in this process has a more precise result
        if said.left:
            _log.info("host left: host=this")
        self._end(said.code, said.words or "", said.failed)

    def _watch_controller(self, channel: AnyChannel, leases: Leases) -> None:
        """Exchange heartbeats with the controller. If they stop, end this launcher: its host counts as failed."""
        if channel is not self._channel:
            return
        self._send(m.Beat())
        head, is_own = self.succession.head_name, self.succession.obeys_itself
        is_silent = bool(leases.run_out(self._loop.time(), {head: channel.heard})) and not is_own
        if is_silent and self.succession.since is not None:
            channel.end()
            return
        if is_silent:
            limit = f"for {self._options.host_timeout_s:g} s (-host-timeout)"
            self._send(m.Ends(f"no message from {head} has reached it {limit}"))  # the network may work again
            self._end(1, f"{PROGRAM}: no message came from {head}, the head node, {limit}; {_ENDED_HERE}")
        self._loop.call_later(leases.period_s, self._watch_controller, channel, leases)


async def _close_output(agent: Agent, code: int, words: str, failed: int | None) -> None:
    """Wait until the output is written. A thread waits, so that signals can still be handled and can end the wait."""
    host, output, departure = agent._host, agent._output, agent._departure
    # A worker that SIGKILL doesn't end keeps its pipes open, so its output never ends.
    hangs = host is not None and bool(host.workers.running())
    block = None if host is None else host.workers.failure_block(failed)
    limit_s = _OUTPUT_GRACE_S if code or hangs or departure.interrupted else None
    departure.cut_output = output.cut
    await agent._machine.in_thread(lambda: output.close(limit_s, words or None, block))


def _find_devices(options: Options, machine: Machine) -> Devices:
    """Return this host's devices.

    Raises:
        StartError: the user's settings for devices are inconsistent.
    """
    try:
        found = machine.find_devices(
            options.host.name, single=options.size == 1 and not options.watch, allow_nvlink=options.allow_nvlink
        )
    except (DeviceListError, RankTableError) as error:
        raise StartError(str(error)) from None
    if options.allow_nvlink and found.kind is not GPU:
        _log.warning('flag ignored: flag=-allow-nvlink reason="the job has no GPUs"')
    return found


# The handlers of the controller's messages, in three groups: for the launcher, for this host's part of the job, and for
# the segment of one cluster version.
HEARD: dict[type, Callable[[Agent, Any], None]] = {
    m.Beat: lambda agent, said: None,
    m.NewLease: lambda agent, said: agent.succession.hear(said),
    m.JobStatus: lambda agent, said: agent._status.hear(said),
    m.End: Agent._hear_the_end,
}
OBEYED: dict[type, Callable[[HostOfJob, Any], None]] = {
    m.Answer: lambda host, said: host.relay.answer(said.number, said.message),
    m.Hold: lambda host, said: host.hold_deadlines(said.held),
    m.WatchActivity: lambda host, said: host.segments.watch_activity(said),
    m.Launch: lambda host, said: host.workers.start(said),
    m.Signal: lambda host, said: host.workers.signal(said),
    m.Checkpoint: HostOfJob.checkpoint,
    m.Pin: lambda host, said: host.workers.pin(said),
    m.Stack: lambda host, said: host.workers.ask_for_stack(said),
    m.Assign: lambda host, said: host.workers.assign(said),
    m.Make: lambda host, said: host.segments.make(said),
    m.Close: lambda host, said: host.segments.drop(said.version),
}
OF_A_VERSION: dict[type, Callable[[HostSegments, HostSegment, Any], None]] = {
    m.Lost: HostSegments.lose,
    m.LoseHost: lambda segments, segment, said: segment.lose_host(said.host),
    m.VersionPrepared: lambda segments, segment, said: segment.announce(said.newer),
    m.Sync: HostSegments.sync,
    m.Ending: lambda segments, segment, said: segment.set_ending(said.rank, said.ending),
}
