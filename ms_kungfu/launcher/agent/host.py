"""A host's part of a job after its registration: workers, memory, and the socket for their requests."""

from __future__ import annotations

import logging
import signal
from typing import Any, Callable

from ms_kungfu.launcher.agent.links import LinkMaker
from ms_kungfu.launcher.agent.output import Output
from ms_kungfu.launcher.agent.segments import OF_A_VERSION, HostSegments
from ms_kungfu.launcher.agent.starter import Starter, told_of_the_host
from ms_kungfu.launcher.agent.supervisor import Supervisor
from ms_kungfu.launcher.agent.workers import HostWorkers
from ms_kungfu.launcher.channel import AnyChannel
from ms_kungfu.launcher.core_claims import CoreClaims
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.wire import messages as m

_log = logging.getLogger(__name__)
_MAX_LOOK_S = 10.0


class HostOfJob:
    """A host's part of a job, from its first registration to the end.

    It obeys one controller after the other; `send` brings a message to the present one. `secret`: of the workers'
    requests.
    """

    def __init__(
        self, name: str, machine: Machine, supervisor: Supervisor, output: Output, links: LinkMaker,
        channel: AnyChannel, send: Callable[[m.FromHost], None], registered: m.Registered, secret: str,
        claims: CoreClaims,
    ) -> None:  # fmt: skip
        links.job = self.job = registered.job
        self.secret = secret
        self._output = output
        relay = self.relay = machine.make_relay(channel.send)
        links.find_store = relay.stores.find
        self._server = machine.serve_broker(relay, bytes.fromhex(secret))
        starter = Starter(
            name, machine, supervisor, output, told_of_the_host(self._server.address, secret),
            unheard=lambda: self.workers.alive() - self._server.connections(),
        )  # fmt: skip
        self.segments = HostSegments(
            machine, links, relay, send, min(registered.look_s, _MAX_LOOK_S), lambda: self.workers.running(),
            lambda: self.workers.cores(),
        )  # fmt: skip
        self.workers = HostWorkers(
            machine, supervisor, starter, send, claims, self.segments.tell_of_links, relay.forget_failed,
            self.segments.new_words,
        )  # fmt: skip

    def close(self) -> None:
        self.segments.close()
        # Before what they depend on: without its inter-host transport a worker fails as if by its program.
        self.workers.close()
        self._server.end()
        self.relay.close()

    def obey(self, said: Any) -> None:
        if type(said) in OF_A_VERSION:
            self.segments.obey(said)
        else:
            OBEYED[type(said)](self, said)

    def _checkpoint(self, said: m.Checkpoint) -> None:
        checkpoints = self.relay.last_checkpoints
        if len(checkpoints):
            self.workers.signal(m.Signal(signal.SIGCONT))  # a stopped process has to run to its checkpoint
        checkpoints.begin(said.number)

    # ---- from one controller to the next ----

    def wait_for_a_controller(self) -> None:
        """Hold the workers' deadlines: only a controller knows what they wait for. They train on as far as they can."""
        self.relay.hold_deadlines(True)
        self.segments.cancel_making()

    def report(self) -> m.ResyncReport:
        relay = self.relay
        return m.ResyncReport(
            self.workers.report(),
            self.segments.losses(),
            relay.leaving(),
            [(str(peer), incarnation) for peer, incarnation in relay.slot_holders()],
            relay.cores,
            self.workers.cpu_isa,
        )

    def go_over_to(self, channel: AnyChannel) -> None:
        """Change to another controller that has registered this host, and send it what the one before may lack."""
        self.segments.forget_what_was_told()
        self.relay.hold_deadlines(False)  # a controller that waits for the store sends a message for that
        self.relay.ask_again(channel.send)
        self.workers.tell_what_is_new()


OBEYED: dict[type, Callable[[HostOfJob, Any], None]] = {
    m.Answer: lambda host, said: host.relay.answer(said.number, said.message),
    m.Hold: lambda host, said: host.relay.hold_deadlines(said.held),
    m.Launch: lambda host, said: host.workers.start(said),
    m.Signal: lambda host, said: host.workers.signal(said),
    m.Checkpoint: HostOfJob._checkpoint,
    m.Pin: lambda host, said: host.workers.pin(said),
    m.Stack: lambda host, said: host.workers.ask_for_stack(said),
    m.Assign: lambda host, said: host._output.release(host.workers.assign(said)),
    m.Make: lambda host, said: host.segments.make(said),
    m.Close: lambda host, said: host.segments.drop(said.version),
}
