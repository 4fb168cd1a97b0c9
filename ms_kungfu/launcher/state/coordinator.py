"""What is decided for a job as a whole. Pure: reports come in from its hosts, decisions with reasons go out.

Beside it stand `policy` (what an event leads to), and `versions` (who goes over to which cluster, and when).
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
    """The desired cluster, what has become of the job's workers so far, and the places that are to be filled anew.

    Times are seconds of the caller's clock.
    """

    def __init__(self, options: Options, first: Cluster) -> None:
        self._options = options
        self.hosts = options.hosts  # and what has become of them
        self.newest = first  # that can be run
        self.last_version = first.version  # the newest that anybody has written, also if this host can't run it
        self.finishing = False  # a member has finished its program
        self.leaving: set[PeerID] = set()  # those who have been granted to leave
        self.vacant: list[int] = []  # places that a new worker is to take
        self.pausing: list[int] = []  # places that are vacant after a pause, for all of them the same
        self._filled: dict[int, list[float]] = {}  # place -> when it was filled anew
        self._late: dict[int, int] = {}  # place -> joining workers in a row that weren't ready in time
        self._state = Situation(recover=options.recover, min_size=options.min_size, max_restarts=options.max_restarts)

    def decide(self, event: WorkerExited | WorkerWorksOn, count: Headcount) -> Verdict:
        """What to do about `event`."""
        return policy.decide(event, replace(self._state, **vars(count), finished=self.finishing))

    def takes_over(self, lost: Sequence[PeerID], count: Headcount) -> Verdict | None:
        """What a controller finds who goes on with a job: its end, where no member is left. `lost`: those of the chosen
        cluster on hosts whose loss is on record, so that nobody tells of their deaths any more."""
        if lost:
            who = f"worker {lost[0]} was on host {lost[0].host}, which was lost"
            self._state.first_failure = self._state.first_failure or Failure(who, 1, is_of_launcher=True)
        state = replace(self._state, **vars(count), finished=self.finishing and not lost)
        return policy.after_end("", state)

    # ---- what workers have come to ----

    def member_finished(self, who: str) -> None:
        self._state.first_to_finish = self._state.first_to_finish or who

    def member_failed(self, who: str, code: int, error: str, logs: str) -> bool:
        """Whether it is the first whose program failed by itself: the job will end with its code."""
        failure = Failure(f"{who} {error or policy.how_it_ended(code)}", policy.exit_code_of(code), bool(error))
        self._state.first_failure = self._state.first_failure or failure
        # Who could not be started, or was killed, has an `error`: no program failed there.
        if error or not policy.fails_by_itself(code) or self._state.program_failure is not None:
            return False
        named = f", see {logs}" if logs else ""
        self._state.program_failure = Failure(f"{failure.reason}{named}", failure.exit_code)
        return True

    @property
    def failures(self) -> tuple[Failure | None, Failure | None]:
        """The first that the job has survived, and the first of a program by itself: for the next controller."""
        return self._state.first_failure, self._state.program_failure

    def resume_failures(self, first: Failure | None, programs: Failure | None) -> None:
        self._state.first_failure, self._state.program_failure = first, programs

    # ---- places ----

    def restarts_of(self, slot: int, now: float) -> int:
        """How often it was filled anew lately."""
        recent = [when for when in self._filled.get(slot, ()) if now - when < _RESTART_WINDOW_S]
        self._filled[slot] = recent
        return len(recent)

    def count_late(self, slot: int, is_late: bool) -> int:
        """A process in this place has ended: how many in a row, with it, weren't ready to join in time."""
        self._late[slot] = self._late.get(slot, 0) + 1 if is_late else 0
        return self._late[slot]

    def count_restart(self, slot: int, now: float) -> None:
        self._filled.setdefault(slot, []).append(now)

    def end_pause(self) -> None:
        self.vacant += self.pausing
        self.pausing.clear()

    # ---- the desired cluster ----

    def members_to_leave(self, living: Collection[PeerID]) -> set[PeerID]:
        """Of those who were granted it, or whose host leaves; none where nobody else is left: the last one stays.

        Whose host leaves is looked up each time: somebody who writes a cluster may list them again, or new ones there,
        because he hasn't heard of it.
        """
        leaving = self.leaving | self.going(living)
        return set() if leaving.issuperset(living) else leaving

    def going(self, living: Collection[PeerID]) -> set[PeerID]:
        """Who is, or is to be, on a host that leaves or has gone."""
        removed = self.hosts.leaving | self.hosts.lost
        return {peer for peer in {*self.newest.workers, *living} if peer.host in removed}

    def revision(
        self, last_version: int, ended: Collection[PeerID], living: Sequence[PeerID], taken_ports: Collection[int]
    ) -> Cluster | None:
        """What has to be written now; see `revised`. ValueError where no port is free for a new worker."""
        removed = {*ended, *self.members_to_leave(living)}
        ports = [port for port in self._options.ports if port not in taken_ports]
        last_version = max(last_version, self.last_version)
        newest, slots = self.hosts.described(self.newest), self.hosts.slots_by_host
        if slots is not None and len(slots) < len(self.hosts.each):
            # Some of the places were on hosts that nobody has any more.
            left = sum(worker not in removed for worker in newest.workers)
            del self.vacant[max(0, sum(slots.values()) - left) :]
        return policy.revised(
            newest, last_version, removed, living, len(self.vacant), ports, slots, self.has_other_hosts(self.newest)
        )

    def has_other_hosts(self, cluster: Cluster) -> bool:
        """Whether `cluster` gives whoever resizes it slots that aren't there, or not all that are. Then the same
        workers go over to one more version: hosts come and go seldom, and a change costs some milliseconds."""
        return cluster.slots != self.hosts.described(cluster).slots

    def accept(
        self, cluster: Cluster, own: bool, ended: Collection[PeerID], living: Collection[PeerID]
    ) -> list[PeerID]:
        """`cluster` is wanted from now on. Its joining workers who take the places of those who have died.

        Args:
            own: it is a revision of the launcher's. Anybody else has written the size that he wants.
            ended: its workers who have died; `living`: the members who live.
        """
        before, self.newest = self.newest, cluster
        if not own:
            # Only those that it still lists are to be replaced.
            self.end_pause()
            del self.vacant[: max(0, len(self.vacant) - len(ended))]
            return []
        joining = [peer for peer in cluster.workers if peer not in before.workers]
        # A member that was to go, and stays because nobody else has the state, is in the place of one that died.
        del self.vacant[: sum(peer in living for peer in joining)]
        return [peer for peer in joining if peer not in living]
