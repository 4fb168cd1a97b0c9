"""Write a last checkpoint before a signal to the launcher ends the job.

1. The launcher notifies the workers that have a checkpoint folder and are in a call of training (`JobEnd`).
2. Each worker finishes its current step. After that step all workers agree that the job ends, even if some workers
   haven't been notified yet.
3. The workers write the checkpoint of that step. Then each worker closes its connection, and waits for the signal.
4. The launcher sends the signal once all workers have closed their connections. The signal ends the program as if it
   had arrived in the middle of a step.

A program with its own handler for the signal continues training until the signal arrives. The handler then determines
how the program ends.
"""

from __future__ import annotations

import signal
import sys
import threading
from dataclasses import dataclass

from ms_kungfu import membership
from ms_kungfu.dataset import replaying
from ms_kungfu.elastic import event_log, program
from ms_kungfu.elastic.checkpoint import Checkpointing
from ms_kungfu.elastic.statistics import StepStatistics

_LOOK_S = 0.05


@dataclass
class LastCheckpoint:
    """The last checkpoint of one training."""

    checkpoints: Checkpointing
    statistics: StepStatistics
    agreed: int = 0  # the signal that ends the job after this step, or 0; the same at all workers
    _watch: membership.JobEnd | None = None

    def begin(self) -> None:
        """Begin to wait for the launcher's message, as a call of training begins."""
        self.end()
        if self.checkpoints.folder is not None and replaying.current() is None:
            self._watch = membership.watch_job_end()

    def end(self) -> None:
        """Stop waiting for the launcher's message, as the call of training ends."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    @property
    def signal(self) -> int:
        """The number of the signal that ends the job, if this worker has been notified; otherwise 0."""
        return 0 if self._watch is None else self._watch.signal

    def carry_out(self, step: int) -> None:
        """If the job ends after this step, write the checkpoint and wait for the signal; collective."""
        number, self.agreed = self.agreed, 0
        if not number:
            return
        event_log.job_ends(step, signal.Signals(number).name)
        self.statistics.report_rest()  # never waits; `StepStatistics.end` isn't reached if the signal ends the program
        if program.current().checkpoint != step:  # otherwise this step's checkpoint has been written already
            self.checkpoints.write(step)
        if self.checkpoints.folder is not None:
            self.checkpoints.folder.wait()
        self.end()
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler):
            return
        while threading.main_thread().is_alive():
            membership.current().ports.sleep(_LOOK_S)
        sys.exit()  # KeyboardInterrupt has ended the main thread; this code runs in another thread
