"""Find out which hosts of a job haven't registered yet, and why.

The controller waits for the missing hosts, and asks their launchers what they are doing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Collection, Mapping
from typing import Callable, Protocol

from ms_kungfu._decoding import ProtocolError
from ms_kungfu.launcher.channel import AnyChannel
from ms_kungfu.launcher.control import call_once, reason_of, remedy_for
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import PROGRAM, Options
from ms_kungfu.launcher.state.hosts import Host
from ms_kungfu.launcher.state.start_error import StartError
from ms_kungfu.launcher.wire import messages as m
from ms_kungfu.launcher.within import within

_log = logging.getLogger(__name__)
_FIRST_WORDS_S = 10.0
# If a host hasn't registered within _PATIENCE_S, the controller asks the host every _ASK_S what it is doing.
_PATIENCE_S = 3.0
_ASK_S = 10.0
_TELL_SILENCE_S = 5.0  # before this time, silence is normal, because hosts are started one after the other
_CALLS_IN_VAIN_S = 4.0
# Time for an earlier controller that has lost its lease, but may still be running, to find this controller and to
# register.
_ONCE_MORE_S = 0.3


class Registered(Protocol):
    """A host that has registered."""

    @property
    def is_confirmed(self) -> bool:
        """Return whether the host has sent a message since it registered."""
        ...


class HostGathering:
    """The hosts that have to register with the controller.

    `registered`: the hosts that have registered. `resumes`: whether this controller continues a running job, whose
    hosts register with it.
    """

    def __init__(self, options: Options, machine: Machine, registered: Mapping[str, Registered], resumes: bool) -> None:
        self.options, self.machine, self._registered = options, machine, registered
        self.name = options.hosts.self_name
        self.is_closed = not resumes  # whether the hosts of a running job can no longer register
        self.news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._secret = bytes.fromhex(options.secret or "")
        self._deadline: float | None = None
        self._rejected: dict[str, str] = {}  # missing host -> why it can't take part
        self._silent: dict[str, str] = {}  # missing host -> why it doesn't answer
        self._other_head_node = ""  # the error message if another host considers itself the head node

    async def gather(self, timeout_s: float) -> None:
        """Wait until all hosts have registered. Raise StartError if a host doesn't register within `timeout_s`."""
        deadline = self._deadline = self._loop.time() + timeout_s
        asking = asyncio.ensure_future(self._ask_who_is_missing())
        logged: tuple[str, ...] = ()
        try:
            while missing := self.missing():
                others = self.missing_others()
                if others and others != logged:
                    logged = others
                    _log.info(
                        "waiting for hosts: hosts=%s KUNGFU_JOIN_TIMEOUT=%.0f",
                        ",".join(others), max(0.0, deadline - self._loop.time()),
                    )  # fmt: skip
                self.news.clear()
                if self._other_head_node:
                    raise StartError(self._other_head_node)
                try:
                    await within(max(0.0, deadline - self._loop.time()), self.news.wait())
                except asyncio.TimeoutError:
                    raise StartError(
                        f"no message came from {', '.join(missing)} within {timeout_s:g} s (KUNGFU_JOIN_TIMEOUT); "
                        f"check that {PROGRAM} is running there with the same flags.{self.why_missing()}"
                    ) from None
        finally:
            self._deadline = None
            asking.cancel()

    async def gather_again(
        self, timeout_s: float, silent: Collection[str], time_to_ask: Callable[[], Awaitable[float]]
    ) -> None:
        """Wait until each host of a running job has registered with this controller, or is no longer expected to.

        Hosts of earlier controllers that lost the lease (`silent`) have already been silent for long enough, so this
        controller waits for them only a moment. Each other host has to register before `time_to_ask` reaches
        `timeout_s`. By then, the host has been able to find this controller for `timeout_s`.

        A registered host counts only when it is confirmed. While this controller is paused, a host may register,
        leave, and register again before this controller reads the first registration.
        (`test_registered_host_is_awaited_until_it_is_confirmed`.)
        """
        begun = self._loop.time()
        while missing := self._missing_or_unconfirmed():
            if set(missing) <= set(silent):
                left_s = begun - self._loop.time() + _ONCE_MORE_S
            else:
                left_s = timeout_s / 8 if await time_to_ask() < timeout_s else 0.0
            if left_s < 0.001:  # less than the resolution of a clock
                break
            self.news.clear()
            if missing != self._missing_or_unconfirmed():
                continue
            with contextlib.suppress(asyncio.TimeoutError):
                await within(left_s, self.news.wait())
        self.is_closed = True

    def missing(self) -> tuple[str, ...]:
        """Return the hosts of the job that haven't registered."""
        hosts = self.options.hosts
        return tuple(n for n in hosts.names if n not in self._registered and n not in hosts.lost)

    def _missing_or_unconfirmed(self) -> tuple[str, ...]:
        unconfirmed = (name for name, host in self._registered.items() if not host.is_confirmed)
        return (*self.missing(), *unconfirmed)

    def missing_others(self) -> tuple[str, ...]:
        """Return the missing hosts without the controller's own host, which registers at once."""
        return tuple(name for name in self.missing() if name != self.name)

    def why_missing(self) -> str:
        """Return what is known about the missing hosts, as text to append to a message that names them."""
        port = self.options.control_port
        # If a host has answered before, its last answer explains more than its silence after that answer.
        silent = {name: f"no answer from {name}:{port}: {why}" for name, why in self._silent.items()}
        last = {**silent, **self._rejected}
        return "".join(f" Last result for {name}: {last[name]}" for name in self.missing() if name in last)

    def then(self) -> str:
        """Return which hosts can still register after one was rejected, and for how long, as text for a log line."""
        if self._deadline is None:
            return ""
        left_s = max(0.0, self._deadline - self._loop.time())
        return f"; {', '.join(self.missing())} can still register within {left_s:.0f} s (KUNGFU_JOIN_TIMEOUT)"

    # If -H has a different order on each host, each host considers itself the head node, so no host calls another. It
    # is also possible that a firewall on this host blocks incoming calls but not outgoing calls. So the controller
    # calls each missing host, and sends its own name.

    async def _ask_who_is_missing(self) -> None:
        logged: set[tuple[str, str]] = set()
        may_tell = self._loop.time() + _TELL_SILENCE_S
        await asyncio.sleep(_PATIENCE_S)
        while True:
            await asyncio.gather(*(self._ask(self.options.hosts.named(name)) for name in self.missing()))
            await asyncio.sleep(max(0.0, may_tell - self._loop.time()))
            self._tell_of_silence(logged)
            await asyncio.sleep(_ASK_S)

    def _tell_of_silence(self, logged: set[tuple[str, str]]) -> None:
        """Log which hosts don't answer, once per host and reason.

        Hosts with the same reason share a line, because there may be many hosts.
        """
        port, by_reason = self.options.control_port, dict[str, list[str]]()
        for name in self.missing():
            why = self._silent.get(name)
            if why is not None and name not in self._rejected and (name, why) not in logged:
                logged.add((name, why))
                by_reason.setdefault(why, []).append(f"{name}:{port}")
        for why, places in by_reason.items():
            _log.warning('no answer: hosts=%s reason="%s". Remedy: %s', ",".join(places), why, remedy_for(why, port))

    async def _ask(self, host: Host) -> None:
        options, why = self.options, ""
        try:
            channel = await call_once(
                self.machine, options.hosts.own.address, host.address, options.control_port, self._secret
            )
            try:
                channel.send(m.WaitingController(self.name, str(options.hosts)))
                answer = await within(_FIRST_WORDS_S, channel.receive(m.CALLS))
            finally:
                channel.close()
            self._silent.pop(host.name, None)
            if answer.waits:
                self._meet_another_head_node(host.name, answer.hosts)
            elif answer.in_a_job:
                why = (
                    f"{host.name} takes part in another job, controlled by {answer.calls}; give each job "
                    "on the host its own -port"
                )
            elif answer.calls != self.name:
                why = (
                    f"{PROGRAM} on {host.name} has -H {answer.hosts} and calls {answer.calls}; this host "
                    f"has -H {options.hosts}. Give the same -H, in the same order, on all hosts"
                )
            elif answer.for_s > _CALLS_IN_VAIN_S:
                why = (
                    f"{host.name} calls {self.name}:{options.control_port} but can't connect; is that port "
                    "open on this host?"
                )
        except ProtocolError as error:
            self._silent.pop(host.name, None)
            why = f"{host.name}:{options.control_port} answers, but not for this job: {error}"
        except (OSError, asyncio.TimeoutError) as error:
            self._silent[host.name] = reason_of(error)
            return
        except Exception as error:  # such as a TLS error
            why = f"{host.name}:{options.control_port} gave an invalid answer: {error!r}"
        if why and self._rejected.get(host.name) != why:
            self._rejected[host.name] = why
            _log.warning('host rejected: host=%s reason="%s"', host.name, why)

    def _meet_another_head_node(self, name: str, hosts: str) -> None:
        own = self.options.hosts
        if name in own.names:
            self._other_head_node = (
                f"{name} waits as the head node, too: give the same -H, in the same order, on all hosts, and the same "
                f"-config-server ({self.name} has -H {own}, {name} has -H {hosts})"
            )
            self.news.set()

    async def answer_a_controller(self, channel: AnyChannel, asking: m.WaitingController) -> None:
        waits = self._deadline is not None and asking.host in self.options.hosts.names
        channel.send(m.Calls(str(self.options.hosts), self.name, waits=waits, in_a_job=not waits))
        await channel.flushed()
        if waits:
            self._meet_another_head_node(asking.host, asking.hosts)

    def reject(self, host: str, why: str) -> None:
        self._rejected[host] = why
        _log.warning('host rejected: host=%s reason="%s"%s', host, why, self.then())
