"""What is promised whatever happens: one outcome a step, one state a version, an exact ledger, and an end."""

from __future__ import annotations

from ms_kungfu import env
from ms_kungfu.dataset import audit
from ms_kungfu.dataset.ledger import Claim, End, Record, Shards
from ms_kungfu.elastic.state_transfer import StateLostError
from ms_kungfu.launcher.state.policy import Recover
from tests.fault.simulator.setting import Violation
from tests.fault.simulator.shards import Undisturbed, updated


class Promises:
    """Of a `World`."""

    def __init__(self, setup, before):
        self.steps = {}  # number -> (version, participants, weights)
        self.arrivals = {}  # version -> the state that all have there
        self.records = {}  # process -> lines of its ledger
        self.undisturbed = None if setup.shards is None else Undisturbed(setup)
        self.sync_points = {}  # version, number -> the place that all have after it
        self.shares = {}  # epoch, position -> processes that have trained it, of asynchronous ones
        self.trouble = []  # exceptions in workers
        self.checkpoints = {}  # step -> what is on the disk
        self.begun_checkpoints = set()  # of these steps
        self.survivors_at_verdict = 0  # members that have the training state
        self.wished = []  # clusters that were asked for from outside
        self.refused = set()  # versions
        self.first_version = None  # the first that was committed
        self.requesters = {}  # version -> its workers that have requested it, with the training state
        self.holders = {}  # version -> processes that came to it with the training state
        self.name, self.begins = "job 1", 0.0
        if before is not None:
            self.name, self.begins = before.name + "'", before.begins + before.loop.now
            self.records.update(before.records)
            self.checkpoints.update(before.checkpoints)

    def _is_excused(self, process, error):
        """Only what can't be helped: all workers that came to its version with the state have died, and one had it."""
        holders = self.holders.get(process.core.segment.version, ()) if process.core.segment is not None else ()
        return (
            isinstance(error, StateLostError)
            and bool(holders)
            and not any(holder.alive and holder.fatal is None for holder in holders)
        )

    def committed(self, program, epoch, step, share, common):
        """A step goes on record at a worker: it has one outcome, at all of them."""
        participants = common["participants"]
        outcome = (common["version"], participants, program.weights, *program.losses)
        number, who = program.training.step, program.process.name
        known = self.steps.setdefault(number, outcome)
        if known != outcome:
            raise Violation(f"step {number} has two outcomes: {known} and, at {who}, {outcome}")
        dealt = None
        if self.undisturbed is None:
            self._check_reduced(program, number, participants)
        else:
            unit = common["global_batch"] // common["shards"]
            dealt = Shards(unit, tuple(common["weights"]), common["sums"])
            if program.weights != self.undisturbed.after(number):
                raise Violation(f"{who} has other weights after step {number} than one worker to which nothing happens")
        self.place("before the record")
        claim = Claim(
            common["version"], common["size"], step.members, participants, step.batch, common["total"], common["seed"],
            common["shuffle"], dealt,
        )  # fmt: skip
        self._record(program, epoch, step.number, share, claim)

    def _check_reduced(self, program, number, participants):
        """All of the step's reductions have its participants, and nothing else has made its weights."""
        who = program.process.name
        for brought in program.brought:
            if tuple(brought) != participants:
                raise Violation(f"{who}: {participants} took part, {tuple(brought)} are in the result")
        before = self.steps.get(number - 1)
        if before is not None or number == 1:
            weights = 0 if before is None else before[2]
            for brought in program.brought:
                weights = updated(weights, brought.items())
            if weights != program.weights:
                raise Violation(f"{who}: the weights after step {number} don't follow from those before it")

    def ended(self, program, walk, common):
        end = End(walk.pool, common["global_batch"], common["drop_remainder"])
        self._record(program, walk.epoch, walk.steps, (), end)

    def _record(self, program, epoch, step, share, claim):
        lines = self.records.setdefault(f"{self.name}, {program.process.name}", [])
        where = f"{self.name}, {program.process.name}, line {len(lines) + 1}"
        time = self.begins + self.loop.now
        lines.append(Record(where, self.name, time, 0, epoch, step, program.core.rank(), share, claim))

    def trained(self, program, epoch, step):
        """An asynchronous worker's share of a step."""
        self.steps.setdefault((program.core.cluster_version(), program.training.step + 1), None)
        for first, last in step.share(program.core.rank()):
            for position in range(first, last):
                self.shares.setdefault((epoch, position), []).append(program.process)

    def met(self, program, version, number):
        """At a sync point: all workers there go on from the same place."""
        self._same(self.sync_points, (version, number), program, f"sync point {number} of version {version}")

    def arrived(self, program):
        """After a change: all members of a version go on from the same state."""
        version = program.core.cluster_version()
        self._same(self.arrivals, version, program, f"version {version}")

    def _same(self, known, key, program, what):
        state = known.setdefault(key, program.state())
        if state != program.state():
            raise Violation(f"{what} has two states: {state} and, at {program.process.name}, {program.state()}")

    def _check_end(self, code):
        members = [p for p in self.everybody if p.program is not None]
        finished_well = code == 0
        for entry in self.trouble:
            if isinstance(entry, Violation):
                raise entry
        if not finished_well and self.survivors_at_verdict == 0:  # then that is what a worker that comes too late finds
            self.trouble = [entry for entry in self.trouble if not isinstance(entry[1], StateLostError)]
        if self.trouble:
            process, error = self.trouble[0]
            raise Violation(f"{process.name} failed: {type(error).__name__}: {error}")
        if not finished_well and "-min-np" not in self.verdict.reason:
            if self.survivors_at_verdict > 0:
                raise Violation(f"the job failed though a worker with the state lives: {self.verdict.reason}")
            self._check_committed(self.broker.versions.current.version)
        if finished_well:
            self._check_checkpoints()
        if self.setup.asynchronous:
            for (epoch, position), trainers in self.shares.items():
                lived = [process.name for process in trainers if not process.killed]
                if len(lived) > 1:
                    raise Violation(f"sample {position} of epoch {epoch} was trained by {' and '.join(lived)}")
            if finished_well:
                if not self.steps:
                    raise Violation("the job finished without a step")
                self._check_size()
            return
        report = audit.audit(self.records)
        if report.problems or not all(epoch.exact or not (finished_well or epoch.finished) for epoch in report.epochs):
            raise Violation("the ledger is not exact:\n" + audit.to_text(report))
        if finished_well:
            if not members or not self.steps:
                raise Violation("the job finished without a step")
            if not all(epoch.finished and epoch.exact for epoch in report.epochs):
                raise Violation("the job finished in the middle of an epoch:\n" + audit.to_text(report))
            self._check_size()

    def _check_committed(self, version):
        """A worker comes to the version with the training state, or all that have requested it failed before they did:
        by a kill before the job's end was known, or with a host that was declared lost by then."""
        there = self.requesters.get(version, ())
        have_failed = there and all(each.killed or each.host.was_killed or each.host.is_lost for each in there)
        if version != self.first_version and not self.holders.get(version) and not have_failed:
            raise Violation(f"version {version} was committed, and no worker came to it with the training state")

    def _check_checkpoints(self):
        """The last one that was due, or a later one in its place, is there, whatever died while writing it; and one
        that was lost was made up for in the next change, unless another was due before."""
        every = self.setup.checkpoint_every
        if every is None:
            return
        last = max((step if isinstance(step, int) else step[1] for step in self.steps), default=0)
        if last >= every and max(self.checkpoints, default=0) < last // every * every:
            raise Violation(f"after {last} steps there are checkpoints of {sorted(self.checkpoints)}, due each {every}")
        lost = self.begun_checkpoints.difference(self.checkpoints)
        changes = [state["step"] for state in self.arrivals.values()]
        for step in lost:
            until = range(step, step // every * every + every)
            if len(lost.intersection(until)) == 1 and any(map(until.__contains__, changes)):
                if not self.checkpoints.keys() & set(until):
                    raise Violation(f"the checkpoint of step {step} was lost, and no worker has made up for it")

    def _check_size(self):
        """Whatever was asked for has come true, as there was time."""
        committed, newest = self.broker.versions.current, self.broker.versions.newest
        if newest.version != committed.version and self.wanted_at[newest.version] < self.quiet_from:
            raise Violation(f"version {newest.version} was never chosen, {committed.version} was the last")
        stored = self.server.store.cluster
        if not self.server.away and stored is not None and stored.version == newest.version and stored != newest:
            raise Violation(f"version {newest.version} is {stored} in the store, and {newest} for the launcher")
        setup, kinds = self.setup, {h.kind for h in self.happenings}
        deaths = {"kill member", "kill newcomer", "kill lone", "kill at", "stop", "stop at", "freeze"}
        harmless = {"pause", "slow", "no descriptors", "server away"}
        if setup.schedule and kinds <= harmless:
            last = max((step if isinstance(step, int) else step[1] for step in self.steps), default=0)
            due = [entry for entry in sorted(dict(setup.schedule).items()) if entry[0] < last]
            if due and committed.size != due[-1][1]:
                raise Violation(f"the schedule has {due[-1][1]} workers after {last} steps, {committed.size} are there")
        if setup.schedule or setup.grown or not kinds <= deaths | harmless | {"resize"}:
            return
        if self.refused:
            return  # one that could not come true has hidden those before it
        expected = max(self.wished, key=lambda wish: wish.version).size if self.wished else setup.size
        if setup.recover is Recover.SHRINK:
            if self.wished:
                return  # workers that died before the last request are in its size already, or not
            expected -= sum((p.killed or p.fatal is not None) and env.SELF.name in p.environ for p in self.everybody)
        if self.deaths < setup.max_restarts and committed.size != expected:
            raise Violation(f"{expected} workers are to be there in the end, {committed.size} are")
