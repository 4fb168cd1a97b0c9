"""The controller ends workers that hang, that can't continue, or that keep other ranks waiting for too long."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Callable

from ms_kungfu import env
from ms_kungfu import job_events as e
from ms_kungfu.cluster import PeerID
from ms_kungfu.launcher.controller.agents import AgentHandle
from ms_kungfu.launcher.controller.broker import Broker
from ms_kungfu.launcher.controller.ending import EndOfWorkers
from ms_kungfu.launcher.controller.processes import Process, ProcessTable
from ms_kungfu.launcher.machine import Machine
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state.hangs import HangWatch
from ms_kungfu.launcher.state.policy import Recover
from ms_kungfu.launcher.state.stalls import StallWatch
from ms_kungfu.launcher.state.states import WorkerState
from ms_kungfu.launcher.state.stuck import StuckWatch, stuck_reason, stuck_sure_s

_log = logging.getLogger(__name__)
_STACK_S = 1.0  # time for a worker to write its stack
_FAILING_S = 10.0  # time for a failing worker to exit


@dataclass(eq=False)
class HangingWorkers:
    """The part of a `WorkerManager` that finds and ends hanging workers. It runs in the manager's event loop.

    `join_timeout_s`: how long workers wait for a joining worker.
    """

    options: Options
    machine: Machine
    broker: Broker
    processes: ProcessTable
    agents: Mapping[str, AgentHandle]
    ending: EndOfWorkers
    join_timeout_s: float
    is_over: Callable[[], bool]
    emit: Callable[[e.Event], None]

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopped: dict[str, set[int]] = {}  # host -> keys of the processes that a signal has stopped
        sure_s = stuck_sure_s(env.COLLECTIVE_TIMEOUT.get(self.machine.environ))
        self._stuck_watch: StuckWatch[tuple[PeerID, int]] = StuckWatch(sure_s)
        self._stuck_look_s = sure_s / 2
        self._stall_watch: StallWatch[tuple[PeerID, int]] = StallWatch()

    def look_at(
        self, host: str, watch: HangWatch, now: float, stopped: Collection[int], is_starved: Callable[[int], bool]
    ) -> None:
        """Examine the heartbeats that a host has reported. `now`: the time of the heartbeats by that host's own clock.

        While a host sends no reports, none of its workers counts as hanging.
        """
        if self.is_over():
            return
        self._stopped[host] = set(stopped)
        watched = {p.key: p for p in self.processes if p.host == host and not p.is_ending}
        beats = {key: self._heartbeat(process) for key, process in watched.items()}
        stopped_early = [key for key in stopped if key in watched and not beats[key]]
        for key in watch.hung(now, beats, stopped_early, is_starved):
            reason = f"hung for {self.options.peer_timeout_s:g} s (-peer-timeout) and was killed"
            self.ending.kill(watched[key], reason)
        for process in watched.values():
            self._look_whether_it_fails(process)

    def is_stopped(self, process: Process) -> bool:
        """Return whether a signal has stopped the process, according to its host's last report."""
        return process.key in self._stopped.get(process.host, ())

    def _heartbeat(self, process: Process) -> tuple[int, ...]:
        return () if process.peer is None else self.broker.facts.heartbeat(process.peer, process.incarnation)

    def _look_whether_it_fails(self, process: Process) -> None:
        """End a worker that can't continue because a collective or a join was interrupted (for example, by Ctrl-C).

        The worker can't take part in collectives any more, whatever its program does. The other workers wait for its
        exit (docs/recovery.md).
        """
        if process.gave_up or process.state not in (WorkerState.RUNNING, WorkerState.STUCK) or process.peer is None:
            return
        reason = self.broker.facts.gave_up(process.peer, process.incarnation)
        if reason:
            process.gave_up = True
            if process.state is WorkerState.RUNNING:  # a stuck worker stays stuck while others wait for it
                process.to(WorkerState.FAILING)
            _log.warning('worker failing: %s reason="%s". The others wait for its exit', process.who, reason)
            self._loop.call_later(_FAILING_S, self._end_failing, process, reason)

    def _end_failing(self, process: Process, reason: str) -> None:
        if not process.is_ending and not self.is_over():
            why = f"could not go on ({reason}), had not exited after {_FAILING_S:g} s, and was killed"
            self.ending.kill(process, why)

    # ---- stuck workers ----

    def keep_looking_for_the_stuck(self) -> None:
        """Examine the last reports of all hosts together at regular intervals.

        A separate examination for each host's report would take time that is quadratic in the number of hosts.
        """
        if not self.is_over():
            self._look_for_the_stuck()
            self._look_for_stalls()
            self._loop.call_later(self._stuck_look_s, self.keep_looking_for_the_stuck)

    def _look_for_the_stuck(self) -> None:
        """Make a live worker log its Python stack if it doesn't reach the collective in which other workers wait.

        With -recover, the controller ends this worker before the waiting workers time out. Without -recover, the
        waiting workers raise CollectiveTimeoutError, and their exit ends the job.
        """
        found = self._stuck()
        if self.options.recover is Recover.FAIL:  # with -recover, `_end_stuck` calls `_note_unstuck`
            for process in self.processes:
                if process.state is WorkerState.STUCK and (process.peer, process.incarnation) not in found:
                    self._note_unstuck(process)
        for peer, incarnation in self._stuck_watch.look(self._loop.time(), found):
            for process in self.processes:
                is_it = (process.peer, process.incarnation) == (peer, incarnation)
                if is_it and process.state in (WorkerState.RUNNING, WorkerState.FAILING):
                    self._note_stuck(process, peer, found[peer, incarnation])

    def _look_for_stalls(self) -> None:
        """Emit an event when a worker has kept others waiting for a long time, and when this wait ends."""
        facts, processes = self.broker.facts, {(p.peer, p.incarnation): p for p in self.processes if p.peer is not None}
        found = self.waited_for(processes)
        told = {each: facts.progress(*each) for each in found}
        now = self._loop.time()
        began, ended = self._stall_watch.look(now, found, {each: step and step[0] for each, step in told.items()})
        for each, stall in began.items():
            process = processes[each]
            reason = "stopped by a signal" if self.is_stopped(process) else ""
            who: dict[str, Any] = {"host": process.host, "rank": process.rank, "step": stall.step}
            stall.rank = process.rank
            self.emit(
                e.StallBegan(**who, waiting=list(stall.waiting), seconds=round(now - stall.since, 3), reason=reason)
            )
        for stall in ended.values():
            self.emit(e.StallEnded(rank=stall.rank, step=stall.step, seconds=round(now - stall.since, 3)))

    def waited_for(self, processes: Mapping[tuple[PeerID, int], Process]) -> dict[tuple[PeerID, int], list[int]]:
        """Return the live `processes` that currently keep others waiting, each with the ranks that wait for it."""
        stopped = {each for each, process in processes.items() if self.is_stopped(process)}
        return self.broker.facts.waited_for(list(processes), stopped)

    def _note_stuck(self, process: Process, peer: PeerID, awaited_by: Collection[int]) -> None:
        process.to(WorkerState.STUCK)
        ends = self.options.recover is not Recover.FAIL
        variable, limit_s = self._limit_of_waits_for(process)
        self.agents[process.host].ask_for_stack(process.key)
        _log.warning(
            "stuck worker: %s awaited_by=%s %s=%s stack=requested action=%s", process.who,
            ",".join(f"rank {rank}" for rank in awaited_by), variable, f"{limit_s:g}", "end it" if ends else "none",
        )  # fmt: skip
        if ends:
            self.broker.facts.set_ending(peer, process.incarnation, True)
            self._loop.call_later(_STACK_S, self._end_stuck, process, peer)

    def _stuck(self) -> dict[tuple[PeerID, int], list[int]]:
        unkillable = WorkerState.UNKILLABLE
        alive = [(p.peer, p.incarnation) for p in self.processes if p.peer is not None and p.state is not unkillable]
        return self.broker.facts.stuck(alive)

    def _end_stuck(self, process: Process, peer: PeerID) -> None:
        """End a stuck worker whose stack has been written, unless the worker has reached the collective since."""
        if process.is_ending or self.is_over():
            return
        waiting = self._stuck().get((peer, process.incarnation))
        if waiting:
            self.ending.kill(process, stuck_reason(waiting, *self._limit_of_waits_for(process)))
        else:
            self.broker.facts.set_ending(peer, process.incarnation, False)
            self._note_unstuck(process)

    def _limit_of_waits_for(self, process: Process) -> tuple[str, float]:
        """Return the variable that limits how long others wait for this worker, and its value in seconds."""
        if process.peer is not None and not self.broker.is_ready(process.peer, process.incarnation):
            return env.JOIN_TIMEOUT.name, self.join_timeout_s
        return env.COLLECTIVE_TIMEOUT.name, env.COLLECTIVE_TIMEOUT.get(self.machine.environ)

    def _note_unstuck(self, process: Process) -> None:
        """Record that the worker has reached the collective, or that the other workers no longer wait for it."""
        if process.state is WorkerState.STUCK:  # by now the worker may be removed
            process.to(WorkerState.FAILING if process.gave_up else WorkerState.RUNNING)
        _log.info("stuck worker: no rank waits for %s any more", process.who)
