"""Begin a training call on a worker, either together with the other workers or in the middle of their call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

from ms_kungfu import membership, runtime
from ms_kungfu.elastic import event_log, program, state_transfer
from ms_kungfu.elastic.carried import Carried
from ms_kungfu.elastic.changes import ClusterChanges
from ms_kungfu.elastic.checkpoint import Checkpointing
from ms_kungfu.elastic.measuring import Measuring
from ms_kungfu.elastic.program import Training, is_behind


@dataclass(frozen=True)
class Beginning:
    """Begin the training calls of one `ElasticTraining`.

    `prepare` compiles the first step. `size_after` maps a step to the size that the schedule requests at that step.
    """

    training: Training
    prepare: Callable[[], None] | None
    size_after: Callable[[int], int | None]
    carried: Carried
    measuring: Measuring
    checkpoints: Checkpointing
    changes: ClusterChanges

    def run(self) -> bool:
        """Begin a training call (collective).

        Return False if the call must run no steps, because this worker has left or its state belongs to a later call.
        """
        training = self.training
        call = self.carried.begin()
        self.changes.begin()
        training.epoch, training.first_step = 0, training.step
        if not runtime.detached():
            self._prepare()
        if membership.is_joining() and not runtime.detached():
            membership.join()  # the other workers continue training until this worker has called `join`
        if runtime.detached():
            self.changes.suspend(True)
            return False
        joins = membership.is_joining()  # true until this worker has received the state
        if not self._receive(call, joins):
            return False
        self.carried.scale_rates()
        if not training.asynchronous:
            self.changes.consistency = self.carried.consistency()
        resume = program.current().resume
        if resume is None or call > resume["call"]:
            self._start_anew()
        else:
            self._go_on(resume, joins)
        self.changes.statistics.resume()
        self.changes.job_end.begin()
        membership.training_begun(training.step)
        return True

    def _prepare(self) -> None:
        """Do slow preparations now, because the other workers have to wait for this worker later."""
        data, shards = self.training.dataset, self.carried.deals_shards
        if shards:
            # Do this before the program creates kernels, because the kernels' results depend on the number of cores.
            membership.fix_cores()
        if self.prepare is not None and (membership.is_joining() or shards):
            began = membership.monotonic()
            with membership.doing("compilation"):
                self.prepare()  # with shards, compile for all ranks' shapes, because this worker's rank may change
            membership.report("compiled", seconds=membership.monotonic() - began)
        if data is not None:
            data.read_contents()

    def _receive(self, call: int, joins: bool) -> bool:
        """Receive the state if the other workers or a checkpoint have it (collective).

        Return False if the state belongs to a later training call.
        """
        training, mine = self.training, program.current()
        self.changes.agree_on_trained(joins)
        if joins:
            state_transfer.share_state(training.training_state)
            if not is_behind():
                event_log.joined(training.step if mine.resume is None else mine.resume["step"])
        resumed = self.checkpoints.begin(joins, mine.resume is not None and call <= mine.resume["call"])
        if is_behind():
            event_log.passes(call, mine.call_of_state)
            self.changes.suspend(True)
            return False
        if resumed and training.dataset is not None and runtime.current_cluster_size() > 1:
            state_transfer.compare_contents(training.dataset)
        return True

    def _start_anew(self) -> None:
        """Begin a new training call together with all other workers (collective)."""
        training, data = self.training, self.training.dataset
        if runtime.current_cluster_size() > 1:
            state_transfer.begin_alike(training.training_state, None if data is None else data.same_at_all())
            if data is not None:
                if not training.asynchronous:
                    state_transfer.begin_data_alike(data)
                state_transfer.compare_contents(data)
        self.changes.suspend(False)
        self.measuring.begin()
        self.measuring.ask("before_train")
        self.changes.change_to(self.size_after(0) if training.step == 0 else None)

    def _go_on(self, resume: dict[str, Any], joins: bool) -> None:
        """Continue a training call that the other workers or an earlier job have begun."""
        training = self.training
        training.step, training.first_step, training.epoch = resume["step"], resume["first_step"], resume["epoch"]
        program.current().resuming = True
        self.changes.suspend(is_behind())
        if joins:
            self.checkpoints.make_up(training.step)
        self.measuring.begin()
