"""How the controller ends workers: it signals and kills them, and continues without a worker that survives SIGKILL."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Collection, Coroutine, Mapping
from dataclasses import dataclass
from typing import Callable

from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.state.policy import Standing, signal_name
from ms_kungfu.launcher.state.states import WorkerState

_log = logging.getLogger(__name__)
# All processes must exit within 2 s of a failure. GRACE_S of these 2 s is for SIGTERM, and the rest is for SIGKILL and
# for reaping.
GRACE_S = 1.0
_UNANSWERED_KILL_S = 10.0


@dataclass(eq=False)
class EndOfWorkers:
    """The part of a `WorkerManager` that ends worker processes. It runs in the manager's event loop.

    `here`: the controller's own host. `on_unkillable` is called with a process that SIGKILL didn't end, and with the
    reason. `checkpoint` makes each worker that uses checkpoints write a checkpoint, and returns when all are written.
    """

    processes: ProcessTable
    agents: Mapping[str, AgentHandle]
    broker: Broker
    machine: Machine
    here: str
    is_over: Callable[[], bool]
    on_unkillable: Callable[[Process, str], None]
    grace_period_s: float
    checkpoint: Callable[[int], Coroutine[None, None, None]]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def end_all(self, interrupted_by: int | None, hurry: asyncio.Event) -> None:
        """End all workers. Return when no worker is left, or when it is time to kill the remaining workers.

        If a launcher got the signal `interrupted_by`, the workers have `-grace-period` to exit. First, each worker that
        uses checkpoints writes a checkpoint. Then all workers get the signal, at the latest one second before the grace
        period ends. When `hurry` is set, stop waiting and return.
        """
        if not len(self.processes):
            return
        number, until = signal.SIGTERM if interrupted_by is None else interrupted_by, self._loop.time() + GRACE_S
        if interrupted_by is not None:
            until = self._loop.time() + self.grace_period_s
            _log.info(
                "workers ending: signal=%s workers=%d limit_s=%g. A second signal ends them at once (-grace-period)",
                signal_name(number), len(self.processes), self.grace_period_s,
            )  # fmt: skip
            await self._wait(self.checkpoint(number), until - GRACE_S, hurry)
        # From now on, the broker lets no worker leave, not even a worker that asks to leave because of the signal.
        self.broker.end()
        for agent in self.agents.values():
            agent.signal(number)
            agent.signal(signal.SIGCONT)  # a stopped process must run to exit
        await self._wait(self.processes.emptied.wait(), until, hurry)

    async def _wait(self, event: Coroutine[None, None, object], until: float, hurry: asyncio.Event) -> None:
        """Wait until `event` occurs, no process is left, `hurry` is set, or the time `until` is reached."""
        waits = [asyncio.ensure_future(each) for each in (event, self.processes.emptied.wait(), hurry.wait())]
        await asyncio.wait(waits, timeout=max(0.0, until - self._loop.time()), return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def all_on(self, host: str, reason: str) -> None:
        """End all workers of a host.

        Kill the host's workers that are in the cluster, which counts as a failure. Send SIGTERM to the host's workers
        that have left the cluster (`dismiss`).
        """
        for process in self.processes:
            if process.host != host or process.is_ending:
                continue
            if self.processes.standing(process) is Standing.LEAVING:
                _log.warning('worker dismissed: %s reason="it has left the cluster, and %s"', process.who, reason)
                self.dismiss(process)
            else:
                self.kill(process, f"{reason} and was killed")

    def kill(self, process: Process, reason: str) -> None:
        """Kill a process. If its agent reports no exit within a few seconds, the job continues without the process."""
        process.to(WorkerState.KILLED)
        process.killed_because = reason
        self._signal(signal.SIGKILL, process)
        self._loop.call_later(_UNANSWERED_KILL_S, self._give_up_on, process)

    def _give_up_on(self, process: Process) -> None:
        """Continue without a process that SIGKILL didn't end.

        The process hangs in the kernel, is in a frozen cgroup, or gets no core. SIGKILL stays pending: if the process
        runs again, it exits before its next instruction. The other workers treat the process as failed, because the
        process can't publish anything any more (docs/recovery.md), and no broker answers its requests.
        """
        if process.state is WorkerState.EXITED or self.is_over():
            return
        process.to(WorkerState.UNKILLABLE)
        why = "hangs in the kernel, or gets no core"
        if process.host == self.here and process.pid is not None:
            why = (
                "gets no core on which it could end"
                if self.machine.waits_for_a_core(process.pid)
                else "hangs in the kernel"
            )
        process.killed_because += f", but {why}: SIGKILL has had no effect for {_UNANSWERED_KILL_S:g} s"
        self.on_unkillable(process, process.killed_because)

    def tell_again(self, peers: Collection[PeerID]) -> None:
        """Send SIGTERM again to members that had permission to leave, but can't leave now because others failed."""
        told_to_end = self.broker.leaves.told_to_end
        for process in self.processes.of_standing(Standing.MEMBER):
            if process.peer in peers and process.peer in told_to_end and not process.told_again:
                process.told_again = True
                _log.warning(
                    'worker dismissed: %s reason="it got SIGTERM, and no other worker remains that could go on"',
                    process.who,
                )
                self._signal(signal.SIGTERM, process)

    def dismiss(self, process: Process) -> None:
        """End a process that is no longer needed: send SIGTERM, and SIGKILL a few seconds later."""
        process.to(WorkerState.DISMISSED)
        self._signal(signal.SIGTERM, process)
        self._signal(signal.SIGCONT, process)
        self._loop.call_later(GRACE_S, self._signal, signal.SIGKILL, process)

    def dismiss_unneeded(self, joining: Collection[Process]) -> None:
        """Dismiss each process in `joining` that a newer cluster version doesn't contain."""
        for process in joining:
            if self.processes.standing(process) is Standing.LEAVING and not process.is_ending:
                _log.info('worker dismissed: %s reason="not needed any more"', process.who)
                self.dismiss(process)

    def clear_slots(self) -> None:
        """Dismiss workers that still run after they left the cluster, if another worker needs their port or device."""
        for process in self.processes.in_the_way():
            _log.warning('worker dismissed: %s reason="it has left the cluster, and its slot is needed"', process.who)
            self.dismiss(process)

    def _signal(self, number: int, process: Process) -> None:
        self.agents[process.host].signal(number, process.key)
