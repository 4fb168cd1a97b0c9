"""Make the decisions about a job as a whole, with reasons. Decisions depend only on the hosts' reports.

Two other modules contribute. `policy` decides how the job reacts to an event. `versions` decides which processes
adopt which cluster version, and when.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from ms_kungfu.cluster import Cluster, PeerID
from ms_kungfu.launcher.options import Options
from ms_kungfu.launcher.state import policy
from ms_kungfu.launcher.state.policy import Headcount, Situation, Verdict, WorkerExited, WorkerWorksOn
from ms_kungfu.launcher.wire.documents import Failure

_RESTART_WINDOW_S = 300.0


class Coordinator:
    """Keep the desired cluster, the failures so far, and the slots that need a new worker.

    Times are in seconds, by the caller's clock.
    """

    def __init__(self, options: Options, first: Cluster) -> None:
        self._options = options
        self.hosts = options.hosts  # this includes hosts that have failed or left, with their states
        self.newest = first  # the newest version that the job can run
        self.last_version = first.version  # the newest version in the store, even if the job can't run it
        self.finishing = False  # whether a member has finished its program
        self.leaving: set[PeerID] = set()  # members that have permission to leave
        self.vacant: list[int] = []  # slots that need a new worker
        self.pausing: list[int] = []  # slots that get a new worker after the present pause
        self._filled: dict[int, list[float]] = {}  # slot -> times at which a replacement worker got the slot
        self._late: dict[int, int] = {}  # slot -> how many successive joining workers missed the join timeout
        self._state = Situation(recover=options.recover, min_size=options.min_size, max_restarts=options.max_restarts)

    def decide(self, event: WorkerExited | WorkerWorksOn, count: Headcount) -> Verdict:
        """Return how the job reacts to `event`."""
        return policy.decide(event, replace(self._state, **vars(count), finished=self.finishing))

    def resume_losses(self, lost: Sequence[PeerID]) -> None:
        """Record the members of the committed cluster that were on lost hosts, before this controller handles any exit.

        No agent can report that these members have exited. Without this record, the exit of a worker that has left the
        cluster could end the job as if all members had finished.
        """
        if lost:
            lost_worker = f"worker {lost[0]} was on host {lost[0].host}, which was lost"
            self._state.first_failure = self._state.first_failure or Failure(lost_worker, 1, is_of_launcher=True)

    def takes_over(self, lost: Sequence[PeerID], count: Headcount) -> Verdict | None:
        """Return how the job ends if no member is left when a controller takes over; None if a member is left.

        `lost`: the members that `resume_losses` has recorded.
        """
        state = replace(self._state, **vars(count), finished=self.finishing and not lost)
        return policy.after_end("", state)

    # ---- failures and departures ----

    def member_finished(self, who: str) -> None:
        self._state.first_to_finish = self._state.first_to_finish or who

    def member_failed(self, exited: WorkerExited) -> bool:
        """Record a failure. Return whether this is the first failure that a worker's program caused.

        If it is, the job ends with the exit code of that program even if all other workers finish.
        """
        code, error, logs = exited.code, exited.error, exited.logs
        reason = f"{exited.who} {error or policy.how_it_ended(code)}"
        failure = Failure(reason, policy.exit_code_of(code), bool(error), exited.key)
        self._state.first_failure = self._state.first_failure or failure
        # `error` is set if the worker was killed or couldn't be started. In both cases, its program didn't fail.
        if error or not policy.fails_by_itself(code) or self._state.program_failure is not None:
            return False
        named = f", see {logs}" if logs else ""
        self._state.program_failure = Failure(f"{failure.reason}{named}", failure.exit_code, key=exited.key)
        return True

    @property
    def failures(self) -> tuple[Failure | None, Failure | None]:
        """Return the first failure that the job survived, and the first failure that a worker's program caused."""
        return self._state.first_failure, self._state.program_failure

    def resume_failures(self, first: Failure | None, programs: Failure | None) -> None:
        self._state.first_failure, self._state.program_failure = first, programs

    # ---- slots ----

    def restarts_of(self, slot: int, now: float) -> int:
        """Return how many replacement workers got this slot in the last `_RESTART_WINDOW_S` seconds."""
        recent = [when for when in self._filled.get(slot, ()) if now - when < _RESTART_WINDOW_S]
        self._filled[slot] = recent
        return len(recent)

    def count_late(self, slot: int, is_late: bool) -> int:
        """Record that a process in this slot has exited, and count successive processes that weren't ready to join.

        Args:
            slot: the slot of the exited process.
            is_late: whether the exited process wasn't ready to join in time.

        Returns: How many successive processes in this slot weren't ready in time, including the exited process. 0 if
            the exited process was ready in time.
        """
        self._late[slot] = self._late.get(slot, 0) + 1 if is_late else 0
        return self._late[slot]

    def count_restart(self, slot: int, now: float) -> None:
        self._filled.setdefault(slot, []).append(now)

    def end_pause(self) -> None:
        self.vacant += self.pausing
        self.pausing.clear()

    # ---- the desired cluster ----

    def members_to_leave(self, living: Collection[PeerID]) -> set[PeerID]:
        """Return the members that leave, or whose host leaves; an empty set if no other member would be left.

        Each call looks up the leaving hosts again, because another writer of the cluster might list workers on a
        leaving host again without knowing that it is leaving.
        """
        leaving = self.leaving | self.going(living)
        return set() if leaving.issuperset(living) else leaving

    def going(self, living: Collection[PeerID]) -> set[PeerID]:
        """Return the workers on hosts that are draining or have been removed."""
        removed = self.hosts.leaving | self.hosts.lost
        return {peer for peer in {*self.newest.workers, *living} if peer.host in removed}

    def revision(
        self, last_version: int, ended: Collection[PeerID], living: Sequence[PeerID], taken_ports: Collection[int]
    ) -> Cluster | None:
        """Return the cluster to write now, as described in `revised`.

        Raises:
            ValueError: a new worker needs a port, but none is free.
        """
        removed = {*ended, *self.members_to_leave(living)}
        ports = [port for port in self._options.ports if port not in taken_ports]
        last_version = max(last_version, self.last_version)
        newest, slots = self.hosts.described(self.newest), self.hosts.slots_by_host
        if slots is not None and len(slots) < len(self.hosts.each):
            # Slots on removed hosts can't get a new worker, so they no longer count as vacant.
            left = sum(worker not in removed for worker in newest.workers)
            del self.vacant[max(0, sum(slots.values()) - left) :]
        return policy.revised(
            newest, last_version, removed, living, len(self.vacant), ports, slots, self.has_other_hosts(self.newest)
        )

    def has_other_hosts(self, cluster: Cluster) -> bool:
        """Return whether the slots that `cluster` lists differ from the slots of the job's present hosts.

        If they differ, the job adopts one more version with the same workers. Adopting it takes milliseconds, and hosts
        change rarely.
        """
        return cluster.slots != self.hosts.described(cluster).slots

    def accept(
        self, cluster: Cluster, own: bool, ended: Collection[PeerID], living: Collection[PeerID]
    ) -> list[PeerID]:
        """Make `cluster` the desired cluster. Return the joining workers that take the slots of failed workers.

        Args:
            own: whether the controller wrote `cluster`. If another writer wrote it, the size of `cluster` is the size
                that the writer wants.
            ended: the workers of `cluster` that have exited.
            living: the members that are running.
        """
        before, self.newest = self.newest, cluster
        if not own:
            # If the new cluster no longer lists a failed worker, no other worker replaces that worker.
            self.end_pause()
            del self.vacant[: max(0, len(self.vacant) - len(ended))]
            return []
        joining = [peer for peer in cluster.workers if peer not in before.workers]
        # If a leaving member is the only one that has the training state, it stays and takes a failed worker's slot.
        del self.vacant[: sum(peer in living for peer in joining)]
        return [peer for peer in joining if peer not in living]
