"""How the controller ends worker processes: it signals them, kills them, and continues without one that doesn't die."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Callable

from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.state.policy import Standing
from ms_kungfu.launcher.state.states import WorkerState

_log = logging.getLogger(__name__)
# All processes have to exit within 2 s of a failure or a signal. The rest of these is for SIGKILL and for reaping.
GRACE_S = 1.0
_UNANSWERED_KILL_S = 10.0


@dataclass(eq=False)
class EndOfWorkers:
    """Part of a `WorkerManager`, in its event loop.

    `here`: the controller's own host. `on_unkillable`: called with a process that SIGKILL didn't end, and why.
    """

    processes: ProcessTable
    agents: Mapping[str, AgentHandle]
    broker: Broker
    machine: Machine
    here: str
    is_over: Callable[[], bool]
    on_unkillable: Callable[[Process, str], None]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def all(self, number: int) -> bool:
        """Send all workers a signal. Return whether there are any."""
        if not len(self.processes):
            return False
        self.broker.end()  # a worker that asks to leave because of the signal may leave
        for agent in self.agents.values():
            agent.signal(number)
            agent.signal(signal.SIGCONT)  # a stopped process has to run to exit
        return True

    def all_on(self, host: str, reason: str) -> None:
        """Kill the workers in the cluster, which is a failure like any other; dismiss the removed ones."""
        for process in self.processes:
            if process.host != host or process.is_ending:
                continue
            if self.processes.standing(process) is Standing.LEAVING:
                _log.warning('worker dismissed: %s reason="it has left the cluster, and %s"', process.who, reason)
                self.dismiss(process)
            else:
                self.kill(process, f"{reason} and was killed")

    def kill(self, process: Process, reason: str) -> None:
        """Its exit follows as an event like any other, or the job continues without it."""
        process.to(WorkerState.KILLED)
        process.killed_because = reason
        self._signal(signal.SIGKILL, process)
        self._loop.call_later(_UNANSWERED_KILL_S, self._give_up_on, process)

    def _give_up_on(self, process: Process) -> None:
        """SIGKILL had no effect: the process hangs in the kernel, its cgroup is frozen, or it gets no core.

        The signal stays pending: if the process runs again it exits before its next instruction. To the other workers
        it has failed: it can't publish anything any more (docs/recovery.md), and no broker answers it.
        """
        if process.state is WorkerState.EXITED or self.is_over():
            return
        process.to(WorkerState.UNKILLABLE)
        why = "hangs in the kernel, or gets no core"
        if process.host == self.here and process.pid is not None:
            why = "gets no core to end on" if self.machine.waits_for_a_core(process.pid) else "hangs in the kernel"
        process.killed_because += f", but {why}: SIGKILL has had no effect for {_UNANSWERED_KILL_S:g} s"
        self.on_unkillable(process, process.killed_because)

    def tell_again(self, peers: Collection[PeerID]) -> None:
        """Kill members that got a SIGTERM and were allowed to leave, and can't because of later failures."""
        told = self.broker.leaves.told_to_end
        for process in self.processes.of_standing(Standing.MEMBER):
            if process.peer in peers and process.peer in told and not process.told_again:
                process.told_again = True
                _log.warning(
                    'worker dismissed: %s reason="it got SIGTERM, and no other worker is left to go on"', process.who
                )
                self._signal(signal.SIGTERM, process)

    def dismiss(self, process: Process) -> None:
        process.to(WorkerState.DISMISSED)
        self._signal(signal.SIGTERM, process)
        self._signal(signal.SIGCONT, process)
        self._loop.call_later(GRACE_S, self._signal, signal.SIGKILL, process)

    def dismiss_unneeded(self, joining: Collection[Process]) -> None:
        """Dismiss those of the `joining` processes that a newer version doesn't need."""
        for process in joining:
            if self.processes.standing(process) is Standing.LEAVING and not process.is_ending:
                _log.info('worker dismissed: %s reason="not needed any more"', process.who)
                self.dismiss(process)

    def clear_slots(self) -> None:
        """Dismiss removed workers that still run if another worker needs their port or device."""
        for process in self.processes.in_the_way():
            _log.warning('worker dismissed: %s reason="it has left the cluster, and its slot is needed"', process.who)
            self.dismiss(process)

    def _signal(self, number: int, process: Process) -> None:
        self.agents[process.host].signal(number, process.key)
