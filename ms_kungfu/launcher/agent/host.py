"""Manage a registered host's part of a job: workers, shared memory, and the socket for the workers' requests."""

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
    """A host's part of a job, from the host's first registration until the job ends on the host.

    If a controller fails, the host obeys the next controller.

    Args:
        registration: what this host reports when it registers.
        machine: the machine.
        supervisor: the supervisor of the workers.
        output: the workers' output.
        transports: the inter-host transports of this host.
        channel: the connection to the first controller.
        send: sends a message to the current controller.
        registered: the controller's answer to the registration.
        secret: authenticates the workers' requests.
        claims: the cores that the job has claimed on this host.
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
        # The workers find the broker by its address, and authenticate with the secret.
        environment = {env.BROKER.name: self._server.address, env.JOB_SECRET.name: secret}
        self.workers = HostWorkers(
            registration.host, machine, supervisor, output, environment, registration.device_kind is not None, send,
            claims, self._server.connections, self.segments.report_transports, relay.forget_failed,
            self.segments.new_words,
        )  # fmt: skip
        relay.on_placed = self.workers.placed

    def close(self) -> None:
        # Close the workers first. If the inter-host transport were closed before, workers would fail, and the failures
        # would look like errors of the workers.
        self.workers.close()
        self._server.end()
        self.relay.close()
        self.segments.close()

    def hold_deadlines(self, held: bool) -> None:
        """Suspend (`held`) or resume the deadlines of this host's workers and of their requests."""
        self.segments.hold_deadlines(held)
        self.relay.hold_deadlines(held)

    def checkpoint(self, said: m.Checkpoint) -> None:
        checkpoints = self.relay.last_checkpoints
        if len(checkpoints):
            self.workers.signal(m.Signal(signal.SIGCONT))  # a stopped process must run to write its checkpoint
        checkpoints.begin(said.number)

    # ---- from one controller to the next ----

    def wait_for_a_controller(self) -> None:
        """Suspend the workers' deadlines, because only a controller knows what the workers wait for.

        Workers continue training if they can.
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
        """From now on, obey another controller, which has registered this host.

        Repeat the messages that the previous controller might not have received or processed.
        """
        self.segments.forget_what_was_told()
        self.hold_deadlines(False)  # if the new controller waits for the store, it suspends them again
        self.relay.ask_again(channel.send)
        self.workers.tell_what_is_new()
