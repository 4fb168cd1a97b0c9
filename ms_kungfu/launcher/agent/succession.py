"""Find the job's controller. If the controller fails, find the next controller, or acquire the lease on this host."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from typing import Callable

from ms_kungfu import env
from ms_kungfu._decoding import ProtocolError
from ms_kungfu.cluster_store import (
    LeadershipGoneError,
    LeadershipKeys,
    LeadershipLease,
    LeadershipLostError,
    LeadershipState,
    StoreFullError,
    StoreUnreachableError,
)
from ms_kungfu.errors import ConfigServerError
from ms_kungfu.launcher.agent.departure import Departure
from ms_kungfu.launcher.agent.host import HostOfJob
from ms_kungfu.launcher.channel import AnyChannel
from ms_kungfu.launcher.control import NoAnswerError, RefusedError, call, call_once, remedy_for
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.state.hosts import Host
from ms_kungfu.launcher.state.leader_snapshot import LeaderSnapshot, Pauses, Term, how_it_has_ended, moves
from ms_kungfu.launcher.state.local_controller import LocalController
from ms_kungfu.launcher.state.start_error import StartError
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

_log = logging.getLogger(__name__)
# Time until a log line says why the controller can't be reached; the controller may still be starting.
_PATIENCE_S = 5.0
_LEASE_S = 10.0  # length of the leadership lease, unless -host-timeout sets it
_LOOK_S = 0.1


@dataclass(eq=False)
class Succession:
    """Find the host that controls the job, or let this host control it.

    Args:
        options: the launcher's options.
        machine: the machine.
        departure: handles signals to this host's launcher.
        lead: `lead(options, term)` starts the controller on this host.
        own: returns the controller in this process, even if that controller has just stepped down; None if there is
            none.
        call_itself: returns a connection to the controller in this process.
        end: `end(code, words)` ends this host's launcher with an exit code and a last message.
        has_ended: returns whether the job has ended on this host.
        since: when the current controller's lease began; None if leadership can't move to another host.
        is_known: whether the controller that is called next knows this host.
        silence: why the first controller doesn't answer.
        begun: when this host first called a controller.
    """

    options: Options
    machine: Machine
    departure: Departure
    lead: Callable[[Options, Term], None]
    own: Callable[[], LocalController | None]
    call_itself: Callable[[], AnyChannel]
    end: Callable[[int, str], None]
    has_ended: Callable[[], bool]
    since: int | None = None
    is_known: bool = True
    silence: str = ""
    begun: float = 0.0
    _pauses: Pauses = field(default_factory=lambda: Pauses(_LEASE_S))
    _lease: LeadershipLease | None = None  # the lease that this host has tried to acquire
    _logged: set[str] = field(default_factory=set)  # messages that are logged only once

    def __post_init__(self) -> None:
        self.head_name = self.options.hosts.head.name
        self._started_at = self.machine.time()

    @property
    def obeys_itself(self) -> bool:
        """Return whether the controller is in this process.

        If it is, this host still reaches the controller when this host's network address stops working.
        """
        return self.head_name == self.options.host.name

    @property
    def lease_s(self) -> float:
        return self.options.host_timeout_s or _LEASE_S

    @property
    def joins_one_that_moves(self) -> bool:
        return self.options.joins and moves(self.options)

    def hear(self, said: m.NewLease) -> None:
        self.since = said.since

    def warn_once(self, line: str) -> None:
        if line not in self._logged:
            self._logged.add(line)
            _log.warning(line)

    def _keys(self) -> LeadershipKeys:
        return self.machine.open_leadership(str(self.options.config_server), timeout_s=self.lease_s / 2)

    def first_term(self) -> Term | None:
        """Return the first controller's term; None if the controller can't move to another host."""
        if not moves(self.options):
            return None
        keys = self._keys()
        return Term(keys, LeadershipLease(keys, self.options.host.name, self.lease_s), None, "", self._started_at)

    # ---- the first controller ----

    async def first(self, wait_s: float) -> AnyChannel:
        """Return a connection to the first controller.

        Raises:
            StartError: no controller has answered within `wait_s` seconds, or the controller has rejected this host.
        """
        options, machine = self.options, self.machine
        if not self.obeys_itself:
            head_name = options.hosts.head.name
            _log.info("registering: head_node=%s KUNGFU_JOIN_TIMEOUT=%g", head_name, wait_s)
        if self.joins_one_that_moves:
            return await self.to_join(wait_s)
        if self.obeys_itself:
            return self.call_itself()
        own, head, secret = options.host.address, options.hosts.head.address, bytes.fromhex(options.secret or "")
        try:
            return await call(machine, own, head, options.control_port, secret, wait_s, self._note_silence)
        except RefusedError as error:
            raise StartError(str(error)) from None
        except NoAnswerError as error:
            port = options.control_port
            raise StartError(
                f"no answer from {head}:{port} within {wait_s:g} s (KUNGFU_JOIN_TIMEOUT): {error.why}; "
                f"{remedy_for(error.why, port)}"
            ) from None

    def calls_for_s(self) -> float:
        return asyncio.get_running_loop().time() - self.begun

    def _note_silence(self, why: str) -> None:
        self.silence = why
        if self.calls_for_s() >= _PATIENCE_S:
            head, port = self.options.hosts.head.name, self.options.control_port
            self.warn_once(f'no answer: hosts={head}:{port} reason="{why}". Remedy: {remedy_for(why, port)}')

    async def to_join(self, wait_s: float) -> AnyChannel:
        """Return a connection to the controller of a running job, which this host joins.

        The store names the host that controls the job now. Another host may have registered this host.
        """
        url, loop = str(self.options.config_server), asyncio.get_running_loop()
        keys, deadline = self._keys(), loop.time() + wait_s
        while True:
            trouble = "no host controls the job"
            try:
                found = await self.machine.in_thread(keys.look)
                snapshot = None if found.snapshot is None else LeaderSnapshot.from_json(found.snapshot)
                if snapshot is None or snapshot.end is not None:
                    how = "" if snapshot is None or snapshot.end is None else f" ({how_it_has_ended(snapshot.end)})"
                    raise StartError(f"the job that uses {url} has ended{how}")
                if found.holder:
                    return await self._call(found.holder)
            except (OSError, asyncio.TimeoutError, StoreUnreachableError) as error:
                trouble = str(error) or f"{self.head_name} doesn't answer"
            except (ProtocolError, ConfigServerError) as error:
                raise StartError(f"the head node of the job that uses {url} is unknown: {error}") from None
            if loop.time() > deadline:
                raise StartError(
                    f"{trouble}, within {wait_s:g} s (KUNGFU_JOIN_TIMEOUT); is the job that uses {url} running?"
                )
            await asyncio.sleep(_LOOK_S)

    async def _call(self, head: str) -> AnyChannel:
        options = self.options
        if head == options.host.name:
            channel: AnyChannel = self.call_itself()
        else:
            secret, address = bytes.fromhex(options.secret or ""), Host(head).address
            calling = call_once(self.machine, options.host.address, address, options.control_port, secret)
            channel = await within(self.lease_s / 2, calling)
        self.head_name = head
        return channel

    async def answer_a_controller(self, channel: AnyChannel, asking: m.WaitingController, is_in_a_job: bool) -> None:
        """Answer a controller that waits for this host to register, and that asks what this host is doing."""
        own = self.options.hosts
        channel.send(m.Calls(str(own), own.head.name, self.calls_for_s(), in_a_job=is_in_a_job))
        await channel.flushed()
        if not is_in_a_job and asking.host != own.head.name:
            self.warn_once(
                f'hosts differ: host={asking.host} reason="{PROGRAM} waits on that host as the head node '
                f'of -H {asking.hosts}, but this host has -H {own}". Give the same -H, in the same order, '
                "on all hosts"
            )

    # ---- the next controller ----

    async def next(self, trouble: str, host: HostOfJob) -> AnyChannel | None:
        """Return a connection to the next controller, which may run on this host.

        Return None if the job has ended or continues without this host.
        """
        self._pauses = Pauses(self.lease_s)
        running = asyncio.ensure_future(self._note_that_it_runs())
        try:
            return await self._next(trouble, host)
        finally:
            running.cancel()

    async def _note_that_it_runs(self) -> None:
        while True:
            self._pauses.runs(self.machine.monotonic())
            await asyncio.sleep(_LOOK_S)

    async def _next(self, trouble: str, host: HostOfJob) -> AnyChannel | None:
        url, loop = str(self.options.config_server), asyncio.get_running_loop()
        keys, patience_s = self._keys(), env.JOIN_TIMEOUT.get(self.machine.environ)
        deadline, refused = loop.time() + patience_s, ""
        while loop.time() < deadline and not self.has_ended():
            try:
                found = await self.machine.in_thread(keys.look)
                refused = ""
                if found.snapshot is None:
                    self.end(1, f"{PROGRAM}: {LeadershipGoneError()}; the workers on this host are ended")
                    return None
                try:
                    snapshot = LeaderSnapshot.from_json(found.snapshot)
                except ProtocolError as error:
                    self.end(
                        1,
                        f"{PROGRAM}: the host that controls the job is unknown: {error}; the workers on this "
                        "host are ended",
                    )
                    return None
                if why := self._is_over_for(snapshot, host):
                    self.end(*why)
                    return None
                if (channel := await self._follow(keys, found, snapshot, host)) is not None:
                    return channel
            # Wait while the store is unreachable, or full: a full store accepts no new lease.
            except (StoreFullError, StoreUnreachableError) as error:
                deadline = loop.time() + patience_s
                self.warn_once(
                    f'store unavailable: error="{error}". No host can take over the job; the workers on '
                    "this host go on if they can"
                )
            except (OSError, asyncio.TimeoutError, LeadershipLostError):
                pass
            except ConfigServerError as error:  # the store's rejection is permanent
                refused = str(error)
                self.warn_once(
                    f'takeover failed: error="{error}". The workers on this host are ended if that lasts for '
                    f"{patience_s:g} s ({env.JOIN_TIMEOUT.name})"
                )
            except ProtocolError as error:
                self.warn_once(f'takeover failed: url={url} error="{error}"')
            await asyncio.sleep(_LOOK_S)
        reason = f" ({refused})" if refused else ""
        words = (
            f"{PROGRAM}: {trouble}, and no other host has taken over the job{reason}; the workers on this host "
            "are ended"
        )
        self.end(self.departure.exit_code, words)
        return None

    async def _follow(
        self, keys: LeadershipKeys, found: LeadershipState, snapshot: LeaderSnapshot, host: HostOfJob
    ) -> AnyChannel | None:
        """Call the host that has a new lease, or try to acquire the lease if it is free.

        Return a connection to the next controller; None if there isn't one yet.
        """
        own, controller = self.options.host.name, self.own()
        is_new = found.since != self.since
        if found.holder and is_new and (found.holder != own or controller is not None):
            self.is_known = own in [each.name for each in snapshot.hosts]
            return await self._call(found.holder)
        is_free = not found.holder or (found.holder == own and is_new)
        # If all hosts were paused, a lease may have expired although its holder is alive. A running holder acquires the
        # lease again at once (`EtcdLease._until_it_is_time`), so this host waits. A host that acquired the lease now
        # would consider the holder silent (`LeaderSnapshot.silent`). (`test_a_broken_protocol_is_found_out`.)
        is_early = not found.holder and self._pauses.has_stood_still(self.machine.monotonic())
        if is_free and controller is None and not is_early:
            await self._take(keys, found, snapshot, host)
        elif is_free and controller is not None and controller.store_error is not None:
            # Because of this error, the controller in this process can't acquire its lease again.
            raise controller.store_error.with_traceback(None)
        return None

    def _is_over_for(self, snapshot: LeaderSnapshot, host: HostOfJob) -> tuple[int, str] | None:
        """Return the launcher's exit code and last message if the job no longer needs this host; None if it does."""
        own, codes = self.options.host.name, host.workers.exit_codes()
        has_begun = snapshot.versions.committed is not None or snapshot.end is not None
        if snapshot.job != host.job or not has_begun:
            return 1, f"{PROGRAM}: {self.head_name}, which controlled the job, has failed, so the job has failed"
        if self.departure.is_leaving and own not in snapshot.present and codes == {0}:
            return 0, ""  # this host has left the job, but the controller's message about that has not arrived
        # If the controller that registered this host failed before the snapshot listed this host, this host has no
        # workers yet. Then this host joins the next controller's job as a new host.
        is_new = self.options.joins and not codes and own not in [each.name for each in snapshot.hosts]
        if not is_new and own not in snapshot.present:
            return 1, f"{PROGRAM}: the job goes on without this host"
        return None if snapshot.end is None else (snapshot.end[0], snapshot.end[1] or "")

    async def _take(
        self, keys: LeadershipKeys, found: LeadershipState, snapshot: LeaderSnapshot, host: HostOfJob
    ) -> None:
        """Try to acquire the lease, and start the controller if that succeeds. If several hosts try, one succeeds."""
        options, own = self.options, self.options.host.name
        names = snapshot.present
        if not moves(options) or self.departure.is_leaving or own not in names:
            return  # this host is about to leave, or hasn't joined yet
        if not found.holder:  # hosts try one after another, in the order of the snapshot, so that they rarely collide
            await asyncio.sleep(_LOOK_S * names.index(own) / len(names))
        self._lease = self._lease or LeadershipLease(keys, own, self.lease_s)
        lease, snapshot = self._lease, snapshot.taken_by(own)
        await self.machine.in_thread(lambda: lease.take(found, snapshot.to_json()))
        _log.info("leadership taken: host=%s", own)
        self._lease = None
        term = Term(keys, lease, snapshot, host.secret, self._started_at)
        self.lead(replace(options, hosts=snapshot.hosts_of(options)), term)
