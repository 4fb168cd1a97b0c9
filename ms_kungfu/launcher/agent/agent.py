"""The launcher of a host: does for its host what the head says, and tells what happens.

The first host's, or the only one's, also runs the head (`job`), which talks to it as to all others. Where the head
moves from host to host (`seat`) and is gone, the others look who has the seat, or take it.

It decides nothing about the job. What it has is what only its host can have: the supervisor and its processes, a
socket for their requests (which the head answers), segments and links, and the terminal on which its workers' output
goes.

Whoever ends, nothing is left: where the head is gone, and can't be another one, its workers here end, too, for nobody
else can say what is to be done with them; where this process ends, its supervisor kills them, and the head ends the
job, or goes on without this host.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
from dataclasses import replace
from typing import Any, Callable

from msgspec.structs import replace as replace_fields

from ms_kungfu import env
from ms_kungfu._decoding import ProtocolError
from ms_kungfu._words import printable
from ms_kungfu.cluster import Cluster
from ms_kungfu.cluster_store import (
    Seat,
    SeatGoneError,
    SeatKeys,
    SeatLostError,
    Sitting,
    StoreFullError,
    StoreUnreachableError,
)
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher import signals
from ms_kungfu.launcher.agent.links import LinkMaker
from ms_kungfu.launcher.agent.output import Output
from ms_kungfu.launcher.agent.plain_segment import HostSegment
from ms_kungfu.launcher.agent.starter import Starter, find_devices, serve_status, told_of_the_host
from ms_kungfu.launcher.agent.supervisor import Supervisor
from ms_kungfu.launcher.channel import AnyChannel, Channel
from ms_kungfu.launcher.control import (
    ControlServer,
    NoAnswerError,
    RefusedError,
    call,
    call_once,
    remedy_for,
)
from ms_kungfu.launcher.hello import flags_of, hello_of
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.state.events import CANT_RUN, Exited
from ms_kungfu.launcher.state.head import Head, MakeHead
from ms_kungfu.launcher.state.hosts import Host
from ms_kungfu.launcher.state.lost_hosts import Leases
from ms_kungfu.launcher.state.outline import outline
from ms_kungfu.launcher.state.policy import EXIT_TIMEOUT, bug, not_begun, signal_name
from ms_kungfu.launcher.state.seat import Record, Term, how_it_has_ended, moves
from ms_kungfu.launcher.state.start_error import StartError
from ms_kungfu.launcher.state.states import JobState
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

_log = logging.getLogger(__name__)
_OUTPUT_GRACE_S = 1.0
_LINKS_LOOK_S = 0.2
_AFTER_PAUSE_S = 0.5  # to read what has come meanwhile
_HEAD_S = 5.0  # for the head to end the job after a signal here
_LET_GO_S = 15.0  # for the head, and for whoever has to be killed at the end of the grace
_HEAD_STATUS_S = 2.0
_MAX_LOOK_S = 10.0
_PATIENCE_S = 5.0  # before somebody hears why the head can't be reached: it may be about to start
_LEASE_S = 10.0  # of the seat, where -host-timeout doesn't say
_SEAT_LOOK_S = 0.1
_END_S = 1.0
_LED_S = 10.0  # for a head whose job is over, to tell the others and to give the seat back
_LEASES = 3  # within which another head has taken the seat, and this host has called it
_MOST_ENDED = 1024  # of its workers of which a host can tell how they have ended


class Agent:
    """Serves one job. The supervisor and the output are the caller's until `run`, which closes both."""

    def __init__(
        self, options: Options, supervisor: Supervisor, output: Output, make_head: MakeHead,
        machine: Machine | None = None,
    ) -> None:  # fmt: skip
        self._options = options
        self._make_head = make_head
        self._supervisor = supervisor
        self._output = output
        self._machine = Machine() if machine is None else machine
        self._channel: AnyChannel | None = None
        self._pids: dict[int, int] = {}  # of the processes that run, by their keys
        self._making: dict[int, tuple[int, asyncio.Task[None]]] = {}  # version -> attempt
        self._beats: dict[int, dict[int, int]] = {}  # version -> rank -> its count at the last look
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
        self._is_guardless = False  # and has no workers any more
        self._started_at = self._machine.time()
        self._questions: dict[int, asyncio.Future[dict[str, Any]]] = {}  # about the job's status, to the head
        self._numbers = itertools.count(1)
        self._head: Head | None = None  # where this host has the seat
        self._leading: asyncio.Future[int] | None = None
        self._head_name = options.hosts.head.name
        self._seat: Seat | None = None  # that this host has tried to take
        self._seated: int | None = None  # since when the head has it that is obeyed; None: the head doesn't move
        self._is_known = True  # to the head that is called next
        self._secret = ""  # of the brokers
        self._interrupted = 0  # by this signal
        # For the next head:
        self._workers: dict[int, m.Worker] = {}
        self._reported: dict[int, tuple[int | None, int | None]] = {}  # pid and exit code in the last report
        self._losses: dict[int, list[m.Loss]] = {}

    async def run(self) -> int:
        """The job's exit code. StartError where it never started. Nothing of the job is left here when it returns."""
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[tuple[int, str]] = self._loop.create_future()
        self._loop.set_exception_handler(self._on_bug)
        in_slurm, catch = self._options.in_slurm, self._machine.catch_signal
        signals.hear(self._loop, self._on_signal, self._supervisor.signal, in_slurm, catch)
        if self._options.timeout_s is not None:
            self._later(self._options.delay_s + self._options.timeout_s, self._on_timeout, self._options.timeout_s)
        code, words = 1, ""
        close_status = serve_status(self._machine, self._supervisor, self._status)
        serving = asyncio.ensure_future(self._serve())
        serving.add_done_callback(self._on_served)
        try:
            code, words = await self._ended
            return code
        finally:
            await self._leave_the_seat()
            serving.cancel()
            await asyncio.wait([serving])
            if self._leading is not None and not self._leading.done():
                self._leading.cancel()
                await asyncio.wait([self._leading])
            for timer in self._timers:
                timer.cancel()
            self._supervisor.wake()
            self._supervisor.close()
            # Whoever couldn't be killed keeps its pipes open for as long as it hangs.
            self._output.close(_OUTPUT_GRACE_S if code or self._pids else None, words or None)
            close_status()

    def _end(self, code: int, words: str = "") -> None:
        if not self._ended.done():
            self._ended.set_result((code, words))

    def _on_timeout(self, limit_s: float) -> None:
        """Where there is a job its head ends it, or the next one."""
        if self._channel is None and self._seated is None and self._head is None:
            head = self._head_name
            why = f"{head}, which has it, was not reached" + (f": {self._silence}" if self._silence else "")
            self._end(EXIT_TIMEOUT, f"{PROGRAM}: {not_begun(limit_s, why)}")

    def _on_served(self, serving: asyncio.Future[None]) -> None:
        if not serving.cancelled() and not self._ended.done():
            error = serving.exception()
            if error is not None:
                self._ended.set_exception(error)

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        head = self._head_for_ever
        if head is not None and not head.is_over:
            head.on_bug(loop, context)  # it ends the job
            return
        error = context.get("exception")
        _log.error("internal error: %s", context["message"], exc_info=error)
        self._end(1, f"{PROGRAM}: internal error: {context['message'] if error is None else bug(error)}")

    # ---- what the job tells of itself ----

    async def _status(self) -> dict[str, Any]:
        """The head's word; this host's own, which is little, where there is none."""
        if self._head is not None:
            return self._head.status()
        head, number = self._head_name, next(self._numbers)
        if self._channel is None and self._seated is not None:
            why = f"{head}, which had the job, is gone; this host waits for the next head"
            return outline(self._options, JobState.RUNNING, why, self._started_at)
        if self._channel is None:
            return outline(self._options, JobState.STARTING, f"waits for {PROGRAM} on {head}", self._started_at)
        answer = self._questions[number] = self._loop.create_future()
        try:
            self._send(m.StatusQuestion(number))
            return await within(_HEAD_STATUS_S, answer)
        except asyncio.TimeoutError:
            why = f"{PROGRAM} on {head}, which has the job, doesn't answer"
            return outline(self._options, JobState.RUNNING, why, self._started_at)
        finally:
            del self._questions[number]

    # ---- signals ----

    def _on_signal(self, number: int) -> None:
        """A SIGTERM has this host leave, where the head finds that the job can do without it: it tells when that is
        over. At any other signal the head ends the job, on all hosts. A second signal of that kind, or a head that
        doesn't: this host ends at once. Where it has the seat, and may leave, others go on with the job."""
        if self._head is not None and self._head.is_over and not self._head.is_deposed:
            self._head.interrupted(number)  # it ends the job, and hurries now
            return
        # While nobody has the seat the next head hears of it (`_go_over_to`).
        is_alone = self._channel is None and self._head is None and self._seated is None
        if is_alone or self._is_told or (number == signal.SIGTERM and self._is_leaving):
            self._end(128 + number, f"{PROGRAM}: interrupted by {signal_name(number)}")
            return
        if number == signal.SIGTERM and self._options.watch and self._head_for_ever is None:
            self._is_leaving = True
            self._tell_the_head(m.Leave())
            limit_s = self._options.leave_grace_s
            _log.info("this host leaves the job: its workers do after their step, within %g s (-leave-grace)", limit_s)
            late = f"{PROGRAM}: interrupted by SIGTERM, and the head has not let this host go"
            self._later(limit_s + _LET_GO_S, self._end, 128 + number, late)
            return
        self._is_told, self._interrupted = True, number
        self._tell_the_head(m.Interrupted(number))
        late = f"{PROGRAM}: interrupted by {signal_name(number)}, and the head has not ended the job"
        next_s = 0.0 if self._seated is None else _LEASES * self._lease_s
        self._later(_HEAD_S + next_s, self._end, 128 + number, late)

    def _tell_the_head(self, message: m.Leave | m.Interrupted) -> None:
        """One that is here may not have heard of this host yet."""
        head, own = self._head, self._options.host.name
        if head is None or head.is_deposed:
            self._send(message)
        elif isinstance(message, m.Leave):
            head.host_leaves(own)
        else:
            head.interrupted(message.number, f" on host {own}" if head.moves else "")

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
        self._links = LinkMaker(
            machine, options.hosts, port, secret, len(cores), silent_s=silent_s, strategy=options.strategy
        )
        server = self._server = ControlServer(
            machine, secret, self._take, lambda: self._head.then() if self._head else ""
        )
        try:
            if options.hosts.is_several:  # else nobody calls
                await server.start(options.host.address, port)
        except ValueError as error:
            raise StartError(str(error)) from None
        except OSError as error:
            remedy = "-port gives another port, the same on all hosts"
            if options.joins:
                remedy = f"the job is at this port on all hosts; does another {PROGRAM} of it run here?"
            raise StartError(
                f"{options.host.name}:{port}, where the other hosts call, can't be used: {error.strerror or error}; "
                f"{remedy}"
            ) from None
        hello = self._hello = hello_of(options, devices, cores, {} if options.joins else flags_of(options))
        # -delay is the head's: it listens afterwards.
        wait_s = join_timeout_s + options.delay_s
        self._since = self._loop.time()
        if head != options.host:
            _log.info("calling %s, which has the job, for %g s (KUNGFU_JOIN_TIMEOUT)", head.name, wait_s)
        if options.hosts.is_head and not options.joins:
            self._lead(options, self._first_term() if moves(options) else None)
        try:
            await self._obey_all(await self._first_head(wait_s), hello)
        finally:
            self._channel = None
            try:
                await self._leave_the_seat()
            finally:
                await server.close()

    @property
    def _head_for_ever(self) -> Head | None:
        """The head, if it is here and stays here."""
        return None if self._head is None or self._head.moves else self._head

    @property
    def _obeys_itself(self) -> bool:
        """The head is in this process, and isn't lost where the system loses this host's address."""
        return self._head_name == self._options.host.name

    @property
    def _lease_s(self) -> float:
        return self._options.host_timeout_s or _LEASE_S

    def _first_term(self) -> Term:
        keys = self._machine.open_seat(str(self._options.config_server), timeout_s=self._lease_s / 2)
        return Term(keys, Seat(keys, self._options.host.name, self._lease_s), None, "", self._started_at)

    def _lead(self, options: Options, term: Term | None) -> None:
        """This host decides from now on."""
        hello = replace_fields(self._hello, flags=flags_of(options))
        self._head = self._make_head(options, self._machine, hello, self._supervisor.remove_at_end, term)
        self._leading = asyncio.ensure_future(self._head.run())
        self._leading.add_done_callback(self._has_led)

    async def _leave_the_seat(self) -> None:
        """Before this host ends: over its connections the job is told to end, or would be. A head whose job is over
        gives the seat back last."""
        head, leading = self._head, self._leading
        if head is not None and leading is not None:
            if head.moves:
                await head.leave()
            if head.is_over or head.has_left:
                await asyncio.wait([leading], timeout=_LED_S)

    def _has_led(self, leading: asyncio.Future[int]) -> None:
        head, self._head = self._head, None
        if leading.cancelled() or head is None:
            return
        error = leading.exception()
        if isinstance(error, StartError) and not self._ended.done():
            self._ended.set_exception(error)
        elif error is not None:
            _log.error("internal error: the job can't be led", exc_info=error)
            self._end(1, f"{PROGRAM}: internal error: {bug(error)}")
        elif head.has_left:
            _log.info("this host has left the job")
            self._end(0)
        elif not head.moves:
            self._end(leading.result(), head.last_words or "")
        elif not head.is_deposed:  # which has told so, but perhaps not here
            self._later(_END_S, self._end, leading.result(), head.last_words or "")

    async def _first_head(self, wait_s: float) -> AnyChannel:
        """A connection with it. StartError where there is none within `wait_s`."""
        options, machine = self._options, self._machine
        if self._joins_one_that_moves:
            return await self._head_to_join(wait_s)
        if self._obeys_itself:
            return self._server.call_itself()
        own, head, secret = options.host.address, options.hosts.head.address, bytes.fromhex(options.secret or "")
        try:
            return await call(machine, own, head, options.control_port, secret, wait_s, self._tell_of_silence)
        except RefusedError as error:
            raise StartError(str(error)) from None
        except NoAnswerError as error:
            port = options.control_port
            raise StartError(
                f"no answer from {head}:{port} within {wait_s:g} s (KUNGFU_JOIN_TIMEOUT): {error.why}; "
                f"{remedy_for(error.why, port)}"
            ) from None

    @property
    def _joins_one_that_moves(self) -> bool:
        return self._options.joins and moves(self._options)

    async def _head_to_join(self, wait_s: float) -> AnyChannel:
        """The same; who has told this host how to join may be dead by now, or before it is let in."""
        url, machine, deadline = str(self._options.config_server), self._machine, self._loop.time() + wait_s
        keys = machine.open_seat(url, timeout_s=self._lease_s / 2)
        while True:
            trouble = "nobody has the job"
            try:
                found = await machine.in_thread(keys.look)
                record = None if found.record is None else Record.from_json(found.record)
                if record is None or record.end is not None:
                    how = "" if record is None or record.end is None else f" ({how_it_has_ended(record.end)})"
                    raise StartError(f"the job of {url} has ended{how}")
                if found.holder:
                    channel = await within(self._lease_s / 2, self._call(found.holder))
                    self._head_name = found.holder
                    return channel
            except (OSError, asyncio.TimeoutError, StoreUnreachableError) as error:
                trouble = str(error) or f"{self._head_name} doesn't answer"
            except (ProtocolError, ConfigServerError) as error:
                raise StartError(f"who has the job of {url} can't be told: {error}") from None
            if self._loop.time() > deadline:
                raise StartError(f"{trouble}, within {wait_s:g} s (KUNGFU_JOIN_TIMEOUT); is the job of {url} running?")
            await asyncio.sleep(_SEAT_LOOK_S)

    def _tell_of_silence(self, why: str) -> None:
        self._silence = why
        if self._loop.time() - self._since >= _PATIENCE_S:
            head, port = self._options.hosts.head.name, self._options.control_port
            self._warn_once(f"no answer from {head}:{port} so far: {why}; {remedy_for(why, port)}")

    def _warn_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            _log.warning("%s", sentence)

    async def _take(self, channel: AnyChannel) -> bool:
        """Another host has called."""
        said = await within(_HEAD_S, channel.receive(m.FIRST_WORDS))
        if isinstance(said, m.Link):
            return isinstance(channel, Channel) and await self._links.take(channel, said)
        if self._head is not None:
            return await self._head.serve(channel, said)
        if isinstance(said, m.Head):
            await self._answer_a_head(channel, said)
        elif isinstance(said, m.Ask) or not self._may_take_the_seat_for(said):
            channel.send(m.Refused(f"{self._options.host.name} hasn't got the job; give the same flags on all hosts"))
            await channel.flushed()
        return False  # who comes looks once more who has the seat

    def _may_take_the_seat_for(self, said: m.Agent) -> bool:
        """The seat is this host's, which hasn't heard of it yet, or is between two of its heads: it has been read from
        the store by who comes, with a report, or because the job that it joins moves its head."""
        return said.report is not None or (said.slots is not None and moves(self._options))

    async def _answer_a_head(self, channel: AnyChannel, asking: m.Head) -> None:
        """Another host has the job, as it thinks, and asks what this one does."""
        own, is_in_a_job = self._options.hosts, self._channel is not None
        calls_for_s = self._loop.time() - self._since
        channel.send(m.Calls(str(own), own.head.name, calls_for_s, in_a_job=is_in_a_job))
        await channel.flushed()
        if not is_in_a_job and asking.host != own.head.name:
            self._warn_once(
                f"{PROGRAM} was told -H {asking.hosts} on {asking.host} and waits there for this host, which calls "
                f"{own.head.name}; here it is {own}. Give the same -H, in the same order, on all hosts"
            )

    async def _obey_all(self, channel: AnyChannel | None, hello: m.Hello) -> None:
        options = self._options
        joining = m.Agent(hello, slots=options.host.slots)
        # A host that joins has the job's command from the head.
        words = m.Agent(hello)  # this host's own head has the command
        if options.joins:
            words = joining
        elif not self._obeys_itself:
            words = m.Agent(hello, list(map(os.fsencode, options.command)))
        with contextlib.ExitStack() as begun:
            while channel is not None:
                try:
                    trouble = await self._obey_one(channel, words, hello, begun)
                finally:
                    self._channel = None
                    channel.close()
                if self._ended.done() or not trouble or (self._head is not None and self._head.has_left):
                    return
                if self._seated is None and self._joins_one_that_moves:
                    channel = await self._head_to_join(env.JOIN_TIMEOUT.get(self._machine.environ))
                    continue
                if self._seated is None:
                    if self._leading is not None:  # it is to say why
                        await asyncio.wait([self._leading], timeout=_END_S)
                    self._end(1, f"{PROGRAM}: {trouble}; the workers here are ended")
                    return
                channel = await self._next_head(trouble)
                words = m.Agent(hello, report=self._report()) if self._is_known else joining
                self._reported = {key: (worker.pid, worker.code) for key, worker in self._workers.items()}

    async def _obey_one(self, channel: AnyChannel, words: m.Agent, hello: m.Hello, begun: contextlib.ExitStack) -> str:
        """A head, until the connection ends; why it has, "" where the job has."""
        head = self._head_name
        try:
            channel.send(words)
            # A head that dies, or stands still, just now isn't waited for: the next one waits for this host's report.
            patience_s = None if words.report is None else self._lease_s / 2
            # A head that waits for its hosts may be switched off, or cut off, meanwhile.
            if patience_s is None:
                channel.set_silence(self._lease_s)
            welcome = await within(patience_s, channel.receive(m.WELCOME))
            if isinstance(welcome, m.Refused):
                if self._seated is None:
                    raise StartError(welcome.refused)
                self._end(1, f"{PROGRAM}: {welcome.refused}")
                return ""
            if self._seated is None:
                begun.enter_context(self._begun(channel, hello, welcome))
            else:
                self._go_over_to(channel)
            self._seated = welcome.seat
            if head != hello.host:
                _log.info("this host takes part in the job of %s", head)
            if welcome.warning:
                self._warn_once(printable(welcome.warning))
            while not self._ended.done():
                self._obey(await channel.receive(m.FROM_HEAD))
            # The sockets close before the head does: a worker that asks is gone by now, or about to be.
        except asyncio.TimeoutError:
            return f"{PROGRAM} on {head} doesn't answer"
        except ProtocolError as error:
            return f"{head} says what isn't understood: {error}"
        except OSError as error:
            return f"{PROGRAM} on {head}, which has the job, is gone ({error.strerror or error})"
        except StartError:
            raise
        except Exception as error:  # the connection to this head has ended, as by any other mistake in what it says
            _log.error(
                "internal error: message from %s: %r; the launcher closes the connection", head, error, exc_info=error
            )
            return f"internal error: message from {head}: {error!r}"
        return ""

    # ---- another head ----

    async def _next_head(self, trouble: str) -> AnyChannel | None:
        """A connection with whoever has the job from now on, which may be this host. None where that is of no use: it
        has ended, or goes on without this host.

        While nobody has the seat, or the store is away, the workers train on as far as they can. Their deadlines wait:
        only a head can say what they wait for.
        """
        _log.warning("%s; the workers here go on with the next one", trouble)
        self._relay.hold_deadlines(True)
        for _, making in self._making.values():
            making.cancel()
        self._making.clear()
        machine, own, url = self._machine, self._options.host.name, self._options.config_server
        keys = machine.open_seat(str(url), timeout_s=self._lease_s / 2)
        patience_s = env.JOIN_TIMEOUT.get(machine.environ)
        deadline, refused = self._loop.time() + patience_s, ""
        while self._loop.time() < deadline and not self._ended.done():
            try:
                found = await machine.in_thread(keys.look)
                refused = ""
                if found.record is None:
                    self._end(1, f"{PROGRAM}: {SeatGoneError()}; the workers here are ended")
                    return None
                try:
                    record = Record.from_json(found.record)
                except ProtocolError as error:
                    self._end(1, f"{PROGRAM}: who has the job can't be told: {error}; the workers here are ended")
                    return None
                if why := self._is_over_for(record):
                    self._end(*why)
                    return None
                if found.holder and found.since != self._seated and (found.holder != own or self._head is not None):
                    self._is_known = own in [host.name for host in record.hosts]
                    channel = await within(self._lease_s / 2, self._call(found.holder))
                    self._head_name = found.holder
                    return channel
                is_free = not found.holder or (found.holder == own and found.since != self._seated)
                if is_free and self._head is None:  # else that head sits down again
                    await self._take_the_seat(keys, found, record)
            except (StoreFullError, StoreUnreachableError) as error:  # a full one takes no new lease: while that lasts
                deadline = self._loop.time() + patience_s
                self._warn_once(f"{error}: nobody can take the job, and the workers here go on as far as they can")
            except (OSError, asyncio.TimeoutError, SeatLostError):
                pass
            except ConfigServerError as error:  # a refusal doesn't mend itself
                refused = str(error)
                self._warn_once(
                    f"{error}: this host can't take the job, and its workers are ended if that lasts for "
                    f"{patience_s:g} s ({env.JOIN_TIMEOUT.name})"
                )
            except ProtocolError as error:
                self._warn_once(f"who has the job can't be told: {error}")
            await asyncio.sleep(_SEAT_LOOK_S)
        told = self._interrupted or (signal.SIGTERM if self._is_leaving else 0)
        code = 128 + told if told else 1
        reason = f" ({refused})" if refused else ""
        self._end(code, f"{PROGRAM}: {trouble}, and nobody else has it{reason}; the workers here are ended")
        return None

    def _is_over_for(self, record: Record) -> tuple[int, str] | None:
        """Exit code and last words of this host, where the job has nothing more for it."""
        own = self._options.host.name
        has_begun = record.versions.chosen is not None or record.end is not None
        if record.job != self._links.job or not has_begun:
            return 1, f"{PROGRAM}: {self._head_name}, which had the job, is gone, and the job with it"
        codes = {worker.code for worker in self._workers.values()}
        if self._is_leaving and own not in record.present and codes == {0}:
            return 0, ""  # which the head couldn't say any more
        # Where a head dies before it is on record who has joined, that host has no workers yet, and joins the next one.
        is_new = self._options.joins and not self._workers and own not in [host.name for host in record.hosts]
        if not is_new and own not in record.present:
            return 1, f"{PROGRAM}: the job goes on without this host"
        return None if record.end is None else (record.end[0], record.end[1] or "")

    async def _call(self, head: str) -> AnyChannel:
        options = self._options
        if head == options.host.name:
            return self._server.call_itself()
        secret = bytes.fromhex(options.secret or "")
        return await call_once(self._machine, options.host.address, Host(head).address, options.control_port, secret)

    async def _take_the_seat(self, keys: SeatKeys, found: Sitting, record: Record) -> None:
        """Of several that try one gets it."""
        options, own = self._options, self._options.host.name
        names = record.present
        if not moves(options) or self._is_leaving or own not in names:
            return  # it is about to go, or was about to join
        if not found.holder:  # who comes first in the job has its neighbours' patience
            await asyncio.sleep(_SEAT_LOOK_S * names.index(own) / len(names))
        self._seat = self._seat or Seat(keys, own, self._lease_s)
        seat, record = self._seat, record.taken_by(own)
        await self._machine.in_thread(lambda: seat.take(found, record.to_json()))
        _log.warning("this host has the job from now on")
        self._seat = None
        term = Term(keys, seat, record, self._secret, self._started_at)
        self._lead(replace(options, hosts=record.hosts_of(options)), term)

    def _report(self) -> m.Report:
        relay = self._relay
        return m.Report(
            list(self._workers.values()),
            {version: self._losses.get(version, []) for version in relay.segments()},
            relay.leaving(),
            [(str(peer), incarnation) for peer, incarnation in relay.placed()],
            relay.cores,
        )

    def _go_over_to(self, channel: AnyChannel) -> None:
        """Another head has let this host in, and hears what the one before may not have heard."""
        self._channel = channel
        self._words.clear()
        self._unlinked.clear()
        self._sync_points.clear()
        self._apart.clear()
        self._relay.hold_deadlines(False)  # a head that waits for the store says so
        self._relay.ask_again(channel.send)
        for key, worker in self._workers.items():  # what has come since the report
            pid, code = self._reported.get(key, (None, None))
            if pid is None and worker.pid is not None:
                self._tell_started(worker)
            if code is None and worker.code is not None:
                self._tell_exited(worker)
        if self._is_guardless:
            self._send(m.Guardless())
        self._listen_for(channel)
        if self._is_leaving:
            channel.send(m.Leave())
        if self._interrupted:
            channel.send(m.Interrupted(self._interrupted))

    def _listen_for(self, channel: AnyChannel) -> None:
        if self._options.host_timeout_s is not None:
            limit_s = self._options.host_timeout_s
            channel.set_silence(limit_s)
            self._look_for_the_head(channel, Leases(limit_s, after_pause_s=min(_AFTER_PAUSE_S, limit_s)))

    @contextlib.contextmanager
    def _begun(self, channel: AnyChannel, hello: m.Hello, welcome: m.Welcome) -> Any:
        options, machine = self._options, self._machine
        secret = self._secret = options.secret or welcome.secret or ""
        self._links.job = welcome.job
        self._look_s = min(welcome.look_s, _MAX_LOOK_S)
        relay = self._relay = machine.make_relay(channel.send)
        self._links.find_store = relay.stores.find
        server = machine.serve_broker(relay, bytes.fromhex(secret))
        try:
            self._starter = Starter(
                hello.host, machine, self._supervisor, self._output, told_of_the_host(server.address, secret),
                unheard=lambda: sum(w.code is None for w in self._workers.values()) - server.connections(),
            )  # fmt: skip
            self._channel = channel
            self._loop.add_reader(self._supervisor.fileno(), self._on_supervisor)
            self._look()
            self._look_at_links()
            self._listen_for(channel)
            yield
        finally:
            self._loop.remove_reader(self._supervisor.fileno())
            for _, making in self._making.values():
                making.cancel()
            # Before what they stand on: a worker whose link is gone fails with an error of its program's.
            self._supervisor.close()
            server.close()
            relay.close()

    def _send(self, message: m.FromHost) -> None:
        if self._channel is not None:
            self._channel.send(message)

    def _obey(self, said: m.FromHead) -> None:
        if type(said) in _OF_A_VERSION:
            segment = self._relay.segment(said.version)  # type: ignore[union-attr]
            if segment is not None:
                _OF_A_VERSION[type(said)](self, segment, said)
        else:
            _OBEYED[type(said)](self, said)

    def _lose(self, segment: HostSegment, said: m.Lost) -> None:
        segment.mark_lost(said.rank, said.reason, said.recover, said.reaped)
        told = self._losses.setdefault(said.version, [])
        if said.rank not in [rank for rank, *_ in told]:
            told.append((said.rank, said.reason, said.recover, said.reaped))

    def _sync(self, segment: HostSegment, said: m.Sync) -> None:
        if said.number > self._sync_points.get(said.version, 0):
            self._sync_points[said.version] = said.number
            segment.request_sync_point(said.number)

    def _hear_status(self, said: m.JobStatus) -> None:
        question = self._questions.get(said.number)
        if question is not None and not question.done():
            question.set_result(said.job)

    def _hear_seat(self, said: m.Seat) -> None:
        self._seated = said.since

    def _pin(self, said: m.Pin) -> None:
        pid = self._pids.get(said.key)
        if pid is not None:
            self._machine.pin(pid, said.cores)

    def _ask_for_stack(self, said: m.Stack) -> None:
        pid = self._pids.get(said.key)
        if pid is not None and not self._machine.ask_for_stack(pid):
            _log.warning("stuck worker: no stack: process %d has not joined yet", pid)

    def _begin_making(self, said: m.Make) -> None:
        cluster = said.cluster.cluster()
        self._drop(cluster.version)
        making = asyncio.ensure_future(self._make(cluster, said.attempt, said.recovers))
        self._making[cluster.version] = (said.attempt, making)

    def _hear_the_end(self, said: m.End) -> None:
        if self._head_for_ever is not None:
            return  # its result says more
        if said.left:
            _log.info("this host has left the job")
        self._end(said.code, said.words or "")

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
        self._send(m.Made(cluster.version, attempt, error))

    def _drop(self, version: int) -> None:
        if version in self._making:
            self._making.pop(version)[1].cancel()
        self._relay.drop(version)
        self._losses.pop(version, None)
        self._words.pop(version, None)
        self._unlinked.discard(version)
        self._sync_points.pop(version, None)
        self._apart = {(v, host) for v, host in self._apart if v != version}

    def _look_at_links(self) -> None:
        self._tell_of_links()
        self._later(_LINKS_LOOK_S, self._look_at_links)

    def _tell_of_links(self) -> None:
        for version, segment in self._relay.segments().items():
            if segment.sync_points() > self._sync_points.get(version, 0):
                self._sync_points[version] = segment.sync_points()
                self._send(m.Syncs(version, self._sync_points[version]))
            if version not in self._unlinked and (why := segment.failure()):
                self._unlinked.add(version)
                self._send(m.Unlinked(version, why))
            for host, why in segment.unreachable():
                if (version, host) not in self._apart:
                    self._apart.add((version, host))
                    self._send(m.Unreachable(version, host, why))

    def _look_for_the_head(self, channel: AnyChannel, leases: Leases) -> None:
        """And says that this host is there. A host that the head has given up must not go on for long."""
        if channel is not self._channel:
            return
        self._send(m.Beat())
        head = self._head_name
        is_silent = bool(leases.run_out(self._loop.time(), {head: channel.heard})) and not self._obeys_itself
        if is_silent and self._seated is not None:
            channel.end()
            return
        if is_silent:
            limit = f"for {self._options.host_timeout_s:g} s (-host-timeout)"
            self._send(m.Ends(f"nothing came to it from {head} {limit}"))  # where the network is whole again
            self._end(1, f"{PROGRAM}: nothing came from {head}, which has the job, {limit}; the workers here are ended")
        self._later(leases.period_s, self._look_for_the_head, channel, leases)

    def _later(self, seconds: float, function: Callable[..., None], *arguments: object) -> None:
        now = self._loop.time()
        self._timers = [timer for timer in self._timers if timer.when() > now]
        self._timers.append(self._loop.call_later(seconds, function, *arguments))

    # ---- processes ----

    def _start(self, launch: m.Launch) -> None:
        told = launch.environment
        for key in [key for key, worker in self._workers.items() if worker.code is not None][:-_MOST_ENDED]:
            del self._workers[key]  # news to nobody any more
        self._workers[launch.key] = m.Worker(
            launch.key,
            told[env.SELF.name] or "",
            int(told[env.INCARNATION.name] or 0),
            launch.rank,
            launch.log_name,
            launch.device,
        )
        try:
            self._starter.start(launch)
        except OSError as error:
            self._loop.call_soon(self._has_exited, Exited(launch.key, CANT_RUN, str(error.strerror)))

    def _on_supervisor(self) -> None:
        event = self._supervisor.next_event()
        if event is None:
            self._loop.remove_reader(self._supervisor.fileno())
            self._is_guardless = True
            self._send(m.Guardless())
        elif isinstance(event, Exited):
            self._pids.pop(event.key, None)
            self._has_exited(event)
            self._relay.forget_the_dead()
        else:
            self._pids[event.key] = event.pid
            self._workers[event.key].pid = event.pid
            self._tell_started(self._workers[event.key])

    def _has_exited(self, event: Exited) -> None:
        worker = self._workers[event.key]
        worker.code, worker.error = event.code, event.error
        self._tell_of_links()  # what has ended an exchange is told before the deaths that it leads to
        self._tell_exited(worker)

    def _tell_started(self, worker: m.Worker) -> None:
        assert worker.pid is not None
        self._send(m.Started(worker.key, worker.pid))

    def _tell_exited(self, worker: m.Worker) -> None:
        assert worker.code is not None
        self._send(m.Exited(worker.key, worker.code, worker.error, self._new_words()))

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
        awaited = {version: segment.awaited() for version, segment in self._relay.segments().items()}
        stopped = [key for key, pid in self._pids.items() if self._machine.is_stopped(pid)]
        # Where all count nobody is asked about: a process has many threads.
        stands = any(
            count and count == self._beats.get(version, {}).get(rank)
            for version, counts in beats.items()
            for rank, count in counts.items()
        )
        starved = [key for key, pid in self._pids.items() if stands and self._machine.is_starved(pid)]
        self._beats = beats
        cores = tuple(self._machine.allowed_cores())
        self._send(m.Looked(self._loop.time(), cores, beats, self._new_words(), stopped, starved, progress, awaited))
        self._later(self._look_s, self._look)


# What the head says, and what does it.
_OBEYED: dict[type, Callable[[Agent, Any], None]] = {
    m.Answer: lambda host, said: host._relay.answer(said.number, said.message),
    m.Beat: lambda host, said: None,
    m.Hold: lambda host, said: host._relay.hold_deadlines(said.held),
    m.Seat: Agent._hear_seat,
    m.JobStatus: Agent._hear_status,
    m.Launch: lambda host, said: host._start(said),
    m.Signal: lambda host, said: host._supervisor.signal(said.number, said.key),
    m.Pin: Agent._pin,
    m.Stack: Agent._ask_for_stack,
    m.Release: lambda host, said: host._output.release(said.log_name),
    m.Make: Agent._begin_making,
    m.Close: lambda host, said: host._drop(said.version),
    m.End: Agent._hear_the_end,
}
_OF_A_VERSION: dict[type, Callable[[Agent, HostSegment, Any], None]] = {
    m.Lost: Agent._lose,
    m.LoseHost: lambda host, segment, said: segment.lose_host(said.host),
    m.Announce: lambda host, segment, said: segment.announce(said.newer),
    m.Sync: Agent._sync,
    m.Ending: lambda host, segment, said: segment.set_ending(said.rank, said.ending),
}
