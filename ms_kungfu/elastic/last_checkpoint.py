"""Write a final checkpoint before a signal to the launcher, or a SIGTERM to a worker, ends the job.

1. The launcher notifies the workers that have a checkpoint folder and are in a training call (`JobEnd`).
2. Each worker finishes its current step. After that step, all workers agree to end the job, even if the launcher hasn't
   notified some of them yet.
3. The workers write the checkpoint of that step. Then each worker closes its connection to the launcher, and waits for
   the signal.
4. As soon as all workers have closed their connections, the launcher sends them the signal. The signal ends the program
   as if it had arrived in the middle of a step.

If a program has its own handler for the signal, it continues training until the signal arrives. The handler then
determines how the program ends.
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
    """Write the final checkpoint before a signal ends the job."""

    checkpoints: Checkpointing
    statistics: StepStatistics
    agreed: int = 0  # the signal that ends the job after this step, or 0; the same on all workers
    _watch: membership.JobEnd | None = None

    def begin(self) -> None:
        """Begin to listen for the launcher's notification. Called when a training call begins."""
        self.end()
        if self.checkpoints.folder is not None and replaying.current() is None:
            self._watch = membership.watch_job_end()

    def end(self) -> None:
        """Stop listening for the launcher's notification. Called when a training call ends."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    @property
    def signal(self) -> int:
        """The number of the signal that ends the job; 0 if the launcher hasn't notified this worker."""
        return 0 if self._watch is None else self._watch.signal

    def carry_out(self, step: int) -> None:
        """If the job ends after this step, write the checkpoint and wait for the signal (collective)."""
        number, self.agreed = self.agreed, 0
        if not number:
            return
        event_log.job_ends(step, signal.Signals(number).name)
        self.statistics.report_rest()  # report now, because the signal may end the program before `StepStatistics.end`
        if program.current().checkpoint != step:  # otherwise this step's checkpoint has been written already
            self.checkpoints.write(step)
        if self.checkpoints.folder is not None:
            self.checkpoints.folder.wait()
        self.end()
        if signal.getsignal(number) not in (signal.SIG_DFL, signal.default_int_handler):
            return
        while threading.main_thread().is_alive():
            membership.current().ports.sleep(_LOOK_S)
        sys.exit()  # this isn't the main thread, which KeyboardInterrupt has ended
