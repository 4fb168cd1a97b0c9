"""A host's part of a job after its registration: workers, memory, and the socket for workers' requests."""

from __future__ import annotations

import signal
from typing import Callable

from ms_kungfu import env
from ms_kungfu.launcher.agent.output import Output
from ms_kungfu.launcher.agent.segments import HostSegments
from ms_kungfu.launcher.agent.supervisor import Supervisor
from ms_kungfu.launcher.agent.transports import Transports
from ms_kungfu.launcher.agent.workers import HostWorkers
from ms_kungfu.launcher.channel import AnyChannel
from ms_kungfu.launcher.core_claims import CoreClaims
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.wire import messages as m

_MAX_LOOK_S = 10.0


class HostOfJob:
    """A host's part of a job, from its first registration to the end.

    It obeys one controller after another. `send` sends a message to the current controller. `secret`: authenticates the
    workers' requests.
    """

    def __init__(
        self, registration: m.Registration, machine: Machine, supervisor: Supervisor, output: Output,
        transports: Transports, channel: AnyChannel, send: Callable[[m.FromHost], None], registered: m.Registered,
        secret: str, claims: CoreClaims,
    ) -> None:  # fmt: skip
        transports.job = self.job = registered.job
        self.secret = secret
        self.segments = HostSegments(
            transports, send, min(registered.look_s, _MAX_LOOK_S), lambda: self.workers.running(),
            lambda: self.workers.cores(), len(registration.cores),
        )  # fmt: skip
        relay = self.relay = machine.make_relay(channel.send, self.segments.open)
        transports.find_store = relay.stores.find
        self._server = machine.serve_broker(relay, bytes.fromhex(secret))
        # The broker's address, and the secret with which the workers authenticate.
        environment = {env.BROKER.name: self._server.address, env.JOB_SECRET.name: secret}
        self.workers = HostWorkers(
            registration.host, machine, supervisor, output, environment, send, claims, self._server.connections,
            self.segments.report_transports, relay.forget_failed, self.segments.new_words,
        )  # fmt: skip
        relay.on_placed = self.workers.placed

    def close(self) -> None:
        # Close the workers before the objects that they depend on: without its inter-host transport, a worker would
        # seem to fail by itself.
        self.workers.close()
        self._server.end()
        self.relay.close()
        self.segments.close()

    def hold_deadlines(self, held: bool) -> None:
        """Hold the deadlines of this host's workers, and of their requests, while `held`."""
        self.segments.hold_deadlines(held)
        self.relay.hold_deadlines(held)

    def checkpoint(self, said: m.Checkpoint) -> None:
        checkpoints = self.relay.last_checkpoints
        if len(checkpoints):
            self.workers.signal(m.Signal(signal.SIGCONT))  # a stopped process must run to write its checkpoint
        checkpoints.begin(said.number)

    # ---- from one controller to the next ----

    def wait_for_a_controller(self) -> None:
        """Hold the workers' deadlines, because only a controller knows what they wait for.

        Workers continue to train if they can.
        """
        self.hold_deadlines(True)
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
        """Change to another controller that has registered this host.

        Send the new controller again the messages that the previous controller may have lost.
        """
        self.segments.forget_what_was_told()
        self.hold_deadlines(False)  # a controller that waits for the store sends a message to hold them
        self.relay.ask_again(channel.send)
        self.workers.tell_what_is_new()
